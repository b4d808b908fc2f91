"""Graphs of compiled training pass all that inductor does for a CUDA device before a kernel is compiled, where there is no such device.

One process of its own compiles (`inductor_device_cases.py`): what it changes in torch stays there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ds_testing.inductor_device import missing_for

pytestmark = pytest.mark.skipif(bool(missing_for()), reason=missing_for())
Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """What takes the fields of a `Case` and returns those of its `Answer`."""
    folder = tmp_path_factory.mktemp("inductor_device")
    script = Path(__file__).with_name("inductor_device_cases.py")
    with tempfile.TemporaryFile("w+") as said:
        # A folder of its own for torch's cache: what was measured for this device is in none.
        process = subprocess.Popen(
            [sys.executable, "-B", str(script), str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True,
            env={**_environment(), "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch")},
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def line() -> str:
            found = stdout.readline()
            said.seek(0)
            assert found, said.read()[-8000:]
            return found

        def asked(**case: Any) -> dict[str, Any]:
            stdin.write(json.dumps(case) + "\n")
            stdin.flush()
            answer: dict[str, Any] = json.loads(line())
            return answer

        line()  # the device is in place
        yield asked
        stdin.close()
        assert process.wait(60) == 0
        stdout.close()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("TORCH", "TRITON"))}


def accepted(answer: dict[str, Any], stage: int) -> list[dict[str, Any]]:
    """Check that every graph was compiled, with the actions of its stage; return them."""
    assert not answer["refused"]
    graphs: list[dict[str, Any]] = answer["graphs"]
    assert {graph["backward"] for graph in graphs} == {False, True}
    for graph in graphs:
        calls = graph["calls"]
        assert graph["kernels"] > 0
        assert ("arrived" in calls) is graph["backward"]
        assert stage == 3 or "need" not in calls
        assert not graph["recorded"]
        gathers = graph["passes"] == ["reduce", "gather"] and not graph["backward"]
        assert not gathers or "need" in calls
    return graphs


@pytest.mark.parametrize("stage", range(4))
def test_graphs_of_every_stage_are_accepted(ask: Ask, stage: int) -> None:
    accepted(ask(model="plain", stage=stage), stage)


def test_a_graph_that_inductor_refuses_is_seen(ask: Ask) -> None:
    """What a session at stage 0 ended with on a card: gradients that were handed over, still written down as visible outputs."""
    answer = ask(model="plain", stage=0, visible=True)
    assert "'NoneType' object has no attribute 'target'" in answer["refused"]
    assert [graph["backward"] for graph in answer["graphs"]] == [False]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("recomputed", [True, False])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("model", ["gpt", "llama", "mixtral"])
def test_graphs_of_models_are_accepted(ask: Ask, model: str, stage: int, recomputed: bool) -> None:
    graphs = accepted(ask(model=model, stage=stage, checkpointing=recomputed), stage)
    assert all(graph["attention"] for graph in graphs)


PASSES = [
    (3, ("reduce", "gather", "prefetch", "keep", "free_activation"), {"expect"}),
    (3, ("reduce", "bucket", "gather", "offload_activation_all"), {"store", "fetch"}),
    (3, ("reduce", "gather", "offload_parameters"), {"load"}),
    (1, ("reduce", "bucket", "offload_opt_states_all", "free_activation"), {"park", "unpark", "free"}),
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["plain", "gpt"])
@pytest.mark.parametrize(("stage", "passes", "calls"), PASSES)
def test_graphs_that_more_passes_edited_are_accepted(
    ask: Ask, model: str, stage: int, passes: tuple[str, ...], calls: set[str]
) -> None:
    graphs = accepted(ask(model=model, stage=stage, checkpointing=False, passes=passes), stage)
    edited = [graph for graph in graphs if graph["passes"] == list(passes)]
    assert [graph["backward"] for graph in edited] == [False, True]
    assert calls <= {call for graph in edited for call in graph["calls"]}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_graphs_with_symbols_for_sizes_are_accepted(ask: Ask) -> None:
    accepted(ask(model="gpt", stage=3, dynamic=True), 3)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pieces_between_graph_breaks_are_accepted(ask: Ask) -> None:
    graphs = accepted(ask(model="breaking", stage=3, checkpointing=False), 3)
    assert len(graphs) > 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [0, 3])
def test_no_graph_with_actions_is_recorded(ask: Ask, stage: int) -> None:
    """A replay of a CUDA graph would leave the verbs out."""
    accepted(ask(model="plain", stage=stage, mode="reduce-overhead"), stage)
