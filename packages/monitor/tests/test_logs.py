"""The library says nothing until asked; then rank 0 says each thing once."""

from __future__ import annotations

import io
import logging
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


def test_silent_by_default() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import ds_monitor, logging; logging.getLogger('ds_monitor.api').error('x')"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("", "")


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
