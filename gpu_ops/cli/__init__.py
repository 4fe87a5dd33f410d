"""Commands of ``gpu-ops``, one per module, and what they print with."""
