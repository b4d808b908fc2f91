"""`python -m ds_launcher` is `ds`."""

from __future__ import annotations

import sys

from ds_launcher.cli import main

sys.exit(main())
