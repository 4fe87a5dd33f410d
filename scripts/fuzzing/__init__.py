"""Random calls and files for ``scripts/fuzz.py``, and independent formulas to judge the results by."""
