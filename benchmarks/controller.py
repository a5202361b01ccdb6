"""Runs the rounds: one library at a time is measured while the ranks of all others sleep."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.cases import Case
from benchmarks.ranksets import Failure, RankSet
from benchmarks.results import Line, Results
from benchmarks.serve import Plan

__all__ = ["Controller", "Settings", "progress"]


@dataclass(frozen=True, slots=True)
class Settings:
    """How much is measured.

    Attributes:
        rounds: rounds that count; one more, uncounted, warms up and sets the number of calls.
        batches: batches in a round.
        max_calls: most calls in a batch.
        batch_ms: a batch is cut to about this long, but for two calls at least.
        timeout: seconds that a library has for one round at one size.
    """

    rounds: int = 7
    batches: int = 5
    max_calls: int = 300
    batch_ms: float = 60.0
    timeout: float = 120.0

    def calls(self, per_call_us: float) -> int:
        """Return how many calls make a batch when one takes `per_call_us`."""
        return max(2, min(self.max_calls, int(self.batch_ms * 1e3 / max(per_call_us, 0.01))))


class Controller:
    """Drives the worlds that started; a world that fails is recorded and, if it may hang, ended.

    Attributes:
        idle: by library, seconds of processor time its ranks used while they should sleep, and seconds they had for it.
    """

    def __init__(self, worlds: dict[str, RankSet], variants: Sequence[str], settings: Settings, results: Results) -> None:
        self.idle: dict[str, tuple[float, float]] = {}
        self._worlds = worlds
        self._stopped: dict[str, str] = {}
        self._settings = settings
        self._results = results
        self._lines = [Line(peer, variant) for peer in worlds for variant in (variants if peer == "aiodist" else [""])]

    def run(self, cases: Sequence[Case]) -> None:
        """Measure the cases of one collective, all rounds."""
        collective = cases[0].collective
        for peer, why in self._stopped.items():
            self._results.failed[peer, collective] = f"its ranks were ended after {why} failed"
        calls: dict[tuple[Case, Line], int] = {}
        for round_ in range(self._settings.rounds + 1):
            for case in cases:
                for line in self._turned(round_, collective):
                    if round_ == 0:
                        calls[case, line] = self._estimate(case, line)
                    else:
                        self._measure(case, line, Plan(round_, calls[case, line], self._settings.batches))
            progress(f"{collective}: round {round_} of {self._settings.rounds} done")
        for peer in list(self._worlds):
            self._request(peer, collective, {"do": "forget"})

    def _turned(self, round_: int, collective: str) -> list[Line]:
        """Return the lines still able to run, starting one further every round."""
        start = round_ % max(1, len(self._lines))
        lines = self._lines[start:] + self._lines[:start]
        if collective == "barrier":  # it has no arrays to copy, and whose memory they are in makes no difference
            lines = [line for line in lines if not line.variant.endswith("shared") and line.peer != "copy"]
        return [line for line in lines if line.peer in self._worlds and not self._results.missing(line.peer, collective)]

    def _estimate(self, case: Case, line: Line) -> int:
        answers = self._ask(case, line, Plan(0, 2, 1))
        return self._settings.calls(max((min(answer["calls_us"]) for answer in answers), default=0.0))

    def _measure(self, case: Case, line: Line, plan: Plan) -> None:
        answers = self._ask(case, line, plan)
        if answers:
            self._results.add(case, line, answers)

    def _ask(self, case: Case, line: Line, plan: Plan) -> list[dict[str, Any]]:
        if self._results.missing(line.peer, case.collective):  # another line of the same library failed a moment ago
            return []
        command = {"do": "measure", "case": case.to_wire(), "variant": line.variant, "plan": asdict(plan)}
        answers = self._request(line.peer, case.collective, command)
        for answer in answers:
            used, had = self.idle.get(line.peer, (0.0, 0.0))
            self.idle[line.peer] = (used + answer["idle_cpu_s"], had + answer["idle_s"])
        return answers

    def _request(self, peer: str, collective: str, command: dict[str, Any]) -> list[dict[str, Any]]:
        try:
            return self._worlds[peer].request(command, self._settings.timeout)
        except Failure as failure:
            self._results.failed[peer, collective] = str(failure)
            progress(f"{peer}: {collective} failed: {failure}")
            if not failure.usable:
                self._stopped[peer] = collective
                self._worlds.pop(peer).end()
            return []


def progress(text: str) -> None:
    """Say on standard error how far the run is."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)
