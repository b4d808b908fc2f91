"""What FlashInfer is told equals what the gather computes; a module that checks its arguments and computes their meaning stands for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_accel import streams
from ds_inference import SamplingParams, flashinfer_attention, load, paged_attention
from ds_inference.paged_attention import ATTENTION, _attend_by_gather, _attend_flashinfer, captures_in_place, make_batch
from ds_inference.requests import ScheduledChunk
from ds_inference.spec import AttentionSpec
from ds_ops.registry import Backend, Op, reference_backend


class Wrapper:
    """`BatchPrefillWithPagedKVCacheWrapper` as its documentation has it: page tables in CSR form, plan on the host, then runs."""

    made: list[Wrapper]

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str) -> None:
        assert (float_workspace_buffer.dtype, kv_layout) == (torch.uint8, "NHD")
        self.workspace, self.plans, self.runs = float_workspace_buffer, 0, 0
        Wrapper.made.append(self)

    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool, sm_scale: float,
        window_left: int, logits_soft_cap: float | None, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        for t in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert (t.dtype, t.dim()) == (torch.int32, 1)
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert int(paged_kv_indptr[-1]) == len(paged_kv_indices)
        assert all(1 <= n <= page_size for n in paged_kv_last_page_len.tolist())
        assert causal
        assert num_qo_heads % num_kv_heads == 0
        self.plans += 1
        self.tables = [t.tolist() for t in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)]
        self.heads, self.width, self.size = (num_qo_heads, num_kv_heads), head_dim_qk, page_size
        self.how, self.kinds = (sm_scale, window_left, logits_soft_cap), (q_data_type, kv_data_type)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        keys, values = paged_kv_cache
        assert q.is_contiguous()
        assert (q.dtype, keys.dtype) == self.kinds
        assert keys.shape[1:] == (self.size, self.heads[1], self.width)
        self.runs += 1
        (scale, left, cap), out = self.how, torch.empty_like(q)
        starts, pages, indices, last = self.tables
        assert starts[-1] == len(q)
        for i, rest in enumerate(last):
            own = indices[pages[i] : pages[i + 1]]
            length, count = (len(own) - 1) * self.size + rest, starts[i + 1] - starts[i]
            k, v = (t[own].flatten(0, 1)[:length].float() for t in (keys, values))
            for j in range(count):
                here = length - count + j
                seen = slice(0 if left < 0 else max(0, here - left), here + 1)
                for head in range(self.heads[0]):
                    group = head // (self.heads[0] // self.heads[1])
                    scores = k[seen, group] @ q[starts[i] + j, head].float() * scale
                    scores = scores if not cap else cap * torch.tanh(scores / cap)
                    out[starts[i] + j, head] = (torch.softmax(scores, 0) @ v[seen, group]).to(q.dtype)
        return out


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    Wrapper.made = []
    module = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper)
    monkeypatch.setattr(flashinfer_attention, "_module", lambda: module)
    monkeypatch.setattr(flashinfer_attention, "_plans", flashinfer_attention._Plans())
    monkeypatch.setattr(flashinfer_attention, "_WORKSPACE", 16)
    monkeypatch.setattr(streams, "pin", lambda tensor: tensor)


CHUNKS = [
    ScheduledChunk(0, (1, 2, 3), 14, (2, 0), 1),
    ScheduledChunk(1, (1,), 15, (1,), 1),
    ScheduledChunk(2, (4, 5), 0, (3, 4), 1),  # a block more than it has tokens for
    ScheduledChunk(3, (6,), 16, (5, 6), 1),
]


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (None, 3.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_attention(window: int | None, softcap: float | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    spec = AttentionSpec(4, 2, 64, 64, 0.2, window=window, softcap=softcap)
    cache = torch.randn(7, 16, 2, 64).to(dtype), torch.randn(7, 16, 2, 64).to(dtype)
    batch, _ = make_batch(CHUNKS, 16, torch.device("cpu"))
    q = torch.randn(7, 4, 64).to(dtype)
    found, wanted = (run(q, cache, batch, spec, (None, None)) for run in (_attend_flashinfer, _attend_by_gather))
    assert torch.allclose(found.float(), wanted.float(), atol=1e-5 if dtype == torch.float32 else 3e-2)


def test_one_plan_for_a_batch_and_kind_of_layer() -> None:
    full, local = (AttentionSpec(4, 2, 64, 64, 0.2, window=window) for window in (None, 5))
    cache = torch.randn(7, 16, 2, 64), torch.randn(7, 16, 2, 64)
    for _ in range(2):
        batch, _ = make_batch(CHUNKS, 16, torch.device("cpu"))
        for spec in (full, local, full, local):
            _attend_flashinfer(torch.randn(7, 4, 64), cache, batch, spec, (None, None))
    assert [(w.plans, w.runs) for w in Wrapper.made] == [(2, 4), (2, 4)]
    assert Wrapper.made[0].workspace is Wrapper.made[1].workspace
    assert [w.how[1] for w in Wrapper.made] == [-1, 4]


def fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("the workspace is too small")


def test_a_plan_that_fails_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, cache = AttentionSpec(4, 2, 64, 64, 0.2), (torch.randn(7, 16, 2, 64),) * 2
    batch, _ = make_batch(CHUNKS, 16, torch.device("cpu"))
    with monkeypatch.context() as patch:
        patch.setattr(Wrapper, "plan", fail)
        with pytest.raises(RuntimeError, match="workspace"):
            _attend_flashinfer(torch.randn(7, 4, 64), cache, batch, spec, (None, None))
    _attend_flashinfer(torch.randn(7, 4, 64), cache, batch, spec, (None, None))
    assert Wrapper.made[0].plans == 1


def test_what_it_does_not_do_takes_another_backend() -> None:
    spec, plain = AttentionSpec(4, 2, 64, 64, 0.3), (torch.zeros(1, 16, 2, 64),) * 2
    reads = flashinfer_attention.flashinfer_reads
    assert reads(spec, plain, (None, None))
    assert not reads(spec, (*plain, *plain), (None, None))
    assert not reads(spec, plain, (None, torch.zeros(4)))
    assert not reads(spec, plain, (torch.zeros(4), None))
    assert not reads(AttentionSpec(4, 2, 80, 80, 0.3), plain, (None, None))
    assert not reads(AttentionSpec(4, 1, 576, 512, 0.3), plain, (None, None))
    batch, _ = make_batch(CHUNKS[:1], 16, torch.device("cpu"))
    cache = torch.randn(3, 16, 2, 64), torch.randn(3, 16, 2, 64)
    sinks = torch.randn(4)
    q = torch.randn(3, 4, 64)
    found, wanted = (run(q, cache, batch, spec, (None, sinks)) for run in (_attend_flashinfer, _attend_by_gather))
    assert torch.equal(found, wanted)
    assert not Wrapper.made


def test_a_model_by_it(tiny: Any, prompts_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_attention, "_WIDTHS", (8,))
    model, prompts, how = tiny("llama"), prompts_of([1, 5, 23]), SamplingParams(6)
    wanted = [a.tokens for a in load(model, native=False).generate(prompts, how)]
    op = Op(
        "paged_attention",
        "",
        (Backend("flashinfer", _attend_flashinfer, lambda *_: ""), reference_backend(_attend_by_gather)),
    )
    monkeypatch.setattr(paged_attention, "ATTENTION", op)
    engine = load(model, native=False)
    assert [a.tokens for a in engine.generate(prompts, how)] == wanted
    (wrapper,) = Wrapper.made
    assert wrapper.runs == 2 * wrapper.plans
    assert not captures_in_place("cpu", torch.float32)
    monkeypatch.setattr(paged_attention, "triton_obstacle", lambda *_: "")
    assert captures_in_place("cpu", torch.float32)


def test_why_it_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    obstacle, missing = flashinfer_attention.flashinfer_obstacle, flashinfer_attention._missing
    assert "flashinfer" in [b.name for b in ATTENTION.backends]
    assert "cuda tensors" in obstacle("cpu", torch.bfloat16)
    assert "float32" in obstacle("cuda", torch.float32)
    missing.cache_clear()
    monkeypatch.setattr(flashinfer_attention.importlib.util, "find_spec", lambda _: None)
    said: Any = obstacle("cuda", torch.bfloat16)
    assert "not installed" in said
    assert "ds-inference[flashinfer]" in said.fix
    missing.cache_clear()
    monkeypatch.setattr(flashinfer_attention.importlib.util, "find_spec", lambda _: object())
    assert obstacle("cuda", torch.bfloat16) == ""
    missing.cache_clear()
    monkeypatch.setattr(flashinfer_attention, "_module", SimpleNamespace)
    assert "no attention over pages" in obstacle("cuda", torch.bfloat16)
    missing.cache_clear()
