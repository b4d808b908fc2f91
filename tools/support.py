"""Run the hundred drawn combinations and keep what they came to: packages/engine/src/ds_engine/support.json, then the pages of it.

usage: python tools/support.py            (minutes; `--keep FILE` only reads what a run with DS_SUPPORT_RECORD=FILE left)
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from combinations import Combination, drawn

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "packages/engine/src/ds_engine/support.json"
TESTS = "tests-integration/composition"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, help="a file of finished runs")
    found = parser.parse_args().keep
    with tempfile.TemporaryDirectory() as folder:
        if found is None:
            found = Path(folder) / "runs.jsonl"
            command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", TESTS]
            if (code := subprocess.call(command, cwd=ROOT, env=os.environ | {"DS_SUPPORT_RECORD": str(found)})) != 0:
                return code
        runs = {}
        for row in map(json.loads, found.read_text().splitlines()):
            outcome = row.pop("found")
            runs[Combination(**row)] = outcome
    missing = [one for one in drawn(100) if one not in runs]
    if missing:
        sys.stderr.write("not run: " + "; ".join(map(str, missing)) + "\n")
        return 1
    rows = ",\n".join(f"  {json.dumps(one.as_dict() | {'found': runs[one]})}" for one in drawn(100))
    RECORD.write_text(f'{{"ranks": 4, "combinations": [\n{rows}\n]}}\n')
    return subprocess.call([sys.executable, "tools/pages.py", "support", "support-data"], cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main())
