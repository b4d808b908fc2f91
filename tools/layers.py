"""Print an order of a package's files that fits its imports, in the form of layers.toml.

usage: python tools/layers.py [NAME ...]     (without a name: all packages)
"""

from __future__ import annotations

import sys

from repo.layers import suggest
from repo.projects import load


def main(names: list[str]) -> int:
    projects = {project.folder.name: project for project in load().values()}
    for name in names or projects:
        rows = suggest(projects[name])
        lines = "".join(f"    [{', '.join(repr(file).replace(chr(39), chr(34)) for file in row)}],\n" for row in rows)
        sys.stdout.write(f"{name} = [\n{lines}]\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
