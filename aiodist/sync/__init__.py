"""Blocking calls in the shape of `megengine.distributed`: ``import aiodist.sync as dist``."""
