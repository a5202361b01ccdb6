"""The training loop, on one process and data-parallel."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from aiodist.buckets import AllreduceCallback, Bucket
from aiodist.demo import data
from aiodist.demo.network import Network, Pass

if TYPE_CHECKING:
    from aiodist.group import Group

__all__ = ["EPOCHS", "Outcome", "Progress", "Recipe", "Span", "Step", "train_alone", "train_parallel"]

EPOCHS: Final = 12
"""Passes over the images of a whole training."""

Span = tuple[float, float]
Progress = Callable[[int, float | None], None]
"""Told the number of steps done, and the mean loss of the newest whole epoch."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is trained; equal recipes train equal networks.

    Attributes:
        epochs: Passes over the images.
        batch: Images of a global batch, shared out to the ranks.
        widths: Width of the input, of each hidden layer and of the output.
        rate: Learning rate.
        momentum: Momentum of the descent.
        bucket_nbytes: Size of a bucket of gradients; small, so that there are several.
    """

    epochs: int = EPOCHS
    batch: int = 128
    widths: tuple[int, ...] = (64, 512, 512, 256, 10)
    rate: float = 0.05
    momentum: float = 0.9
    bucket_nbytes: int = 1 << 19

    def steps(self, images: int) -> int:
        """Return the number of steps of the whole training."""
        return self.epochs * -(-images // self.batch)


@dataclass(frozen=True, slots=True)
class Step:
    """When the parts of one step ran, in seconds from its begin.

    Attributes:
        forward: The forward pass.
        layers: Each layer's backward, by name.
        buckets: Each bucket's all_reduce, from its issue until the event loop saw it done, by label.
        wait: What was left to wait for after backward.
        update: The optimizer.
    """

    forward: Span
    layers: dict[str, Span]
    buckets: dict[str, Span]
    wait: Span
    update: Span

    @property
    def computing(self) -> float:
        """Seconds of forward, backward and the optimizer."""
        return self.wait[0] + self.update[1] - self.update[0]

    @property
    def communicating(self) -> float:
        """Seconds in which at least one bucket was under way."""
        total, reached = 0.0, 0.0
        for begin, end in sorted(self.buckets.values()):
            total += max(0.0, end - max(begin, reached))
            reached = max(reached, end)
        return total

    @property
    def waiting(self) -> float:
        """Seconds of communication that backward did not hide."""
        return self.wait[1] - self.wait[0]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a data-parallel training gave.

    Attributes:
        losses: Mean loss of each epoch.
        seconds: For each rank: computing, communicating, waiting.
        equal: Whether the parameters are bit for bit the same on all ranks.
        step: A step of median length of the last epoch, on this rank.
    """

    losses: list[float]
    seconds: list[list[float]]
    equal: bool
    step: Step


def train_alone(recipe: Recipe, digits: data.Digits, progress: Progress) -> tuple[Network, list[float]]:
    """Train on this process alone; return the network and the loss of each epoch."""
    network, losses, number = Network(recipe.widths), list[float](), 0
    count = len(digits.train_images)
    for epoch in range(recipe.epochs):
        total = 0.0
        for rows in data.batches(count, recipe.batch, epoch=epoch):
            gradients: dict[str, Any] = {}
            done = network.gradients(digits.train_images[rows], digits.train_labels[rows], len(rows), gradients.__setitem__)
            network.update(gradients, rate=recipe.rate, momentum=recipe.momentum)
            total += done.loss * len(rows)
            number += 1
            progress(number, losses[-1] if losses else None)
        losses.append(total / count)
        progress(number, losses[-1])
    return network, losses


async def train_parallel(world: Group, recipe: Recipe, digits: data.Digits, progress: Progress) -> tuple[Network, Outcome]:
    """Train on all ranks of `world`, each with its share of every batch; all end with the same network."""
    network = Network(recipe.widths)
    callback = AllreduceCallback(network.parameters, world, op="sum", bucket_nbytes=recipe.bucket_nbytes)
    losses, steps, seconds, number = list[float](), list[Step](), np.zeros(3), 0
    count = len(digits.train_images)
    for epoch in range(recipe.epochs):
        total, steps = np.zeros(1), []
        for rows in data.batches(count, recipe.batch, epoch=epoch):
            mine = data.shard(rows, world.rank, world.size)
            loss, step = await _step(callback, network, recipe, digits, mine, len(rows))
            steps.append(step)
            seconds += (step.computing, step.communicating, step.waiting)
            total += loss * len(rows)
            number += 1
            progress(number, losses[-1] if losses else None)
        losses.append(float((await world.all_reduce(total))[0] / count))
        progress(number, losses[-1])
    everyone = await world.all_gather(seconds[np.newaxis])
    digests = await world.all_gather(_digest(network)[np.newaxis])
    median = sorted(steps, key=lambda step: step.wait[1])[len(steps) // 2]
    return network, Outcome(losses, everyone.tolist(), bool((digests == digests[0]).all()), median)


async def _step(
    callback: AllreduceCallback, network: Network, recipe: Recipe, digits: data.Digits, rows: Any, batch: int
) -> tuple[float, Step]:
    """Take one step: backward runs in a thread and starts buckets from there, while this loop serves what is under way."""
    images, labels = digits.train_images[rows], digits.train_labels[rows]
    start = time.perf_counter()
    watch = [asyncio.create_task(_span(bucket)) for bucket in callback.buckets]
    try:
        done = await asyncio.to_thread(network.gradients, images, labels, batch, callback)
        computed = max(end for _, end in done.layers.values())
        gradients = await callback.wait()
        reduced = time.perf_counter()
        spans = await asyncio.gather(*watch)
    finally:
        for task in watch:
            task.cancel()
        await asyncio.gather(*watch, return_exceptions=True)
    begin = time.perf_counter()
    await asyncio.to_thread(network.update, gradients, rate=recipe.rate, momentum=recipe.momentum)
    updated = time.perf_counter()
    labelled = {_label(bucket): span for bucket, span in zip(callback.buckets, spans, strict=True)}
    return done.loss, _relative(start, done, labelled, (computed, reduced), (begin, updated))


async def _span(bucket: Bucket) -> Span:
    await bucket
    end = time.perf_counter()
    return bucket.issued_at or end, end


def _label(bucket: Bucket) -> str:
    return f"bucket {bucket.index} ({bucket.nbytes / 1024:,.0f} KiB)"


def _relative(start: float, done: Pass, buckets: dict[str, Span], wait: Span, update: Span) -> Step:
    def shift(span: Span) -> Span:
        return span[0] - start, span[1] - start

    return Step(
        forward=shift(done.forward),
        layers={name: shift(span) for name, span in done.layers.items()},
        buckets={name: shift(span) for name, span in buckets.items()},
        wait=shift(wait),
        update=shift(update),
    )


def _digest(network: Network) -> Any:
    bits = b"".join(value.tobytes() for value in network.parameters.values())
    return np.frombuffer(hashlib.sha256(bits).digest(), np.uint8)
