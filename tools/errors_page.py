"""Write docs/reference/errors.md from docs/reference/errors.d/.

usage: python tools/errors_page.py
"""

from __future__ import annotations

import sys

from repo.errors import PAGE, page


def main() -> int:
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
