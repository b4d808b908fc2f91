"""Two half batches of a layer in turn, and gradients of weights while sums travel: the numbers of one process."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ds_comm.differentiable_ops as operations
from ds_comm import Mesh, MeshSpec
from ds_comm.work import Chained
from ds_config.errors import UnsupportedError
from ds_parallel.tensor import TensorOptions, facts_of, make_tensor_plan, parallelize_model
from ds_testing import world


def cut_model(model, **options):
    degree = torch.distributed.get_world_size()
    mesh = Mesh.build(MeshSpec(tensor=degree))
    plan = make_tensor_plan(facts_of(model), TensorOptions(degree, **options))
    return parallelize_model(model, plan, mesh["tensor"])


def wide(batch, samples):
    """The batch with as many samples, each of other tokens."""
    return {
        name: torch.cat([value[:1].roll(at, dims=-1) for at in range(samples)])
        if name in ("input_ids", "labels", "attention_mask")
        else value
        for name, value in batch.items()
    }


def gradients_of(model, cut=None):
    if cut is None:
        return {name: p.grad for name, p in model.named_parameters()}
    weights = {name: p.data for name, p in model.named_parameters()}
    for param in model.parameters():
        param.data = (
            torch.zeros_like(param)
            if param.grad is None
            else param.grad.to_local()
            if hasattr(param.grad, "to_local")
            else param.grad
        )
    state = cut.state_dict()
    for name, param in model.named_parameters():
        param.data = weights[name]
    return state


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt-neox", "bloom"])
@pytest.mark.parametrize("samples", [4, 3, 1])
@world(2)
def test_halves_compute_what_one_process_does(tiny, family, samples) -> None:
    model, batch = tiny(family)
    model, batch = model.double(), wide(batch, samples)
    model.config.use_cache = False
    whole = copy.deepcopy(model)
    cut = cut_model(model, half_batches=True)
    for _ in range(2):
        loss, wanted = model(**batch).loss, whole(**batch).loss
        assert float(loss) == pytest.approx(float(wanted), rel=1e-12)
        loss.backward()
        wanted.backward()
    grads = gradients_of(model, cut)
    for name, grad in gradients_of(whole).items():
        assert torch.allclose(grads[name], grad, rtol=1e-9, atol=1e-12), name
    cut.undo()


class Recorder(TorchDispatchMode):
    """Products by half, and when each sum over the ranks starts and is waited for."""

    def __init__(self, cut, monkeypatch):
        super().__init__()
        self.cut, self.events, self.started = cut, [], itertools.count()
        real = operations.collectives.all_reduce

        def all_reduce(*args, **kwargs):
            number = next(self.started)
            self.events.append(("sum", number))
            work = real(*args, **kwargs)
            if kwargs.get("async_op"):
                work = Chained(work, lambda: self.events.append(("wait", number)))
            return work

        monkeypatch.setattr(operations.collectives, "all_reduce", all_reduce)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("mm", "addmm", "bmm"):
            lane = self.cut.turns.lane
            self.events.append(("product", None if lane is None else lane.half))
        return func(*args, **(kwargs or {}))

    def between(self):
        """Of each sum that is waited for later, the halves of the products between."""
        for at, (kind, number) in enumerate(self.events):
            if kind == "sum" and ("wait", number) in self.events:
                end = self.events.index(("wait", number))
                yield [half for what, half in self.events[at:end] if what == "product"]


@world(2)
def test_the_other_half_computes_between_a_sum_and_its_wait(tiny, monkeypatch) -> None:
    model, batch = tiny("llama")
    model.config.use_cache = False
    cut = cut_model(model, half_batches=True)
    with Recorder(cut, monkeypatch) as recorder:
        loss = model(**wide(batch, 4)).loss
        forward = list(recorder.between())
        recorder.events.clear()
        loss.backward()
    # Two layers, two sums a half: those of the first half, and of the second but the last, which ends the layer.
    assert [(len(set(halves)), len(halves) > 0) for halves in forward] == [
        (1, True),
        (1, True),
        (1, True),
        (0, False),
    ] * 2
    assert [halves[0] for halves in forward if halves] == [1, 0, 1] * 2
    # Of a part of the first half the other half's products and gradients of weights, of the second half's last part its own weights' only.
    assert [len(products) for products in recorder.between()] == [1, *[8, 12, 11, 3] * 2]
    cut.undo()


@world(2)
def test_weights_have_their_gradients_between_a_sum_and_its_wait(tiny, monkeypatch) -> None:
    model, batch = tiny("llama")
    model.config.use_cache = False
    whole = copy.deepcopy(model)
    cut = cut_model(model, late_gradients=True)
    with Recorder(cut, monkeypatch) as recorder:
        model(**batch).loss.backward()
    assert [len(products) for products in recorder.between()] == [
        1,
        2,
        3,
        2,
        3,
    ]  # the head; gate and up, query, key and value
    whole(**batch).loss.backward()
    grads = gradients_of(model, cut)
    for name, grad in gradients_of(whole).items():
        torch.testing.assert_close(grads[name], grad, atol=1e-5, rtol=1e-4)
    cut.undo()


@world(2)
def test_layers_that_read_one_input_sum_its_gradient_once(tiny, monkeypatch) -> None:
    model, batch = tiny("llama")
    cut = cut_model(model)
    with Recorder(cut, monkeypatch) as recorder:
        loss = model(**batch).loss
        recorder.events.clear()
        loss.backward()
    assert [kind for kind, _ in recorder.events].count("sum") == 1 + 2 * 2
    cut.undo()


@world(2)
def test_checkpointing_of_transformers_is_inside_of_each_half(tiny) -> None:
    model, batch = tiny("llama")
    batch, whole = wide(batch, 4), copy.deepcopy(model)
    model.config.use_cache = False
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    cut = cut_model(model, half_batches=True)
    seen = []
    cut.turns.watch = lambda what, half: seen.append((what, half))
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        model(**batch).loss.backward()
        assert len(seen) == 2 * 4 * 2
        seen.clear()
        whole.zero_grad()
        whole(**batch).loss.backward()
        grads = gradients_of(model, cut)
        for name, grad in gradients_of(whole).items():
            torch.testing.assert_close(grads[name], grad, atol=1e-5, rtol=1e-4)
    cut.undo()


@world(2)
def test_generation_and_what_is_refused(tiny) -> None:
    model, batch = tiny("llama")
    whole, ids = copy.deepcopy(model), batch["input_ids"]
    cut = cut_model(model, half_batches=True)
    with pytest.raises(UnsupportedError, match="use_cache=False") as caught:
        model(**batch)
    assert caught.value.code == "tensor-halves"
    asked = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **asked), whole.generate(ids, **asked))
    cut.undo()
    assert type(model.model.layers[0]) is type(whole.model.layers[0])
    assert "_ds_halves" not in vars(model.model.layers[0])
    model, _ = tiny("mixtral")
    with pytest.raises(UnsupportedError, match="routes the tokens of a whole batch"):
        cut_model(model, half_batches=True)


@world(2)
def test_an_error_inside_of_a_layer_is_the_callers(tiny) -> None:
    model, batch = tiny("gpt2")
    model.config.use_cache = False
    cut = cut_model(model, half_batches=True)
    batch, calls = wide(batch, 4), []

    def fail(module, args):
        calls.append(module)
        if len(calls) == 2:
            raise ValueError("in the second half")

    handle = model.transformer.h[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="in the second half"):
        model(**batch)
    handle.remove()
    model(**batch).loss.backward()
    cut.undo()
