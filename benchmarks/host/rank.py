"""The program of a rank: calls the function ``rank`` of a row's module, and leaves what it returns in a file."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    # At the end: an installed aiodist must win over the source tree, which has no compiled core.
    sys.path.append(str(Path(__file__).resolve().parent.parent.parent))
    options = json.loads(sys.argv[2])
    answer = importlib.import_module(sys.argv[1]).rank(options)
    Path(options["folder"], f"answer.{os.environ['AIODIST_RANK']}").write_text(json.dumps(answer))
