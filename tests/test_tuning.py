"""Profiles: what is read of one, what is refused, and worlds that are formed with one."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from click.testing import CliRunner
from support.ranks import Pools, new_job, run_local

import aiodist
from aiodist import _core
from aiodist.bench.plan import COLLECTIVES, Case, Found
from aiodist.bench.tune import Step, choose, steps
from aiodist.cli import cli
from aiodist.errors import RendezvousError
from aiodist.profile import Profile, Row, read_profile, write_profile
from aiodist.tuning import told_tunings

ROW: dict[str, Any] = {"ranks": 2, "slots": 4, "slot_nbytes": 128, "segment_nbytes": 4096, "depth": 2}
# Few and small for groups of two, many and large for those of three.
ODD = [ROW | {"slots": 2, "slot_nbytes": 64}, ROW | {"ranks": 3, "slots": 256, "slot_nbytes": 1 << 16, "segment_nbytes": 4 << 20}]


def profile(folder: Path, *rows: dict[str, Any], **more: Any) -> Path:
    """Write a profile that need not be a right one."""
    path = folder / "profile.json"
    path.write_text(json.dumps({"format": 1, "tunings": rows} | more))
    return path


@pytest.mark.parametrize(
    ("rows", "more", "says"),
    [
        ([ROW | {"depth": 1}], {}, r"`int` >= 2.*`\$\.tunings\[0\]\.depth`"),
        ([ROW, ROW | {"ranks": 3, "slot_nbytes": 100}], {}, r"multiple of 64.*`\$\.tunings\[1\]\.slot_nbytes`"),
        ([ROW | {"segment_nbytes": "64k"}], {}, r"Expected `int`, got `str`.*segment_nbytes"),
        ([ROW | {"slots": 2.5}], {}, r"slots"),
        ([ROW | {"segment": 4096}], {}, r"unknown field `segment`"),
        ([{"ranks": 2}], {}, r"missing required field `slots`"),
        ([ROW | {"segment_nbytes": 4 << 20, "depth": 256}], {}, r"ranks \* segment_nbytes \* depth.*tunings\[0\]"),
        ([ROW, ROW], {}, r"more than one row for 2 ranks"),
        ([ROW], {"format": 2}, r"format"),
        ([ROW], {"tuning": []}, r"unknown field `tuning`"),
    ],
)
def test_a_wrong_profile_names_the_file_and_the_field(tmp_path: Path, rows: list[Any], more: dict[str, Any], says: str) -> None:
    path = profile(tmp_path, *rows, **more)
    with pytest.raises(ValueError, match=rf"(?s)tuning profile '{path}' is wrong: .*{says}"):
        read_profile(path)


def test_a_file_that_is_not_there_or_no_json_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a world is opened with it: before anything else happens."""
    path = tmp_path / "profile.json"
    monkeypatch.setenv("AIODIST_TUNING", str(path))
    for open_world in (aiodist.init, lambda: aiodist.local_world(2)):
        with pytest.raises(ValueError, match=rf"AIODIST_TUNING: .*{path}.*can not be read: No such file"):
            open_world()
    path.write_text("{")
    with pytest.raises(ValueError, match=rf"AIODIST_TUNING: .*{path}.* is wrong"):
        aiodist.init()


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = Profile(1, [Row.default(ranks) for ranks in (1, 2, 8, 128)], {"processor": "one", "cores": 2})
    write_profile(tmp_path / "profile.json", written)
    assert read_profile(tmp_path / "profile.json") == written
    assert [row.tuning for row in written.tunings] == [_core.default_tuning(row.ranks) for row in written.tunings]


@pytest.mark.parametrize("told", [[1], {"2": [8, 64]}, {"2": [8, 64, 4096, 1]}, {"two": [8, 64, 4096, 2]}, {"2": ["8", 64, 4096, 2]}])
def test_what_a_peer_tells_is_checked_like_a_file(told: Any) -> None:
    with pytest.raises(RendezvousError, match="rank 0 told a tuning"):
        told_tunings([{"tunings": told}])


async def exchange(group: aiodist.Group) -> None:
    """Reduce, gather and broadcast around and far beyond the sizes at which calls become large ones."""
    for count in (1, 8, 9, 16, 17, 513, 300_000):
        x = np.arange(count, dtype=np.int64) + group.rank * 1000
        total = sum(np.arange(count, dtype=np.int64) + peer * 1000 for peer in range(group.size))
        assert np.array_equal(await group.all_reduce(x), total)
        assert np.array_equal(await group.all_gather(x), np.concatenate([x + (peer - group.rank) * 1000 for peer in range(group.size)]))
        assert np.array_equal(await group.broadcast(x if group.rank == 1 else None, root=1), x + (1 - group.rank) * 1000)
    calls = [group.all_reduce(np.full(3, number)) for number in range(20)]  # more than there are slots
    assert [int((await call)[0]) for call in calls] == [number * group.size for number in range(20)]


