"""The benchmark of the rendezvous: that it runs, checks what it measured, and states no ratio that it has not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import rendezvous
from benchmarks.members import PHASES
from benchmarks.rendezvous import DUE_MEMBERS, Side, format_report, main

pytestmark = pytest.mark.timeout(120)


def side(seconds: float, *, peak_mb: float = 100.0, wrong: int = 0) -> Side:
    return Side([dict.fromkeys(PHASES, seconds / 3)], peak_mb, 10.0, wrong)


def test_fifty_members_meet_and_without_torch_it_is_said_that_the_peer_was_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "find_spec", lambda name: None)
    assert main(["--members", "50", "--rounds", "1", "--json", str(tmp_path / "all.json")]) == 2
    text = capsys.readouterr().out
    assert "not run: tcpstore: torch is not installed" in text and "No ratio" in text and " x the time" not in text
    own = json.loads((tmp_path / "all.json").read_text())["sides"]["aiodist"]
    assert own["wrong"] == 0 and own["not_run"] is None and own["peak_mb"] > own["grown_mb"] > 0
    assert all(own["rounds"][0][phase] > 0 for phase in PHASES)


def test_a_ratio_needs_both_sides_and_right_values() -> None:
    assert "aiodist takes 2.00 x the time of the TCPStore" in format_report({"aiodist": side(1.0), "tcpstore": side(0.5)}, 50)
    for sides in ((side(1.0, wrong=1), side(0.5)), (side(1.0), side(0.5, wrong=1)), (side(1.0), Side(not_run="why"))):
        assert not any(" x the time" in line for line in format_report(dict(zip(("aiodist", "tcpstore"), sides, strict=True)), 50))


def test_the_target_is_judged_where_it_was_set() -> None:
    for own, verdict in ((side(4.9), "met"), (side(5.1), "NOT MET"), (side(1.0, peak_mb=201.0), "NOT MET")):
        sides = {"aiodist": own, "tcpstore": Side(not_run="why")}
        assert format_report(sides, DUE_MEMBERS)[-1].startswith(f"{verdict}: ")
        assert not any("due" in line for line in format_report(sides, DUE_MEMBERS - 1))
