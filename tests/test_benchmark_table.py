"""The pure parts of the benchmark: bandwidth factors, the check of results, statistics, ratios, the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.cases import COLLECTIVES, DTYPES, GARBAGE, MANY, ROOT, Case
from benchmarks.collectives import main
from benchmarks.controller import Settings
from benchmarks.document import fill
from benchmarks.findings import Finding
from benchmarks.launchers import MPIS, PEERS, plan_launch
from benchmarks.model import model_table
from benchmarks.report import format_idle
from benchmarks.results import Line, Measurement, Results, pool_ranks
from benchmarks.table import format_table
from benchmarks.targets import judge

MIB = 1 << 20
PAIRED = ("send_recv", "exchange")


def answers(times: list[float], *, wrong: int = 0) -> list[dict[str, Any]]:
    """Return what two ranks would answer, the second one 10 % faster."""
    slow = {"batches_us": times, "calls_us": times, "wrong": wrong}
    return [slow, {"batches_us": [time * 0.9 for time in times], "calls_us": [time * 0.9 for time in times], "wrong": 0}]


def measured(times: dict[str, float], *, asked: list[str], case: Case) -> Results:
    """Return results in which each line of `times`, "peer" or "aiodist variant", took that long."""
    results = Results(asked=asked, mpis=MPIS)
    for name, time in times.items():
        peer, _, variant = name.partition(" ")
        results.add(case, Line(peer, variant), answers([time]))
    return results


@pytest.mark.parametrize(
    ("collective", "ranks", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 4, 1.5),
        ("broadcast", 4, 1.0),
        ("all_gather", 2, 0.5),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 4, 0.75),
        ("all_reduce", 1, 0.0),
        ("reduce", 4, 1.0),
        ("gather", 4, 0.75),
        ("scatter", 2, 0.5),
        ("all_to_all", 4, 0.75),
        ("send_recv", 4, 1.0),
        ("exchange", 2, 1.0),
        ("all_reduce_many", 4, 1.5),
        ("broadcast_many", 4, 1.0),
    ],
)
def test_bandwidths_use_the_factors_of_nccl_tests(collective: str, ranks: int, factor: float) -> None:
    case = Case.sized(collective, MIB, ranks=ranks)
    assert case.nbytes == MIB
    assert case.algbw(1e-3) == pytest.approx(MIB / 1e6)
    assert case.busbw(1e-3) == pytest.approx(case.algbw(1e-3) * factor)


@pytest.mark.parametrize(
    ("collective", "count", "root", "other"),
    [
        ("all_reduce", 4096, (4096, 4096), (4096, 4096)),
        ("reduce", 4096, (4096, 4096), (4096, 0)),
        ("reduce_scatter", 1024, (4096, 1024), (4096, 1024)),
        ("broadcast", 4096, (4096, 4096), (4096, 4096)),
        ("all_gather", 1024, (1024, 4096), (1024, 4096)),
        ("gather", 1024, (1024, 4096), (1024, 0)),
        ("scatter", 1024, (4096, 1024), (0, 1024)),
        ("all_to_all", 1024, (4096, 4096), (4096, 4096)),
        ("send_recv", 4096, (4096, 4096), (4096, 4096)),
        ("exchange", 4096, (4096, 4096), (4096, 4096)),
        ("all_reduce_many", 4096, (4096, 4096), (4096, 4096)),
        ("broadcast_many", 4096, (4096, 4096), (4096, 4096)),
        ("barrier", 0, (0, 0), (0, 0)),
    ],
)
def test_count_is_a_rank_s_chunk_where_there_are_chunks(collective: str, count: int, root: tuple[int, int], other: tuple[int, int]) -> None:
    case = Case.sized(collective, 16384, ranks=4)
    assert case.count == count
    assert (case.input_length(ROOT), case.output_length(ROOT)) == root
    assert (case.input_length(1), case.output_length(1)) == other


def test_sizes_are_cut_to_whole_elements_and_one_at_least() -> None:
    assert Case.sized("all_reduce", 7, ranks=2).nbytes == 4
    assert Case.sized("all_gather", 1, ranks=3).nbytes == 12
    assert Case.sized("barrier", 1024, ranks=2).nbytes == 0
    assert Case.sized("all_to_all", 1, ranks=3).nbytes == 12
    assert Case.sized("broadcast_many", 8, ranks=2).count == len(MANY)


@pytest.mark.parametrize(("collective", "ranks", "active"), [("send_recv", 5, 2), ("exchange", 5, 4), ("exchange", 4, 4), ("gather", 5, 5)])
def test_ranks_without_a_partner_idle(collective: str, ranks: int, active: int) -> None:
    case = Case.sized(collective, 64, ranks=ranks)
    assert case.active == active
    assert all(case.input_length(rank) and case.output_length(0) for rank in range(active))
    assert not any(case.input_length(rank) or case.output_length(rank) for rank in range(active, ranks))


@pytest.mark.parametrize("collective", PAIRED)
def test_calls_between_two_ranks_need_two(collective: str) -> None:
    with pytest.raises(ValueError, match="needs 2 ranks"):
        Case.sized(collective, 8, ranks=1)


@pytest.mark.parametrize("count", [len(MANY), len(MANY) + 1, 1000, 16 * MIB])
def test_many_arrays_are_unequal_views_that_cover_everything(count: int) -> None:
    case = Case.sized("all_reduce_many", count * 4, ranks=2)
    flat = np.arange(count, dtype=np.float32)
    arrays = case.arrays(flat)
    assert len(arrays) == len(MANY)
    assert all(array.size and np.shares_memory(array, flat) for array in arrays)
    assert np.array_equal(np.concatenate(arrays), flat)
    assert count < 1000 or len({array.size for array in arrays}) >= len(set(MANY))


@pytest.mark.parametrize("bad", [{"collective": "all_to_none"}, {"dtype": "float8"}, {"op": "median"}, {"ranks": 0}])
def test_unknown_names_are_refused(bad: dict[str, Any]) -> None:
    right: dict[str, Any] = {"collective": "all_reduce", "nbytes": 8, "dtype": "float32", "op": "sum", "ranks": 2}
    with pytest.raises(ValueError, match=r"is unknown|must be between"):
        Case.sized(**right | bad)


def by_numpy(collective: str, inputs: list[Any], rank: int) -> Any:
    """Return what `rank` gets when the ranks pass `inputs`, by other means than the benchmark's."""
    ranks = len(inputs)
    if "reduce" in collective:
        total = np.stack(inputs).astype(np.float64).sum(axis=0, keepdims=True)[0]
        return np.split(total, ranks)[rank] if collective == "reduce_scatter" else total
    if collective in ("broadcast", "scatter"):
        return inputs[0] if collective == "broadcast" else np.split(inputs[0], ranks)[rank]
    if collective in PAIRED:
        return inputs[rank - 1 if rank % 2 else rank + 1]
    if collective == "all_to_all":
        return np.stack(inputs).reshape(ranks, ranks, -1).transpose(1, 0, 2).reshape(ranks, -1)[rank]
    return np.concatenate(inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("collective", "ranks"),
    [(name, ranks) for name in COLLECTIVES for ranks in (1, 2, 3, 16) if name != "barrier" and (ranks > 1 or name not in PAIRED)],
)
def test_expected_is_what_numpy_says(collective: str, ranks: int, dtype: str) -> None:
    case = Case.sized(collective, 4000, dtype=dtype, ranks=ranks)
    inputs = [case.contribution(rank, 3) for rank in range(ranks)]
    for rank in [rank for rank in range(ranks) if case.output_length(rank)]:
        want = by_numpy(case.single, inputs, rank)
        got = case.expected(rank, 3)
        assert got.size == case.output_length(rank)
        assert got.dtype == np.dtype(dtype)
        assert np.array_equal(got, want)


