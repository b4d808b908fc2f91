"""`ds explain CODE`: what an error means and what to do, from texts that are installed with this package.

Words: a *code* is the short name at the end of every error of a ds package (`ds explain comm-hang`). The texts are
those of that page; one Markdown file a package, a section a code.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from importlib.resources import files

from ds_config.did_you_mean import nearest

__all__ = ["HELP", "explanations", "main", "register"]

HELP = "explain an error by the code in its last line"
_SECTION = re.compile(r"^## +(\S+) *$", re.MULTILINE)


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("code", nargs="?", help="a code, or the last line of an error; all codes without one")
    parser.add_argument("--json", action="store_true", help="print JSON: an object of codes and their texts")


def main(args: argparse.Namespace) -> int:
    """Print the section of the code; exit 1 where there is none."""
    known = explanations()
    if args.code is None:
        print(json.dumps(dict(sorted(known.items())), indent=1) if args.json else "\n".join(sorted(known)))
        return 0
    code = args.code.rpartition("#")[2].strip().removeprefix("ds explain ").strip()
    if code in known:
        print(json.dumps({code: known[code]}) if args.json else f"{code}\n\n{known[code]}")
        return 0
    hint = "".join(f"; did you mean `{near}`?" for near in nearest(code, known))
    print(f"ds explain: there is no error code `{code}`{hint}  (`ds explain` lists them)", file=sys.stderr)
    return 1


def explanations() -> dict[str, str]:
    """Read the explanation of each error code, in the order of the files."""
    texts: dict[str, str] = {}
    for file in sorted(files("ds_config").joinpath("explanations").iterdir(), key=lambda file: file.name):
        if file.name.endswith(".md"):
            parts = _SECTION.split(file.read_text(encoding="utf-8"))
            texts |= {code: text.strip() for code, text in zip(parts[1::2], parts[2::2], strict=True)}
    return texts


if __name__ == "__main__":
    from ds_config.ds_command import main as ds

    sys.exit(ds(["explain", *sys.argv[1:]]))
