"""A small fully connected network in numpy: ReLU layers, softmax cross-entropy, SGD with momentum."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

__all__ = ["Matrix", "Network", "Pass"]

Matrix = npt.NDArray[np.float64]


@dataclass(slots=True)
class Pass:
    """What one forward and backward pass gave, and when (seconds of ``time.perf_counter()``).

    Attributes:
        loss: Sum over the images, divided by the size of the global batch.
        forward: Begin and end of the forward pass.
        layers: Begin and end of each layer's backward, by name, in the order in which they ran.
    """

    loss: float
    forward: tuple[float, float]
    layers: dict[str, tuple[float, float]] = field(default_factory=dict)


class Network:
    """A classifier with the given layer widths; the same seed gives the same weights on every rank.

    Attributes:
        parameters: Weights and biases by name, in the order in which backward produces their gradients.
    """

    def __init__(self, widths: tuple[int, ...], *, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self._depth = len(widths) - 1
        drawn: dict[str, Matrix] = {}
        for layer, (inputs, outputs) in enumerate(itertools.pairwise(widths), start=1):
            drawn[f"layer{layer}.bias"] = np.zeros(outputs)
            drawn[f"layer{layer}.weight"] = random.normal(0, np.sqrt(2 / inputs), (inputs, outputs))
        self.parameters = {
            f"layer{layer}.{kind}": drawn[f"layer{layer}.{kind}"] for layer in range(self._depth, 0, -1) for kind in ("bias", "weight")
        }
        self._velocity = {name: np.zeros_like(value) for name, value in self.parameters.items()}

    def gradients(self, images: Matrix, labels: npt.NDArray[np.int64], batch: int, give: Callable[[str, Matrix], object]) -> Pass:
        """Run forward and backward over this rank's images and hand each gradient to `give` as soon as it is there.

        Gradients are sums over the images divided by `batch`, the size of the global batch: their sum over the ranks is the gradient
        of the whole batch, however unevenly it was shared out.
        """
        begin = time.perf_counter()
        inputs, scores = self._forward(images)
        probabilities = _softmax(scores)
        rows = np.arange(len(labels))
        loss = -float(np.log(probabilities[rows, labels]).sum()) / batch
        delta = probabilities
        delta[rows, labels] -= 1
        delta /= batch
        done = Pass(loss, (begin, time.perf_counter()))
        for layer in range(self._depth, 0, -1):
            begin = time.perf_counter()
            give(f"layer{layer}.bias", delta.sum(axis=0))
            give(f"layer{layer}.weight", inputs[layer - 1].T @ delta)
            if layer > 1:
                delta = delta @ self.parameters[f"layer{layer}.weight"].T
                delta *= inputs[layer - 1] > 0
            done.layers[f"layer{layer}"] = (begin, time.perf_counter())
        return done

    def update(self, gradients: Mapping[str, Matrix], *, rate: float, momentum: float) -> None:
        """Take one step of stochastic gradient descent with momentum."""
        for name, gradient in gradients.items():
            velocity = self._velocity[name]
            velocity *= momentum
            velocity -= rate * gradient
            self.parameters[name] += velocity

    def accuracy(self, images: Matrix, labels: npt.NDArray[np.int64]) -> float:
        """Return the share of images whose digit is recognised."""
        return float((self._forward(images)[1].argmax(axis=1) == labels).mean())

    def _forward(self, images: Matrix) -> tuple[list[Matrix], Matrix]:
        """Return the input of every layer, and the scores."""
        inputs, values = [images], images
        for layer in range(1, self._depth + 1):
            values = values @ self.parameters[f"layer{layer}.weight"] + self.parameters[f"layer{layer}.bias"]
            if layer < self._depth:
                np.maximum(values, 0, out=values)
                inputs.append(values)
        return inputs, values


def _softmax(scores: Matrix) -> Matrix:
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))
