"""Write the pages of docs/ that are made from data: errors, packages, configuration keys, names of DeepSpeed, combinations.

usage: python tools/pages.py [NAME ...]      (NAME: errors, packages, configuration, surface, loops, support, support-data, explain-PACKAGE,
picture-PAGE; all without one)
"""

from __future__ import annotations

import sys

from repo.pages import PAGES


def main(names: list[str]) -> int:
    for name in names or PAGES:
        PAGES[name].file.parent.mkdir(exist_ok=True)
        PAGES[name].file.write_text(PAGES[name].text())
        sys.stdout.write(f"{PAGES[name].file.name} written\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
