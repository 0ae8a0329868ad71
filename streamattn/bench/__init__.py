"""Benchmarks: each is a module to run, checks its results before it times them, and writes CSV."""
