"""Types that calls take beside arrays, and file formats."""
