"""Counts that do not depend on how fast or busy a machine is: instructions, and calls of Python functions."""
