"""The demo: its network, its data-parallel training, its picture, and the command as a whole."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import aiodist
from aiodist import demo
from aiodist.demo import data, report
from aiodist.demo.network import Network
from aiodist.demo.training import Outcome, Recipe, Step, train_alone, train_parallel

needs_extra = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("sklearn", "matplotlib")), reason="the demo extra is not installed"
)
SMALL = Recipe(epochs=2, batch=50, widths=(64, 20, 10), bucket_nbytes=2000)
STEP = Step(
    forward=(0.0, 0.001),
    layers={"layer2": (0.001, 0.002), "layer1": (0.002, 0.004)},
    buckets={"bucket 0": (0.0015, 0.0025), "bucket 1": (0.002, 0.003), "bucket 2": (0.004, 0.0055)},
    wait=(0.004, 0.006),
    update=(0.006, 0.007),
)


def nothing(step: int, loss: float | None) -> None:
    """Show no progress."""


def batch(count: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    random = np.random.default_rng(1)
    return random.normal(size=(count, 6)), random.integers(0, 4, count)


def gradients_of(network: Network, images: npt.NDArray[Any], labels: npt.NDArray[np.int64], size: int) -> dict[str, npt.NDArray[Any]]:
    found: dict[str, npt.NDArray[Any]] = {}
    done = network.gradients(images, labels, size, found.__setitem__)
    assert list(found) == list(network.parameters)
    assert list(done.layers) == ["layer3", "layer2", "layer1"]
    return found


def test_backward_gives_the_slope_of_the_loss() -> None:
    network, (images, labels) = Network((6, 5, 5, 4)), batch(9)
    for name, gradient in gradients_of(network, images, labels, 9).items():
        place = np.unravel_index(np.abs(gradient).argmax(), gradient.shape)
        losses = []
        for shift in (1e-6, -2e-6):
            network.parameters[name][place] += shift
            losses.append(network.gradients(images, labels, 9, lambda name, gradient: None).loss)
        network.parameters[name][place] += 1e-6
        assert gradient[place] == pytest.approx((losses[0] - losses[1]) / 2e-6, rel=1e-4)


@pytest.mark.parametrize("ranks", [1, 2, 4, 11])
def test_the_shares_of_a_batch_add_up_to_its_gradient(ranks: int) -> None:
    network, (images, labels) = Network((6, 5, 5, 4)), batch(9)
    whole = gradients_of(network, images, labels, 9)
    rows = [data.shard(np.arange(9), rank, ranks) for rank in range(ranks)]
    assert np.concatenate(rows).tolist() == list(range(9))
    shares = [gradients_of(network, images[mine], labels[mine], 9) for mine in rows]
    for name, gradient in whole.items():
        np.testing.assert_allclose(sum(share[name] for share in shares), gradient, atol=1e-15)


def test_the_ranks_shuffle_alike_and_every_image_is_seen_once() -> None:
    first, second = (list(data.batches(103, 20, epoch=3)) for _ in range(2))
    assert [rows.tolist() for rows in first] == [rows.tolist() for rows in second]
    assert sorted(np.concatenate(first).tolist()) == list(range(103))
    assert first[0].tolist() != next(iter(data.batches(103, 20, epoch=4))).tolist()
    assert Recipe(epochs=3, batch=20).steps(103) == 18 == 3 * len(first)


@needs_extra
@pytest.mark.parametrize("ranks", [1, 3])
async def test_training_on_several_ranks_equals_training_on_one_process(ranks: int) -> None:
    digits = data.load()
    alone, losses = train_alone(SMALL, digits, nothing)
    async with asyncio.timeout(50), aiodist.local_world(ranks) as groups:
        trained = await asyncio.gather(*(train_parallel(group, SMALL, digits, nothing) for group in groups))
    for network, outcome in trained:
        assert outcome.equal
        assert outcome.losses == pytest.approx(losses, rel=1e-12)
        assert len(outcome.seconds) == ranks
        assert len(outcome.step.buckets) > 1
        assert list(outcome.step.layers) == ["layer2", "layer1"]
        for name, value in alone.parameters.items():
            np.testing.assert_allclose(network.parameters[name], value, atol=1e-12)


@needs_extra
async def test_a_cancelled_training_leaves_nothing_behind() -> None:
    troubles: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: troubles.append(context))
    digits, begun = data.load(), asyncio.Event()
    async with asyncio.timeout(50), aiodist.local_world(2) as groups:
        tasks = [asyncio.create_task(train_parallel(group, Recipe(), digits, lambda step, loss: begun.set())) for group in groups]
        await begun.wait()
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends] == [asyncio.CancelledError] * 2
        for group in groups:
            group.abort("the training was given up")
    del tasks, ends
    gc.collect()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert troubles == []


def test_a_step_knows_where_its_time_went() -> None:
    assert STEP.computing == pytest.approx(0.005)
    assert STEP.communicating == pytest.approx(0.003)
    assert STEP.waiting == pytest.approx(0.002)


def test_the_table_has_a_row_per_rank() -> None:
    table = report.times(Outcome([1.0], [[1.0, 0.5, 0.1], [2.0, 0.0, 0.0]], True, STEP))
    assert table.row_count == 2


@needs_extra
def test_the_picture_is_a_png(tmp_path: Path) -> None:
    from aiodist.demo import timeline

    path = tmp_path / "picture.png"
    timeline.draw(path, Outcome([1.0, 0.5, 0.3], [[1.0, 0.5, 0.1]], True, STEP), [1.0, 0.5, 0.3], ranks=1)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert path.stat().st_size > 10_000


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert demo.main() == 2
    assert "needs scikit-learn: pip install 'aiodist[demo]'" in capsys.readouterr().err


@needs_extra
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"ranks": 0}, "at least 1"),
        ({"epochs": 0}, "at least 1"),
        ({"plot": "/no/such/folder/x.png"}, "does not exist"),
        ({"plot": "/"}, "can not be written"),
    ],
)
def test_wrong_arguments_start_nothing(arguments: dict[str, Any], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(**arguments) == 2
    assert text in capsys.readouterr().err


@needs_extra
@pytest.mark.timeout(120)
def test_the_whole_demo_on_two_processes(tmp_path: Path) -> None:
    plot = tmp_path / "demo.png"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("AIODIST_")} | {"COLUMNS": "120"}
    command = [sys.executable, "-m", "aiodist", "demo", "-n", "2", "--plot", str(plot)]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    accuracy = re.search(r"test accuracy +([\d.]+)", done.stdout)
    difference = re.search(r"largest difference +(\S+)", done.stdout)
    assert accuracy is not None
    assert difference is not None
    assert float(accuracy[1]) >= 0.95
    assert float(difference[1]) <= 1e-12
    assert "yes, bit for bit" in done.stdout
    assert "communicating" in done.stdout
    assert plot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