def test_sums_are_exact_in_float32_at_every_allowed_rank_count() -> None:
    for ranks in (2, 16, 17, 128, 129, 2048):
        case = Case.sized("all_reduce", 4, ranks=ranks)
        highest = max(float(case.contribution(rank, 0)[0]) for rank in range(ranks))
        assert ranks * highest < 2**24


def test_data_differs_between_elements_ranks_and_rounds() -> None:
    case = Case.sized("all_reduce", MIB, ranks=2)
    first, second, later = case.contribution(0, 1), case.contribution(1, 1), case.contribution(0, 2)
    assert np.unique(first).size == first.size
    assert np.count_nonzero(first == second) <= 1
    assert np.count_nonzero(first == later) <= 1
    assert not np.any(first == GARBAGE)


def test_a_shifted_segment_a_garbage_element_and_a_wrong_shape_are_counted() -> None:
    case = Case.sized("all_reduce", 16 * MIB, ranks=2)
    right = case.expected(0, 1)
    assert case.wrong(right.copy(), right) == 0
    shifted = np.roll(right, 16384)
    assert case.wrong(shifted, right) > right.size // 2
    spoiled = right.copy()
    spoiled[17] = GARBAGE
    assert case.wrong(spoiled, right) == 1
    assert case.wrong(right[:-1], right) == right.size
    assert case.wrong(right.astype(np.float64), right) == right.size


