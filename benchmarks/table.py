"""The printed table: a block a case, a row a line, the columns of nccl-tests and the ratios."""

from __future__ import annotations

from benchmarks.cases import MANY, Case
from benchmarks.launchers import PEERS
from benchmarks.results import Line, Measurement, Results

__all__ = ["format_gaps", "format_row", "format_table"]

_EACH_ARRAY = f"{len(MANY)} unequal arrays, bytes and count of all together, for which MPI and gloo make a call an array"
_NOTES = {
    "send_recv": "time is half a round trip between ranks 0 and 1",
    "exchange": "both ways at once between ranks 2i and 2i + 1, bytes of one way",
    "all_reduce_many": _EACH_ARRAY,
    "broadcast_many": _EACH_ARRAY,
}

_HEAD = (
    f"{'bytes':>10} {'count':>10} {'dtype':>8} {'op':>4}  {'library':<24} {'time(us)':>11} {'p99(us)':>11} "
    f"{'algbw':>8} {'busbw':>8} {'#wrong':>6} {'t/MPI':>7} {'t/gloo':>7}"
)


def format_table(results: Results) -> str:
    """Return the table of everything measured, then what is missing and why."""
    lines: list[str] = []
    collective = ""
    for case in results.measured:
        if case.collective != collective:
            collective = case.collective
            lines += ["", f"# {collective}, {case.ranks} ranks; algbw and busbw in GB/s; t/X is this row's time over X's"]
            lines += [f"# {_NOTES[collective]}"] if collective in _NOTES else []
            lines.append(_HEAD)
        lines += [*_block(results, case), ""]
    return "\n".join([*lines, *format_gaps(results)])


def _block(results: Results, case: Case) -> list[str]:
    return [format_row(results, case, line, found) for line, found in results.rows(case)]


def format_row(results: Results, case: Case, line: Line, found: Measurement) -> str:
    """Return one row; a ratio that may not be stated is a dash."""
    seconds = found.time_us / 1e6
    fastest = results.fastest_mpi(case)
    mark = "*" if fastest is not None and Line(fastest[0]) == line else ""
    sized = case.collective != "barrier"
    return (
        f"{case.nbytes:>10} {case.count:>10} {case.dtype or '-':>8} {case.op or '-':>4}  {str(line) + mark:<24} "
        f"{found.time_us:>11.2f} {found.p99_us:>11.2f} "
        f"{_number(case.algbw(seconds) if sized else None, 8)} {_number(case.busbw(seconds) if sized else None, 8)} "
        f"{found.wrong if sized else '-':>6} {_number(results.ratio_to_mpi(case, line), 7)} "
        f"{_number(results.ratio_to(case, line, Line('gloo')), 7)}"
    )


def _number(value: float | None, width: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.3f}"


def format_gaps(results: Results) -> list[str]:
    """Return who the MPI of the ratios is, and each library that was not run, with the reason."""
    asked = [peer for peer in results.asked if peer in results.mpis]
    lines = [f"MPI = the fastest (*) of {', '.join(asked)}." if asked else "No MPI was asked for: no ratio to MPI."]
    for peer in PEERS:
        if peer not in results.asked:
            lines.append(f"not run: {peer}: not asked for")
    lines += [f"not run: {peer}: {reason}" for peer, reason in results.not_run.items()]
    lines += [f"not run: {peer} {collective}: {reason}" for (peer, collective), reason in results.failed.items()]
    if any(peer in results.mpis for peer in results.not_run) or any(peer in results.mpis for peer, _ in results.failed):
        lines.append("An MPI that was asked for is missing, so no ratio to MPI is given where it is.")
    return lines
