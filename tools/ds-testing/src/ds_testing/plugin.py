"""The pytest side: world tests go to the pool, everything else is left alone."""

from __future__ import annotations

import atexit
import gc
import os
import pickle
import random
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from ds_testing.cards import NO_CARD, CardBook
from ds_testing.device_report import DeviceReport, note_run
from ds_testing.pool import Pool, Task
from ds_testing.protocol import Outcome, Source
from ds_testing.report import render, verdict
from ds_testing.spec import ATTRIBUTE, World

__all__ = [
    "pytest_addoption",
    "pytest_collection",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_pyfunc_call",
    "pytest_runtest_setup",
    "pytest_runtest_teardown",
    "pytest_unconfigure",
]

_HYPOTHESIS = "_hypothesis_internal_use_settings"
"""Where hypothesis keeps the settings of a test."""

_START_S = 60.0
"""Seconds that the start of a world's processes may take, beside its own deadline."""

_POOL = pytest.StashKey[Pool]()
_CARDS = pytest.StashKey[CardBook]()


_LARGE, _DRAWN = 4, 4
"""A test function with more cases than the first is run with so many of them, where `--cases=sample`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases",
        choices=("all", "sample"),
        default="all",
        help=f"sample: of a function with more than {_LARGE} cases run {_DRAWN} drawn ones (DS_CASES_SEED draws others)",
    )
    parser.addoption(
        "--devices-record",
        type=Path,
        help="print the table of the tests on devices, and write it to this file of records where there is a card",
    )
    parser.addini("every_case", "folders and files of which --cases=sample leaves nothing out", "args", default=[])
    parser.addini(
        "few_cases",
        "a file with lines `number path[::function]`: how many cases of a function --cases=sample draws there; below one: its chance to run",
    )
    parser.addini(
        "long_files", "a file with lines `seconds path`: with pytest-xdist these files run first, longest first"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not Path("/dev/nvidiactl").exists():
        # Triton reads it once, at its import, which any test may cause: without a device its kernels run in the interpreter in all of them.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    config.stash[_POOL] = Pool(capture=config.getoption("capture") != "no")
    book = config.stash[_CARDS] = CardBook()
    config.pluginmanager.register(DeviceReport(book, config.getoption("devices_record")), "ds_testing_devices")
    _set_up_hypothesis()


def _set_up_hypothesis() -> None:
    """Examples take as long as they take: a machine may be busy, and no test is about time."""
    try:
        from hypothesis import settings
    except ImportError:
        return
    settings.register_profile("ds", settings(), deadline=None)
    settings.load_profile("ds")


def _fewer_examples(test: object) -> None:
    """Hypothesis draws a quarter of the examples that a test names, and at least ten."""
    named = getattr(test, _HYPOTHESIS, None)
    function = getattr(test, "__func__", test)
    if named is not None and not hasattr(function, "fewer_examples"):  # the cases of one function share it
        from hypothesis import settings

        function.fewer_examples = True  # type: ignore[attr-defined]
        setattr(function, _HYPOTHESIS, settings(named, max_examples=max(10, named.max_examples // 4)))


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_POOL].close()


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collect tests without looking for garbage, and leave what was imported out of later collections of it.

    Modules of tests import a million objects that stay: looking at them was a third of the time of a collection, and of what tests take
    that collect garbage themselves, as pytest does five times at its end.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        return (yield)
    finally:
        if running:
            gc.enable()
        gc.collect()  # the cases that a sample leaves out
        gc.freeze()
        atexit.register(gc.unfreeze)  # at the end of Python nanobind prints what it finds alive of its types


@pytest.hookimpl(trylast=True)  # after `-m` and `-k`: a sample is of the cases that they leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Draw cases where a sample was asked for, and let pytest-timeout wait for worlds.

    A world has a deadline of its own, which names the ranks that wait: pytest-timeout must not come before it.
    """
    if config.getoption("cases") == "sample":
        few = _listed(config.rootpath, config.getini("few_cases"))
        left_out = _left_out(items, config.rootpath, config.getini("every_case"), few)
        config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
        items[:] = [item for item in items if id(item) not in left_out]
        for item in items:
            _fewer_examples(getattr(item, "obj", None))
    if hasattr(config, "workerinput"):  # of pytest-xdist: a long file that begins last is waited for by idle processes
        seconds = _listed(config.rootpath, config.getini("long_files"))
        items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], 0))  # stable: files stay whole
    if not config.pluginmanager.hasplugin("timeout"):
        return
    for item in items:
        spec = getattr(getattr(item, "obj", None), ATTRIBUTE, None)
        if isinstance(spec, World) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(spec.timeout + _START_S))


def _listed(root: Path, name: str) -> dict[str, float]:
    """The numbers that the list `name` has for files and functions, by their names in pytest; none without a list."""
    if not name:
        return {}
    lines = [line.split() for line in (root / name).read_text().splitlines() if line and not line.startswith("#")]
    return {place: float(number) for number, place in lines}


