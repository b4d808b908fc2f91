"""Ranks that replay graphs with their collectives, and what they send of logits: the tokens of one rank."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ds_comm
from ds_config.errors import PlanError
from ds_inference import SamplingParams, SchedulerConfig, cache_size, decoder_model, load
from ds_inference.batched_sampling import SequencePlace, sample_rows, sampling_row
from ds_inference.rank_worker import follow, leading
from ds_inference.tensor_parallel import RankShard, capture_obstacle, gather_likeliest, gather_logits
from ds_testing import world

pytest.importorskip("transformers")

_where = importlib.util.spec_from_file_location("inference_families", Path(__file__).parents[1] / "conftest.py")
assert _where is not None
assert _where.loader is not None
families: Any = importlib.util.module_from_spec(_where)
_where.loader.exec_module(families)
families.FAMILIES["llama of odd units"] = ("Llama", {"intermediate_size": 37, "num_key_value_heads": 1})
BUDGET = SchedulerConfig(16, 4, max_model_len=400)
OPTIONS: dict[str, Any] = {"cache_tokens": 128, "block_size": 4, "budget": BUDGET, "native": False}


class Recorder:
    """A graph of the CPU: what was captured is computed again, collectives included, from where its inputs are."""

    def __init__(self) -> None:
        self.captures, self.replays = list[int](), list[int]()

    def __call__(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        out = call()
        self.captures.append(len(out))

        def replay() -> None:
            self.replays.append(len(out))
            call()

        return replay, out


def captured(engine: Any) -> Recorder:
    engine.decoder._record = recorder = Recorder()
    engine._capture()
    return recorder


@pytest.mark.parametrize("drafts", [0, 2])
@world(2)
def test_graphs_of_ranks(drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[5, 9, 2] * 3, [7] * 5, [1]]
    hows = [SamplingParams(6), SamplingParams(10), SamplingParams(8, temperature=0.8, seed=3)]
    for name, by_expert in (("llama", False), ("llama of odd units", False), ("mixtral", True)):
        model = families._tiny(name)
        wanted = [a.tokens for a in load(model, **OPTIONS).generate(prompts, hows)]
        ours = load(
            model, group=ds_comm.world_group(), enable_expert_parallel=by_expert, num_speculative_tokens=drafts, **OPTIONS
        )  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(decoder_model, "captures_in_place", lambda *_: True)
            recorder = captured(ours)
        assert recorder.captures == ([12, 6, 4, 3, 2, 1] if drafts else [4, 2, 1])
        assert [a.tokens for a in ours.generate(prompts, hows)] == wanted, name
        assert recorder.replays


@world(2)
def test_one_leads_those_that_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = families._tiny("llama"), families._prompts_of([1, 5, 12])
    engine = load(model, group=ds_comm.world_group(), **OPTIONS)
    with monkeypatch.context() as patch:
        patch.setattr(decoder_model, "captures_in_place", lambda *_: True)
        recorder = captured(engine)
    greedy, drawn = SamplingParams(6), SamplingParams(6, temperature=0.7, n=2, seed=0)
    if torch.distributed.get_rank() == 1:
        follow(engine)
        assert recorder.replays
        return
    with leading(engine):
        found = [[a.tokens for a in engine.generate(prompts, how)] for how in (greedy, drawn, [greedy, drawn, greedy])]
    alone = load(model, **OPTIONS)
    assert found == [
        [a.tokens for a in alone.generate(prompts, how)] for how in (greedy, drawn, [greedy, drawn, greedy])
    ]


@world(2)
def test_logits_are_sent_where_somebody_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("gather_logits", "gather_likeliest"):
        real = getattr(decoder_model, name)
        monkeypatch.setattr(decoder_model, name, lambda *a, real=real, name=name: (calls.append(name), real(*a))[1])
    engine = load(families._tiny("llama"), group=ds_comm.world_group(), **OPTIONS)
    wanted = {
        "gather_likeliest": [SamplingParams(3), SamplingParams(3, n=2), SamplingParams(3, stop_token_ids=(5,))],
        "gather_logits": [
            SamplingParams(3, temperature=1.0, seed=1),
            SamplingParams(3, logprobs=0),
            SamplingParams(3, logit_bias={4: 1.0}),
            SamplingParams(3, repetition_penalty=1.1),
            SamplingParams(3, allowed_tokens=lambda _: torch.ones(97, dtype=torch.bool)),
        ],
    }
    for name, hows in wanted.items():
        for how in hows:
            calls.clear()
            engine.generate([[3, 4, 5]], how)
            assert set(calls) == {name}, how


@world(3)
def test_the_likeliest_of_all_ranges_is_argmax() -> None:
    """Of equal logits the first, of all -inf the first, NaN before numbers; ranges of 3, 2 and 2 tokens."""
    group = ds_comm.world_group()
    torch.manual_seed(0)
    whole = torch.randint(0, 4, (200, 7)).float()
    whole[0], whole[1, 5], whole[2, :] = -torch.inf, torch.nan, 2.0
    whole[3] = torch.tensor([-0.0, 0.0, -1, 0, 0, 0, 0])
    shard: Any = RankShard.__new__(RankShard)
    for field, value in (("whole", SimpleNamespace(vocab=7)), ("rank", group.rank), ("size", 3), ("by_expert", False)):
        object.__setattr__(shard, field, value)
    part = whole[:, slice(*shard.words())]
    assert torch.equal(gather_logits(part, 7, group).nan_to_num(9.0), whole.nan_to_num(9.0))
    found = gather_likeliest(part, shard, group)
    assert torch.equal(found.tokens, whole.argmax(-1))
    rows = [sampling_row(i, SamplingParams(1), SequencePlace([1], 1), found.vocab) for i in (4, 0, 5)]
    assert [t.token for t in sample_rows(found, rows).read()] == whole.argmax(-1)[[4, 0, 5]].tolist()


@world(2)
def test_what_cannot_be_captured_says_so() -> None:
    group = ds_comm.world_group()
    assert group.backend("cpu") == "gloo"
    assert "by gloo for cpu tensors" in capture_obstacle(group, torch.device("cpu"))
    assert "no backend for cuda tensors" in capture_obstacle(group, torch.device("cuda")) or group.backend("cuda")
    assert capture_obstacle(ds_comm.self_group(), torch.device("cuda")) == ""
    nccl: Any = SimpleNamespace(size=2, backend=lambda kind: {"cuda": "nccl"}.get(kind, ""))
    assert capture_obstacle(nccl, torch.device("cuda")) == ""


@world(2)
def test_caches_of_ranks_have_as_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each took what was free of its own device: plans named blocks that another rank had not."""
    rank = torch.distributed.get_rank()
    spec = load(families._tiny("llama"), **OPTIONS).decoder.spec
    decoder: Any = SimpleNamespace(
        device=torch.device("cuda"), spec=spec, dtype=torch.float32, group=ds_comm.world_group()
    )
    monkeypatch.setattr(cache_size, "_step_bytes", lambda *_: 0)
    free = [[1 << 20, 1 << 19], [1 << 20, 0]]
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda _: (free[0][rank], 1 << 20))
    alone = SimpleNamespace(**{**vars(decoder), "group": ds_comm.self_group()})
    counts = ds_comm.all_gather_json(cache_size.cache_blocks(alone, 4, None, None, 1.0))
    assert counts[0] > counts[1]
    assert cache_size.cache_blocks(decoder, 4, None, None, 1.0) == counts[1]
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda _: (free[1][rank], 1 << 20))
    with pytest.raises(PlanError, match="bytes are left"):
        cache_size.cache_blocks(decoder, 4, None, None, 1.0)
