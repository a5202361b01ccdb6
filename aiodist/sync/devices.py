"""How many devices this machine has, asked in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

__all__ = ["get_device_count_by_fork"]

_SECONDS: Final = 60.0
# The driver alone is asked: no CUDA runtime need be installed, and no context is made, not even there.
_COUNT: Final = """
import ctypes
count = ctypes.c_int(0)
try:
    driver = ctypes.CDLL("libcuda.so.1")
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        count.value = 0
except OSError:
    pass
print(count.value)
"""


def get_device_count_by_fork(device_type: str) -> int:
    """Return how many devices of a kind this process may use, without touching CUDA in it; blocks for a moment.

    A fresh process asks the driver, so this one may still fork, or choose a device, afterwards.

    Args:
        device_type: ``"gpu"`` or ``"cuda"``; ``"cpu"`` counts the processors that this process may run on.

    Returns:
        The number; 0 GPUs where there is no driver, or none that works.

    Raises:
        TypeError, ValueError: `device_type` is something else.
        RuntimeError: the process that should have counted did not answer.
    """
    if not isinstance(device_type, str):
        raise TypeError(f"device_type must be a string, not {type(device_type).__name__}")
    if device_type == "cpu":
        return len(os.sched_getaffinity(0))
    if device_type not in ("gpu", "cuda"):
        raise ValueError(f"device_type must be 'gpu', 'cuda' or 'cpu', not {device_type!r}")
    try:
        done = subprocess.run([sys.executable, "-I", "-S", "-c", _COUNT], capture_output=True, text=True, timeout=_SECONDS, check=True)
        return int(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise RuntimeError(f"the process that counts devices did not answer: {error}") from error
