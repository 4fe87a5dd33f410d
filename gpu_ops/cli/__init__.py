"""The commands of ``python -m gpu_ops``: tables, reports, compiling ahead, terminals."""