async def exchange_in_groups(world: aiodist.Group) -> None:
    """In the world of three, and in a pair, whose tuning is another row's."""
    await exchange(world)
    pair = await world.new_group([2, 0])
    if pair is not None:
        await exchange(pair)
        await pair.aclose()


def test_a_local_world_and_its_groups_follow_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIODIST_TUNING", str(profile(tmp_path, *ODD)))
    with mock.patch.object(_core, "reserve", wraps=_core.reserve) as reserve:
        asyncio.run(run_local(3, exchange_in_groups))
    used = [(call.args[3], call.args[0]) for call in reserve.call_args_list]
    assert used == [(3, (256, 1 << 16, 4 << 20, 2))] * 3 + [(2, (2, 64, 4096, 2))] * 2


async def open_with(_: None, profiles: dict[int, str], job: str) -> list[Any]:
    """Open a world of one's own, with the profile that is this rank's, and return the tunings that were used."""
    rank = int(os.environ["AIODIST_RANK"])
    with mock.patch.object(_core, "reserve", wraps=_core.reserve) as reserve, pytest.MonkeyPatch.context() as patch:
        if rank in profiles:
            patch.setenv("AIODIST_TUNING", profiles[rank])
        async with aiodist.init(job=job) as world:
            await exchange_in_groups(world)
    return [call.args[0] for call in reserve.call_args_list]


def test_all_ranks_follow_the_profile_of_rank_0(tmp_path: Path, pools: Pools) -> None:
    """Of the others' own ones there is one that differs, and none."""
    other = tmp_path / "other"
    other.mkdir()
    profiles = {0: str(profile(tmp_path, *ODD)), 1: str(profile(other, ROW | {"ranks": 3}))}
    pool = pools.get(3)
    pool.start(open_with, profiles, new_job(), world=False)
    outcomes = pool.finish()
    assert [outcome.answer.error for outcome in outcomes if outcome.answer] == [None] * 3
    three, two = (256, 1 << 16, 4 << 20, 2), (2, 64, 4096, 2)
    assert [outcome.answer.value for outcome in outcomes if outcome.answer] == [[three, two], [three], [three, two]]


def found(first: list[float], other: list[float], wrong: int = 0) -> list[Found]:
    """Return what two profiles took for one case, round by round."""
    case = Case("all_reduce", 8)
    return [Found(case, 0, first, 0), Found(case, 1, other, wrong)]


def test_a_candidate_must_be_clearly_better_round_by_round() -> None:
    """What others do to a round slows both, so a round is compared with itself alone."""
    rows = [Row.default(2), Row(**ROW)]
    assert choose(rows, found([10.0, 50.0, 10.0], [9.0, 45.0, 9.0])) == (rows[1], [1.0, pytest.approx(0.9)])
    assert choose(rows, found([10.0, 50.0, 10.0], [5.0, 51.0, 9.0]))[0] == rows[0]
    assert choose(rows, found([10.0, 10.0, 10.0], [9.9, 9.9, 9.9]))[0] == rows[0]
    with pytest.raises(ValueError, match="3 elements of all_reduce were wrong"):
        choose(rows, found([10.0], [5.0], wrong=3))


@pytest.mark.parametrize("ranks", [2, 8, 128])
def test_every_step_has_candidates_that_change_its_field(ranks: int) -> None:
    best = Row.default(ranks)
    for step in steps():
        rows = step.candidates(best)
        assert rows
        assert all(getattr(row, step.field) != getattr(best, step.field) and row.ranks == ranks for row in rows)


def test_tuning_writes_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one small step that takes its candidate, whatever that takes; both rows gave right results in worlds of their own."""
    path = tmp_path / "profile.json"
    monkeypatch.setattr("aiodist.bench.tune.MARGIN", -10.0)  # so that it is taken, and compared once more
    monkeypatch.setattr("aiodist.bench.tune.MOST", 0.0)
    step = Step("slot_nbytes", lambda best: [Row(**ROW)], [Case("all_reduce", 8), Case("all_to_all", 4096, "awaited", shared=True)])
    monkeypatch.setattr("aiodist.bench.tune.steps", lambda: [step])
    ended = CliRunner().invoke(cli, ["bench", "-n", "2", "--rounds", "2", "--tune", str(path)])
    assert ended.exit_code == 0, ended.output
    assert "slot_nbytes 128: " in ended.output
    assert "all of it once more: " in ended.output
    assert read_profile(path).tunings == [Row(**ROW)]


def test_bench_prints_a_row_for_each_collective_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodist.bench.table._SIZES", (8,))
    ended = CliRunner().invoke(cli, ["bench", "--rounds", "1"])
    assert ended.exit_code == 0, ended.output
    rows = [line.split() for line in ended.output.splitlines() if line.startswith(COLLECTIVES)]
    assert [row[0] for row in rows] == list(COLLECTIVES)
    assert all(len(row) == 8 and row[-1] == "0" for row in rows)
