"""Benchmarks of gpu_ops: ``python -m perf`` runs all, ``python perf/bench_rope.py`` runs one.

``README.md`` in this folder says what is measured and how to read it.
"""
