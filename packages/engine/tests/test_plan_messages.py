"""What a plan sends over which links, and the least step."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch import nn

from ds_comm.rehearsal import fabric_from
from ds_config.ds_command import main as ds
from ds_engine import load_config, make_plan, shapes_of
from ds_engine.plan_messages import least_step, messages_of, traffic_rows

WIDTH, LAYERS = 64, 4
PARAMETERS = LAYERS * WIDTH * WIDTH


def planned(world: int, **changes: Any) -> Any:
    content: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "optimizer": {"type": "AdamW"},
    }
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    return make_plan(load_config(content | changes), shapes_of(model), world)


def total(plan: Any, op: str, phase: str) -> int:
    return sum(m.count * m.nbytes for m in messages_of(plan) if (m.op, m.phase) == (op, phase))


@pytest.mark.parametrize(
    ("stage", "wanted"),
    [
        (0, {("all_reduce", "backward"): 1}),
        (1, {("reduce_scatter", "backward"): 1, ("all_gather", "update"): 1}),
        (2, {("reduce_scatter", "backward"): 3, ("all_gather", "update"): 1}),
        (3, {("all_gather", "forward"): 3, ("all_gather", "backward"): 3, ("reduce_scatter", "backward"): 3}),
    ],
)
def test_each_stage_sends_what_theory_says(stage: int, wanted: dict[tuple[str, str], int]) -> None:
    plan = planned(16, zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0})
    for op in ("all_reduce", "all_gather", "reduce_scatter"):
        for phase in ("forward", "backward", "update"):
            assert total(plan, op, phase) == 4 * PARAMETERS * wanted.get((op, phase), 0)


def test_one_rank_sends_nothing() -> None:
    assert messages_of(planned(1, zero_optimization={"stage": 3})) == ()
    assert traffic_rows(planned(1), fabric_from("h100-ib400"))["messages"] == "none of weights or gradients"


def test_the_least_step_is_the_longer_of_computing_and_sending() -> None:
    plan = planned(16, zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0})
    fabric = fabric_from("eth1")
    alone = least_step(plan, fabric)
    assert alone.seconds == pytest.approx(sum(alone.messages_s.values()))
    forward = alone.messages_s["forward"]
    # As much computing as makes the forward twice as long as its messages.
    tokens = 1000
    rate = 2 * tokens * 3 * PARAMETERS / (2 * forward)
    both = least_step(plan, fabric, tokens, rate)
    assert both.compute_s["forward"] == pytest.approx(2 * forward)
    wanted = 2 * forward + max(alone.messages_s["backward"], 4 * forward)
    assert both.seconds == pytest.approx(wanted)


def test_links_between_nodes_are_told_from_those_within() -> None:
    plan = planned(16, zero_optimization={"stage": 2})
    assert "between nodes" in traffic_rows(plan, fabric_from("h100-ib400"))["messages"]
    assert "within a node" in traffic_rows(plan, fabric_from("h100-ib400", 16))["messages"]


def test_the_command_prints_it(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "cfg.json"
    config.write_text(json.dumps({"train_batch_size": 16, "zero_optimization": {"stage": 3}}))
    model = tmp_path / "model.py"
    model.write_text("from torch import nn\ndef make():\n    return nn.Linear(64, 64)\n")
    arguments = ["plan", str(config), "--world-size", "16", "--model", f"{model}:make", "--links", "h100-ib400"]
    assert ds([*arguments, "--nodes", "4", "--tokens", "4096", "--tflops", "400", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows["links"] == "h100-ib400: 4 ranks a node"
    assert "4,096 tokens at 400 TFLOP/s" in rows["least step"]
    assert ds([*arguments, "--nodes", "3"]) == 1
    assert "do not divide over 3 nodes" in capsys.readouterr().err
    assert ds([*arguments[:-1], "no-such-links"]) == 1
    assert "no preset" in capsys.readouterr().err
