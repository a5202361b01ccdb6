"""python -m benchmarks.document [docs/performance.md]: fills a page's tables from the JSON files of measurements beside it.

Between ``<!-- fill KIND NAME -->`` and ``<!-- end -->`` comes what KIND says of the files NAME.json and NAME.*.json in the folder that is
called like the page; a table whose files are missing says so. Nothing else on the page is touched, and no number on it is typed by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.findings import Finding
from benchmarks.model import model_table

__all__ = ["fill", "main"]

Report = dict[str, Any]
_MARK: Final = re.compile(r"(<!-- fill (?P<kind>\w+) (?P<name>[\w-]+) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)
_MODEL_RANKS: Final = (2, 8, 32, 128)
_MISSING: Final = "Not measured yet.\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill the page in place."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="?", type=Path, default=Path("docs/performance.md"))
    page: Path = parser.parse_args(arguments).page
    page.write_text(fill(page.read_text(encoding="utf-8"), page.with_suffix("")), encoding="utf-8")
    return 0


def fill(text: str, folder: Path) -> str:
    """Return the page's text with its tables made of the reports in `folder`.

    Raises:
        KeyError: a mark has a kind that is not known.
    """

    def one(match: re.Match[str]) -> str:
        reports = _reports(folder, match["name"])
        return f"{match[1]}{_KINDS[match['kind']](reports, folder) if reports else _MISSING}{match[5]}"

    return _MARK.sub(one, text)


def _reports(folder: Path, name: str) -> list[Report]:
    files = [folder / f"{name}.json", *sorted(folder.glob(f"{name}.*.json"))]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def _machine(reports: list[Report], _: Path) -> str:
    lines = []
    for number, report in enumerate(reports, 1):
        one = report["machine"]
        libraries = ", ".join(report.get("libraries", {}).values())
        lines.append(
            f"- Run {number}, {one['ended'][:16].replace('T', ' ')}: {one['processor']}, {one['cores']} cores, Linux {one['kernel']}, "
            f"Python {one['python']}, numpy {one['numpy']}{f'; {libraries}' if libraries else ''}."
        )
    return "\n".join(lines) + "\n"


def _targets(reports: list[Report], _: Path) -> str:
    """A row for each finding, a column for each run; what some runs lack is a dash."""
    runs = [{fields["what"]: Finding.from_json(fields) for fields in report["findings"]} for report in reports]
    rows = []
    for what in dict.fromkeys(what for run in runs for what in run):
        found = [run.get(what) for run in runs]
        limits = next(finding.targets for finding in found if finding is not None)
        cells = ["–" if one is None else f"{one.number()} {f'**{one.verdict}**' if one.verdict else ''}".strip() for one in found]
        rows.append([what, limits.get("due", ""), limits.get("stretch", ""), *cells])
    return _table(["what", "due", "stretch", *(f"run {number}" for number in range(1, len(runs) + 1))], rows)


def _times(reports: list[Report], _: Path) -> str:
    """The last run: a table for each collective, a row for each size, a column for each line."""
    rows = reports[-1]["rows"]
    parts = []
    for collective in dict.fromkeys(row["collective"] for row in rows):
        own = [row for row in rows if row["collective"] == collective]
        lines = list(dict.fromkeys(f"{row['peer']} {row['variant']}".strip() for row in own))
        times = {(row["bytes"], f"{row['peer']} {row['variant']}".strip()): row["time_us"] for row in own}
        table = [
            [f"{size:,}", *(f"{times[size, line]:,.2f}" if (size, line) in times else "–" for line in lines)]
            for size in dict.fromkeys(row["bytes"] for row in own)
        ]
        parts.append(f"{collective}, {own[0]['ranks']} ranks, median time of a call in µs:\n\n{_table(['bytes', *lines], table)}")
    return "\n".join(parts)


def _counts(reports: list[Report], _: Path) -> str:
    """Instructions of a call of one rank: of the core, and of all that runs."""
    rows = reports[-1]["rows"]
    ranks = sorted({row["ranks"] for row in rows})
    found = {(row["collective"], row["bytes"], row["wait"], row["ranks"]): row["instructions"] for row in rows}
    table = []
    for key in dict.fromkeys((row["collective"], row["bytes"], row["wait"]) for row in rows):
        parts = [found.get((*key, size)) for size in ranks]
        cells = ["–" if part is None else f"{part['core']:,.0f} of {sum(part.values()):,.0f}" for part in parts]
        table.append([key[0], f"{key[1]:,}", key[2], *cells])
    return _table(["call", "bytes", "waiting by", *(f"P = {size}" for size in ranks)], table)


def _model(reports: list[Report], folder: Path) -> str:
    times = _reports(folder, "collectives-2")
    if not times:
        return _MISSING
    head = ["call", *(f"α, P = {size}" for size in _MODEL_RANKS), *(f"β, P = {size}" for size in _MODEL_RANKS)]
    return _table(head, model_table(reports[-1]["rows"], times[-1]["rows"], _MODEL_RANKS))


_KINDS: Final[dict[str, Callable[[list[Report], Path], str]]] = {
    "machine": _machine,
    "targets": _targets,
    "times": _times,
    "counts": _counts,
    "model": _model,
}


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    sys.exit(main())
