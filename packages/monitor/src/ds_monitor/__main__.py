"""`python -m ds_monitor`: the commands of this package."""

import sys

from ds_config.ds_command import run_package

if __name__ == "__main__":
    sys.exit(run_package("ds_monitor"))
