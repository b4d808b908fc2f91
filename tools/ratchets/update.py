"""Agree to the tree as it is: write the files of this folder anew. Say in the commit why something grew.

usage: python tools/ratchets/update.py [NAME ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from repo.ratchets import RATCHETS


def main(names: list[str]) -> int:
    for name in names or RATCHETS:
        ratchet = RATCHETS[name]
        ratchet.file.write_text(json.dumps(ratchet.measure(), indent=1) + "\n")
        sys.stdout.write(f"{ratchet.file.name} written\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