def _left_out(
    items: Sequence[pytest.Item], root: Path, every_case: Sequence[str], few: Mapping[str, float]
) -> set[int]:
    """The cases that a sample does not have, as ids. What is drawn depends on the function's name and the seed, not on other tests."""
    kept_whole = [root / name for name in every_case]
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        on_card = item.get_closest_marker("gpu") is not None  # what a draw has of these is skipped without a card
        if (
            isinstance(item, pytest.Function)
            and not on_card
            and not any(item.path.is_relative_to(place) for place in kept_whole)
        ):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out: set[int] = set()
    for name, group in cases.items():
        number = few.get(name, few.get(name.partition("::")[0]))
        if len(group) > (number or _LARGE):
            draw = random.Random(f"{os.environ.get('DS_CASES_SEED', '0')} {name}")
            count = int(number or _DRAWN) or int(draw.random() < (number or 0))
            drawn = {id(item) for item in draw.sample(group, count)}
            left_out |= {id(item) for item in group} - drawn
    return left_out


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    spec = getattr(pyfuncitem.obj, ATTRIBUTE, None)
    if not isinstance(spec, World):
        return None
    spec = _on_cards(pyfuncitem, spec)
    run = pyfuncitem.config.stash[_POOL].run(_task(pyfuncitem), spec)
    outcome, reason = verdict(run.results)
    if outcome is Outcome.SKIPPED:
        pytest.skip(reason)
    if outcome is Outcome.XFAILED:
        pytest.xfail(reason)
    if outcome is Outcome.FAILED:
        pytest.fail(render(run.results, deadline_s=run.deadline_s), pytrace=False)
    return True


def _on_cards(item: pytest.Function, spec: World) -> World:
    """The world of this case: on cards where it or its parameter `device` says so. Skips it where there are none."""
    named = item.funcargs.get("device", spec.device)
    if item.get_closest_marker("device_world") is not None or spec.device == "cuda":
        note_run(item, str(named), spec.size, spec.backend)
    if named != "cuda":
        return spec
    book = item.config.stash[_CARDS]
    if not book.cards:
        pytest.skip(NO_CARD)
    backend = None if spec.backend is None else book.answer(spec.size).backend
    note_run(item, "cuda", spec.size, backend)
    return replace(spec, device="cuda", cards=book.cards, backend=backend)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note where tests of one card run, for the table: those marked `gpu` that are no world."""
    if item.get_closest_marker("gpu") is not None and not isinstance(
        getattr(getattr(item, "obj", None), ATTRIBUTE, None), World
    ):
        note_run(item, "cuda", 1, "none")


def _task(item: pytest.Function) -> Task:
    module: ModuleType = item.module
    sources = (Source(module.__name__, str(item.path)), *_conftests(item.path, item.config.rootpath))
    names = item._fixtureinfo.argnames
    if "monkeypatch" in item.fixturenames and "monkeypatch" not in names:
        pytest.fail(
            f"{item.nodeid}: a fixture patches pytest's own process, and the ranks are others\n"
            "Patch in the body: a world test that takes monkeypatch has one in each rank.",
            pytrace=False,
        )
    return Task(_qualname(item), sources, _pickled(item, {name: _sent(item.funcargs[name]) for name in names}))


def _sent(value: object) -> object:
    """A rank patches its own process: it gets an empty MonkeyPatch, and undoes it when the body ends."""
    return pytest.MonkeyPatch() if isinstance(value, pytest.MonkeyPatch) else value


def _qualname(item: pytest.Function) -> str:
    return ".".join([node.name for node in item.listchain() if isinstance(node, pytest.Class)] + [item.originalname])


def _pickled(item: pytest.Function, arguments: dict[str, object]) -> bytes:
    for name, value in arguments.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            pytest.fail(
                f"{item.nodeid}: the argument {name!r} ({type(value).__name__}) cannot be sent to the ranks: {error}\n"
                "A world test takes parameters and fixtures that pickle (tmp_path and monkeypatch do).",
                pytrace=False,
            )
    return pickle.dumps(arguments)


def _conftests(path: Path, root: Path) -> list[Source]:
    """The conftest.py files above a test, under the names pytest gave them."""
    wanted = {str(folder / "conftest.py") for folder in path.parents if folder.is_relative_to(root)}
    files = ((name, getattr(module, "__file__", None)) for name, module in list(sys.modules.items()))
    return [Source(name, file) for name, file in files if file in wanted]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """Fail the last test of a file that leaves torch's default group in pytest's own process: other files would run in it."""
    yield
    if nextitem is not None and nextitem.path == item.path:
        return
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    name = distributed.group.WORLD.group_name
    distributed.destroy_process_group()
    pytest.fail(f"{item.path.name} leaves a default process group behind (torch's name {name!r})", pytrace=False)
