"""What the documents say is so."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from aiodist import _core

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MEMORY = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")


SIZES = (2, 8, 128)


def row(label: str) -> list[int]:
    """Return the figures of a row of the first table in docs/memory.md, for each of `SIZES`."""
    found = re.search(rf"^\| {re.escape(label)} \|(.*)\|$", MEMORY, re.MULTILINE)
    return [int(cell) for cell in found[1].split("|")] if found else []


def test_the_readme_shows_the_example() -> None:
    """Word for word, but for its first line."""
    _, _, body = (ROOT / "examples" / "hello.py").read_text(encoding="utf-8").partition('"""\n\n')
    assert body.strip() in README


def test_the_readme_links_to_files_that_exist() -> None:
    """Links within the repository."""
    links = re.findall(r"\]\((?!https?://)([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def measured(size: int) -> dict[str, int]:
    """Return what a column of the table must say: the tuning, and extents as a fresh process lays them out."""
    slots, slot_nbytes, segment_nbytes, depth = tuning = _core.default_tuning(size)
    code = f"import json; from aiodist import _core; print(json.dumps([_core.reserve({tuning}, 1, rank, {size}) for rank in (0, 1)]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    header, second = json.loads(done.stdout)
    block, staging = second - header, size * depth * segment_nbytes
    return {
        "header slots a rank": slots,
        "largest small call (payload of a slot)": slot_nbytes,
        "segment of a large call": segment_nbytes,
        "segments of a chunk in flight": depth,
        "header of the arena, a process": header,
        "block, a rank and group": block,
        "staging, a rank and group": staging,
        "a rank, small calls only": header + block,
        "a rank, with large calls": header + block + staging,
        "all ranks, small calls only": size * (header + block),
        "all ranks, with large calls": size * (header + block + staging),
    }


def test_the_memory_table() -> None:
    """Every figure of the first table is what the core says."""
    columns = [measured(size) for size in SIZES]
    expected = {label: [column[label] for column in columns] for label in columns[0]}
    assert {label: row(label) for label in expected} == expected
