"""The library says what must be known, once and on rank 0; more when it is asked."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ds_monitor import configure_logging
from ds_monitor.logs import PACKAGES


@pytest.fixture(autouse=True)
def _loggers_as_before() -> Iterator[None]:
    before = {name: (list(logging.getLogger(name).handlers), logging.getLogger(name).level) for name in PACKAGES}
    yield
    for name, (handlers, level) in before.items():
        logger = logging.getLogger(name)
        logger.handlers[:], logger.propagate = handlers, True
        logger.setLevel(level)


SAYING = """
import logging, sys
from ds_monitor import log_requested
log = logging.getLogger("ds_zero.somewhere")
for _ in range(3):
    log.info("detail")
    log.warning("slow disk")
log.error("lost")
log_requested(log, "asked for")
"""


def stderr(code: str, **env: str) -> list[str]:
    base = {key: value for key, value in os.environ.items() if key not in ("RANK", "PMI_RANK", "SLURM_PROCID")}
    done = subprocess.run([sys.executable, "-c", code], env=base | env, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, "")
    return [line.rpartition("] ")[2] for line in done.stderr.splitlines()]


def test_a_job_that_configures_nothing_sees_warnings_once_and_what_it_asked_for() -> None:
    assert stderr(SAYING) == ["slow disk", "lost", "asked for"]


@pytest.mark.parametrize("name", ["RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"])
def test_other_ranks_of_such_a_job_write_errors_only(name: str) -> None:
    assert stderr(SAYING, **{name: "3"}) == ["lost"]


def test_a_job_that_configures_logging_gets_everything_there_and_only_there() -> None:
    before = "import logging; logging.basicConfig(format='MINE] %(message)s', level=logging.WARNING)\n"
    assert stderr(before + SAYING, RANK="3") == ["slow disk", "slow disk", "slow disk", "lost"]
    assert stderr(before + SAYING) == ["slow disk", "slow disk", "slow disk", "lost", "asked for"]


def test_a_process_without_standard_error_goes_on() -> None:
    assert stderr("import sys; sys.stderr = None\n" + SAYING) == []


def test_rank_0_shows_the_level_and_each_warning_once() -> None:
    out = io.StringIO()
    configure_logging("INFO", rank=0, stream=out)
    log = logging.getLogger("ds_zero.somewhere")
    log.debug("detail")
    for _ in range(3):
        log.info("step")
        log.warning("slow disk")
    said = [line.split(": ", 1)[1] for line in out.getvalue().splitlines()]
    assert said == ["step", "slow disk", "step", "step"]


def test_other_ranks_show_errors_with_their_rank() -> None:
    out = io.StringIO()
    configure_logging("DEBUG", rank=3, stream=out)
    log = logging.getLogger("ds_comm")
    log.info("step")
    log.warning("slow")
    log.error("lost rank 5")
    assert out.getvalue().count("\n") == 1
    assert out.getvalue().startswith("[rank 3]")


def test_calling_again_replaces() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure_logging("INFO", stream=first)
    configure_logging("INFO", stream=second)
    logging.getLogger("ds_ops").info("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


def test_a_level_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="'LOUD' is not one of DEBUG"):
        configure_logging("LOUD")
