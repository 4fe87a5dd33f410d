"""Random calls and files for ``scripts/fuzz.py``, and formulas of their own to judge the results by."""
