"""Micro-benchmarks: `make bench`, or `pytest bench/micro --benchmark-only`."""
