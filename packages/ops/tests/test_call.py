"""What reaches a kernel: every wrong tensor is a typed error that names the argument, never a crash."""

from __future__ import annotations

import gc

import pytest
import torch

from ds_accel import streams
from ds_config.errors import KernelError
from ds_ops import UpdateSpec, UpdateTensors, _call, convert, fill, sum_squares, update
from ds_ops.update_rules import UpdateRule

pytestmark = pytest.mark.usefixtures("native")
SPEC = UpdateSpec(UpdateRule.LION, (1.0, 0.9, 0.1, 0.99, 0.01, 0.1))


def lion(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, copies: tuple[torch.Tensor, ...] = ()) -> None:
    update(SPEC, UpdateTensors([p], [g], ([m],), copies))


@pytest.mark.parametrize(
    ("index", "wrong", "says"),
    [
        (0, torch.zeros(4, 2).t(), "contiguous"),
        (1, torch.zeros(8, 2)[:, 0], "contiguous"),
        (1, torch.zeros(7), "8 elements"),
        (2, torch.zeros(9), "8 elements"),
        (1, torch.zeros(8, device="meta"), "device"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(index: int, wrong: torch.Tensor, says: str) -> None:
    args = [torch.zeros(8), torch.ones(8), torch.zeros(8)]
    args[index] = wrong
    before = [a.clone() for a in args]
    with pytest.raises(KernelError, match=says) as caught:
        lion(*args)
    assert caught.value.code == "kernel-argument"
    for a, b in zip(args, before, strict=True):
        if a.device.type == "cpu":
            assert torch.equal(a, b)


def test_overlap_is_refused_and_names_both() -> None:
    memory = torch.zeros(100)
    with pytest.raises(KernelError, match=r"grad\[0\] and state0\[0\] share memory|state0\[0\] and grad\[0\]"):
        lion(torch.zeros(8), memory[:8], memory[4:12])
    with pytest.raises(KernelError, match="share memory"):
        update(
            SPEC,
            UpdateTensors(
                [memory[:8], memory[7:15]], [torch.zeros(8)] * 1 + [torch.ones(8)], ([torch.zeros(8), torch.zeros(8)],)
            ),
        )


def test_neighbours_do_not_overlap() -> None:
    memory = torch.zeros(24)
    lion(memory[:8], memory[8:16].fill_(1), memory[16:])
    assert torch.equal(memory[:8], torch.full((8,), -0.1))


def test_lists_of_different_length() -> None:
    with pytest.raises(KernelError, match="expected 1 tensors, found 2"):
        update(SPEC, UpdateTensors([torch.zeros(2)], [torch.zeros(2), torch.zeros(2)], ([torch.zeros(2)],)))


def test_mixed_dtypes_in_one_stream() -> None:
    mixed = UpdateTensors(
        [torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)],
        [torch.zeros(2), torch.zeros(2)],
        ([torch.zeros(2), torch.zeros(2)],),
    )
    with pytest.raises(KernelError, match=r"param\[1\]: expected dtype"):
        update(SPEC, mixed)


def test_released_storage_is_refused() -> None:
    p = torch.zeros(8)
    p.untyped_storage().resize_(0)
    with pytest.raises(KernelError, match="released"):
        lion(p, torch.zeros(8), torch.zeros(8))


def test_unsupported_dtypes_run_the_reference() -> None:
    p = torch.zeros(3, dtype=torch.float64)
    update(SPEC, UpdateTensors([p], [torch.ones(3, dtype=torch.float64)], ([torch.zeros(3, dtype=torch.float64)],)))
    assert p.tolist() == [-0.1, -0.1, -0.1]


def test_temporaries_live_through_the_call() -> None:
    for _ in range(50):
        assert sum_squares(torch.ones(100_000) * 2) == 400_000.0
        gc.collect(0)


@pytest.mark.parametrize("op", ["convert", "fill", "sum_squares"])
def test_stream_ops_check_their_tensors(op: str) -> None:
    odd = torch.zeros(6, 2)[:, 0]
    run = {
        "convert": lambda: convert(torch.zeros(6), odd),
        "fill": lambda: fill(odd, 1.0),
        "sum_squares": lambda: sum_squares(odd),
    }
    with pytest.raises(KernelError, match="contiguous"):
        run[op]()


def test_convert_refuses_partial_overlap_and_other_lengths() -> None:
    memory = torch.zeros(20)
    with pytest.raises(KernelError, match="share memory"):
        convert(memory[:8], memory[4:12])
    with pytest.raises(KernelError, match="equal lengths"):
        convert(torch.zeros(3), torch.zeros(4))
    assert convert(memory, memory, scale=2.0) is memory


def test_what_a_graph_copies_again_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that is made while a graph is captured is copied at every replay: from memory of the host that nothing else may get."""
    monkeypatch.setattr(_call, "_recorded_hosts", hosts := [])
    monkeypatch.setattr(_call, "_recorded_tables", recorded := {})
    monkeypatch.setattr(_call, "_tables", {})
    one, other = (_call.columns([torch.zeros(n)], [torch.zeros(n)], [], []) for n in (3, 5))
    first, _ = _call.device_table(one, 8192)
    monkeypatch.setattr(streams, "is_capturing", lambda device: True)
    assert _call.device_table(one, 8192)[0] is first
    assert hosts == []  # it was there before
    second, _ = _call.device_table(other, 8192)
    assert _call.device_table(other, 8192)[0] is second
    assert [torch.equal(host, second) for host in hosts] == [True]
    assert len(recorded) == 2
