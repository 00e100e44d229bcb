"""Benchmarks of single parts; run one with `python -m benchmarks.<name>`."""
