"""Benchmarks of single parts: `python -m benchmarks` runs all, `python -m benchmarks.<name>` one."""
