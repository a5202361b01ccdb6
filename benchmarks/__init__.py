"""Benchmarks of aiodist beside its peers; not part of the installed package."""
