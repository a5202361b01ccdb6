"""Handwritten digits that ship with scikit-learn, and how a batch is shared out."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Digits", "batches", "load", "shard"]

_TEST_IMAGES = 360


@dataclass(frozen=True, slots=True)
class Digits:
    """8 x 8 images as rows of 64 values between 0 and 1, and the digits that they show."""

    train_images: npt.NDArray[np.float64]
    train_labels: npt.NDArray[np.int64]
    test_images: npt.NDArray[np.float64]
    test_labels: npt.NDArray[np.int64]


def load(seed: int = 0) -> Digits:
    """Load the 1,797 digits; the same `seed` holds out the same 360 of them for the test."""
    bunch = importlib.import_module("sklearn.datasets").load_digits()
    images, labels = np.asarray(bunch.data, np.float64) / 16, np.asarray(bunch.target, np.int64)
    order = np.random.default_rng(seed).permutation(len(images))
    test, train = order[:_TEST_IMAGES], order[_TEST_IMAGES:]
    return Digits(images[train], labels[train], images[test], labels[test])


def batches(count: int, size: int, *, epoch: int, seed: int = 0) -> Iterator[npt.NDArray[np.intp]]:
    """Yield the rows of each global batch of an epoch, shuffled the same way on every rank; the last one may be smaller."""
    order = np.random.default_rng((seed, epoch)).permutation(count)
    for start in range(0, count, size):
        yield order[start : start + size]


def shard(batch: npt.NDArray[np.intp], rank: int, ranks: int) -> npt.NDArray[np.intp]:
    """Return the rows of `batch` that are this rank's share."""
    return np.array_split(batch, ranks)[rank]
