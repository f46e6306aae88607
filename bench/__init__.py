"""Benchmarks of the proposers, each a command: ``python -m bench --help``."""