def test_a_case_survives_the_wire() -> None:
    case = Case.sized("reduce_scatter", 4096, op="max", ranks=3)
    assert Case.from_wire(case.to_wire()) == case


def test_a_time_is_the_slowest_rank_s_and_the_median_of_all_rounds() -> None:
    assert pool_ranks([[1.0, 5.0], [2.0, 4.0]]) == [2.0, 5.0]
    found = Measurement()
    found.add(answers([1.0, 100.0], wrong=2))
    found.add(answers([2.0, 3.0, 4.0], wrong=1))
    assert found.time_us == 3.0
    assert found.p99_us == 100.0
    assert found.wrong == 3


def test_ratios_are_to_the_fastest_mpi() -> None:
    case = Case.sized("all_reduce", 8, ranks=2)
    results = measured(
        {"aiodist blocking-private": 1.0, "mpich": 4.0, "impi": 2.0, "gloo": 500.0}, asked=["aiodist", "mpich", "impi", "gloo"], case=case
    )
    assert results.fastest_mpi(case) == ("impi", 2.0)
    assert results.ratio_to_mpi(case, Line("aiodist", "blocking-private")) == 0.5
    text = format_table(results)
    assert "impi*" in text
    assert "MPI = the fastest (*) of mpich, impi." in text
    assert "not run: openmpi: not asked for" in text


def test_no_ratio_to_mpi_when_one_that_was_asked_for_did_not_run() -> None:
    case = Case.sized("all_reduce", 8, ranks=2)
    results = measured({"aiodist blocking-private": 1.0, "mpich": 4.0, "gloo": 500.0}, asked=["aiodist", *PEERS], case=case)
    results.not_run["impi"] = "no environment"
    results.not_run["openmpi"] = "it crashed"
    assert results.ratio_to_mpi(case, Line("aiodist", "blocking-private")) is None
    text = format_table(results)
    row = next(line for line in text.splitlines() if "aiodist blocking-private" in line)
    assert row.split()[-2:] == ["-", "0.002"]
    assert "not run: impi: no environment" in text
    assert "not run: openmpi: it crashed" in text


def test_a_library_that_failed_half_way_is_neither_printed_nor_compared_with() -> None:
    case = Case.sized("all_reduce", 8, ranks=2)
    results = measured({"aiodist blocking-private": 1.0, "mpich": 4.0, "gloo": 500.0}, asked=["aiodist", "mpich", "gloo"], case=case)
    results.failed["gloo", "all_reduce"] = "no answer within 5 s"
    assert results.ratio_to(case, Line("aiodist", "blocking-private"), Line("gloo")) is None
    text = format_table(results)
    assert "not run: gloo all_reduce: no answer within 5 s" in text
    assert not any(line.split()[4:5] == ["gloo"] for line in text.splitlines())


def test_the_table_says_what_a_time_or_a_size_stands_for() -> None:
    for collective, note in (("send_recv", "half a round trip"), ("broadcast_many", "a call an array"), ("all_to_all", "")):
        case = Case.sized(collective, 1024, ranks=2)
        head, *rest = format_table(measured({"aiodist blocking-private": 1.0}, asked=["aiodist"], case=case)).strip().splitlines()
        assert head.startswith(f"# {collective}, 2 ranks")
        assert rest[0].startswith("# ") == bool(note)
        assert note in rest[0]


def test_a_call_that_a_library_lacks_is_named() -> None:
    case = Case.sized("gather", 1024, ranks=2)
    results = measured({"aiodist blocking-private": 1.0}, asked=["aiodist", "gloo"], case=case)
    results.failed["gloo", "gather"] = "rank 0: NotImplementedError: no gather in gloo"
    assert "not run: gloo gather: rank 0: NotImplementedError: no gather in gloo" in format_table(results)


def test_without_any_mpi_the_table_says_so() -> None:
    case = Case.sized("barrier", 0, ranks=2)
    results = measured({"aiodist blocking-private": 1.0}, asked=["aiodist"], case=case)
    assert results.fastest_mpi(case) is None
    assert "No MPI was asked for" in format_table(results)


def test_targets_are_judged_only_where_both_sides_ran() -> None:
    case = Case.sized("all_reduce", 8, ranks=2)
    times = {"aiodist blocking-private": 1.2, "aiodist awaited-private": 2.5, "mpich": 2.0}
    results = measured(times, asked=["aiodist", "mpich"], case=case)
    blocking, awaited = judge(results)
    assert (blocking.verdict, awaited.verdict) == ("met", "NOT MET")
    assert str(awaited).startswith("NOT MET  all_reduce 8 B, 2 ranks, awaited-private / MPI: 1.25 (0.80x faster), due <= 1, stretch <= 0.8")
    results.not_run["mpich"] = "gone"
    assert [finding.verdict for finding in judge(results)] == ["unknown", "unknown"]


