"""What the documents say is so."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.ranks import run_local

import aiodist
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


def leads_somewhere(page: Path, link: str) -> bool:
    """True where a link within the repository has a file, and a heading if it names one."""
    name, _, heading = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    if not heading:
        return target.exists()
    titles = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
    return heading in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))])
def test_the_links_of_a_page_lead_somewhere(page: str) -> None:
    """Those within the repository."""
    text = (ROOT / page).read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?://)([^)]+)\)", text)
    assert links or page != "README.md"
    assert [link for link in links if not leads_somewhere(ROOT / page, link)] == []


# What the arena of a fresh process has taken: for its header, and for each rank's block, copies and staging. A call takes these two when
# it gives more than a slot holds, and more than is copied.
TAKEN = """
import asyncio, json, os, sys
import numpy as np
import aiodist
from aiodist import _core

def taken():
    return 512 * os.fstat(_core.fds()[0]).st_blocks

async def main(size, *limits):
    found = [taken()]
    async with aiodist.local_world(size) as groups:
        found.append(taken())
        for nbytes in limits:
            for extent in (nbytes, nbytes + 1):
                await asyncio.gather(*(group.all_gather(np.zeros(extent, np.uint8)) for group in groups))
                found.append(taken())
    print(json.dumps(found))

asyncio.run(main(*map(int, sys.argv[1:])))
"""


def measured(size: int) -> dict[str, int]:
    """Return what a column of the table must say: the tuning, and what a fresh process with a world of that size takes.

    The largest copied call is the table's own: that one byte more takes staging, and it does not, shows that it is right.
    """
    slots, slot_nbytes, segment_nbytes, depth = _core.default_tuning(size)
    copied = dict(zip(SIZES, row("largest copied call"), strict=True))[size]
    command = [sys.executable, "-c", TAKEN, *map(str, (size, slot_nbytes, copied))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    header, formed, small, more, most, large = json.loads(done.stdout)
    assert (small, most) == (formed, more), "what is small takes nothing, and what is copied takes no staging"
    block, copies, staging = (formed - header) // size, (more - small) // size, (large - most) // size
    assert staging == size * depth * segment_nbytes
    return {
        "header slots a rank": slots,
        "largest small call (payload of a slot)": slot_nbytes,
        "largest copied call": copied,
        "segment of a large call": segment_nbytes,
        "segments of a chunk in flight": depth,
        "header of the arena, a process": header,
        "block, a rank and group": block,
        "copies, a rank and group": copies,
        "staging, a rank and group": staging,
        "a rank, small calls only": header + block,
        "a rank, small and copied calls": header + block + copies,
        "a rank, calls of all sizes": header + block + copies + staging,
        "all ranks, small calls only": size * (header + block),
        "all ranks, small and copied calls": size * (header + block + copies),
        "all ranks, calls of all sizes": size * (header + block + copies + staging),
    }


def test_the_memory_table() -> None:
    """Every figure of the first table is what the core says."""
    columns = [measured(size) for size in SIZES]
    expected = {label: [column[label] for column in columns] for label in columns[0]}
    assert {label: row(label) for label in expected} == expected


COLLECTIVES = (ROOT / "docs" / "collectives.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", COLLECTIVES, re.MULTILINE | re.DOTALL)
# In the first block a comment says what a call gives on the ranks: the same on all, or one after the other.
CLAIM = re.compile(r"^await (?P<call>.*?)  +# (?P<claim>all: \[.*\]|\[.*\](?:, \[.*\])+)$", re.MULTILINE)


async def _run_blocks(world: aiodist.Group) -> None:
    body = "\n".join(BLOCKS) + "\nresults = dict(locals())"
    source = "async def body(world, np, aiodist):\n" + textwrap.indent(body, "    ") + "\n    return results"
    scope: dict[str, Any] = {}
    exec(source, scope)
    results = await scope["body"](world, np, aiodist)
    assert list(results["got"]) == list(range((world.rank - 1) % 3 + 1))
    assert all((array == 1).all() for array in results["weights"])
    assert all((array == 1).all() for array in results["reduced"].values())
    assert results["names"] == ["rank 0", "rank 1", "rank 2"]
    for group in (results["pair"], results["half"], results["evaluation"]):
        if group is not None:
            await group.aclose()


def test_the_blocks_of_the_page_on_collectives_run() -> None:
    """All of them, one after the other, on three ranks."""
    assert len(BLOCKS) >= 6
    asyncio.run(run_local(3, _run_blocks))


async def _run_claims(world: aiodist.Group) -> list[str]:
    given = {"x": np.arange(6) + 10 * world.rank, "world": world, "np": np}
    return [str(await eval(match["call"], dict(given))) for match in CLAIM.finditer(BLOCKS[0])]


def test_the_comments_of_the_first_block_are_right() -> None:
    """Where a comment says what the ranks get."""
    claims = [match["claim"] for match in CLAIM.finditer(BLOCKS[0])]
    assert len(claims) == 5
    for results, claim in zip(zip(*asyncio.run(run_local(3, _run_claims)), strict=True), claims, strict=True):
        due = [claim.removeprefix("all: ")] * 3 if claim.startswith("all: ") else claim.split(", ")
        assert [" ".join(result.split()).replace("[ ", "[") for result in results] == due


@pytest.mark.parametrize("example", ["hello.py", "refresh_weights.py"])
def test_an_example_runs(example: str) -> None:
    """As its first line says."""
    command = [sys.executable, "-m", "aiodist", "run", "-n", "2", str(ROOT / "examples" / example)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert "rank 1" in done.stdout
