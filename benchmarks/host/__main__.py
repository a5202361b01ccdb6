"""python -m benchmarks.host ROW [options]: measures one row, checks its results, and says whether its targets are met.

Without a row it lists them. Times of single calls beside MPI's and gloo's are `python -m benchmarks.collectives`.

Exit status: 0 if it ran, whatever the targets say; 1 if a result was wrong or the ranks failed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.findings import Finding
from benchmarks.host.base import Failed, Row
from benchmarks.report import machine

__all__ = ["ROWS", "main"]

ROWS: Final = ("late", "rate", "lag", "killed", "forming", "idle", "imports")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the row that the command line names."""
    rows: dict[str, Row] = {name: importlib.import_module(f"benchmarks.host.{name}").ROW for name in ROWS}
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="row", metavar="ROW")
    for name, row in rows.items():
        command = commands.add_parser(name, help=row.text, description=row.text)
        command.add_argument("--json", type=Path, help="write what was found to this file")
        row.add_arguments(command)
    args = parser.parse_args(arguments)
    if args.row is None:
        parser.print_help()
        return 0
    try:
        findings = rows[args.row].measure(args)
    except Failed as error:
        print(f"failed: {args.row}: {error}")
        return 1
    for finding in findings:
        print(finding)
    print(f"not run: {', '.join(name for name in ROWS if name != args.row)}; nor benchmarks.collectives")
    if args.json:
        _write(args, findings)
    return 0


def _write(args: argparse.Namespace, findings: list[Finding]) -> None:
    options = {name: value for name, value in vars(args).items() if name not in ("row", "json")}
    report = {
        "format": 1,
        "row": args.row,
        "options": options,
        "machine": machine(),
        "findings": [finding.to_json() for finding in findings],
    }
    args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
