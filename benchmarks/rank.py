"""The program of one rank. Started by each peer's launcher; obeys the controller over a unix socket and sleeps in its read otherwise."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    """Read the arguments, form the world and serve until told to stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer", required=True)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--store", default="")
    args = parser.parse_args()
    # At the end: an installed aiodist must win over the source tree, which has no compiled core.
    sys.path.append(str(Path(__file__).resolve().parent.parent))
    from benchmarks.serve import serve

    return serve(args.peer, args.socket, rank=args.rank, ranks=args.ranks, store=args.store)


if __name__ == "__main__":
    sys.exit(main())
