"""What the project promises on one host beside the time of single calls: a row each, ``python -m benchmarks.host ROW``."""