def test_with_more_ranks_than_cores_every_size_has_its_target() -> None:
    for nbytes in (8, 1000, MIB):
        case = Case.sized("all_reduce", nbytes, ranks=4)
        results = measured({"aiodist blocking-private": 1.0, "mpich": 4.0}, asked=["aiodist", "mpich"], case=case)
        assert [finding.verdict for finding in judge(results)] == ["met"]


@pytest.mark.parametrize(
    ("value", "least", "verdict"),
    [(9.0, False, "stretch"), (15.0, False, "met"), (21.0, False, "NOT MET"), (None, False, "unknown"), (21.0, True, "stretch")],
)
def test_a_finding_is_judged_by_both_limits(value: float | None, least: bool, verdict: str) -> None:
    due, stretch = (10.0, 20.0) if least else (20.0, 10.0)
    finding = Finding("a time", value, "s", due, stretch, least)
    assert finding.verdict == verdict
    assert Finding.from_json(finding.to_json()) == finding


def test_batches_shrink_with_the_time_of_a_call() -> None:
    settings = Settings(max_calls=300, batch_ms=60.0)
    assert settings.calls(1.0) == 300
    assert settings.calls(1000.0) == 60
    assert settings.calls(1e6) == 2


def test_ranks_that_do_not_sleep_are_reported() -> None:
    assert format_idle({"mpich": (0.1, 100.0)}) == []
    (warning,) = format_idle({"mpich": (50.0, 100.0)})
    assert "mpich" in warning and "50.0%" in warning


def test_a_peer_without_environment_names_the_script_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"peers/setup\.sh mpich"):
        plan_launch("mpich", 2, "sock", "store", envs=tmp_path)


def test_the_command_line_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--peers", "mpitch"], ["--collectives", "all"], ["--sizes", "0"], ["--ranks", "0"], ["--rounds", "0"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
        assert arguments[0].strip("-") in capsys.readouterr().err


def test_a_page_is_filled_from_the_reports_beside_it(tmp_path: Path) -> None:
    """A column a run, dashes for what a run lacks, and the same again when filled twice."""
    marks = "# Title\n\n<!-- fill targets one -->\nold\n<!-- end -->\n\n<!-- fill times gone -->\nold\n<!-- end -->\n"
    runs = [[Finding("a", 2.0, "ms", 3.0, 1.0), Finding("b", 1500.0)], [Finding("a", 4.0, "ms", 3.0, 1.0)]]
    for name, findings in zip(("one.json", "one.2.json"), runs, strict=True):
        (tmp_path / name).write_text(json.dumps({"findings": [finding.to_json() for finding in findings]}))
    text = fill(marks, tmp_path)
    assert "| a | <= 3 | <= 1 | 2 ms **met** | 4 ms **NOT MET** |\n| b |  |  | 1,500 | – |\n<!-- end -->" in text
    assert text.startswith("# Title\n\n<!-- fill targets one -->\n| what | due | stretch | run 1 | run 2 |\n")
    assert text.endswith("<!-- fill times gone -->\nNot measured yet.\n<!-- end -->\n")
    assert fill(text, tmp_path) == text


def test_the_page_on_performance_is_what_its_reports_say() -> None:
    page = Path(__file__).parent.parent / "docs" / "performance.md"
    text = page.read_text(encoding="utf-8")
    assert fill(text, page.with_suffix("")) == text


def test_the_model_extrapolates_from_what_was_counted_and_measured() -> None:
    counts = [
        {"collective": "all_reduce", "bytes": 8, "ranks": ranks, "wait": "await", "instructions": {"core": core, "python": 1.0}}
        for ranks, core in ((2, 3000.0), (8, 6000.0))
    ]
    times = [
        {"collective": "all_reduce", "peer": "aiodist", "variant": "blocking-private", "bytes": 8, "time_us": 1.5, "algbw_gb_s": 0.0},
        {"collective": "all_reduce", "peer": "copy", "variant": "", "bytes": 64 * MIB, "time_us": 1.0, "algbw_gb_s": 5.0},
    ]
    row = model_table(counts, times, (2, 8, 32))[0]
    # At 2 ranks each reads 2 and writes 2 bytes for one: as 2 copied ones, of both ranks 4, at 10 GB/s together.
    assert row == ["all_reduce", "1.5 µs", "3 µs", "–", "0.4 ms/MB", "1.9 ms/MB", "7.9 ms/MB"]
