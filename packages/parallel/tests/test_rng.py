"""Named random states, their seeds, and what a recomputation draws."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ds_config.errors import ConfigError
from ds_parallel import ActivationCheckpointing, RngTracker, tensor_seed


def test_seeds_of_tensor_parallel_ranks() -> None:
    assert [tensor_seed(1234, rank) for rank in range(3)] == [3952, 3953, 3954]
    draws = []
    for rank in range(2):
        tracker = RngTracker()
        tracker.seed_tensor_parallel(1234, rank)
        draws.append((torch.rand(3), None))
        with tracker.fork():
            draws.append((torch.rand(3), torch.Generator().manual_seed(3952 + rank)))
    assert torch.equal(draws[0][0], draws[2][0])  # the default state is the same on all of them
    for drawn, generator in (draws[1], draws[3]):
        assert torch.equal(drawn, torch.rand(3, generator=generator))


def test_states_go_on_and_leave_the_default_alone() -> None:
    tracker = RngTracker()
    torch.manual_seed(1)
    tracker.add("a", 7)
    reference = torch.Generator().manual_seed(7)
    expected = torch.rand(4, generator=torch.Generator().manual_seed(1))
    first = torch.rand(2)
    with tracker.fork("a"):
        assert torch.equal(torch.rand(2), torch.rand(2, generator=reference))
    second = torch.rand(2)
    with tracker.fork("a"):
        assert torch.equal(torch.rand(2), torch.rand(2, generator=reference))
    assert torch.equal(torch.cat([first, second]), expected)
    snapshot = tracker.states()
    with tracker.fork("a"):
        drawn = torch.rand(2)
    tracker.restore(snapshot)
    with tracker.fork("a"):
        assert torch.equal(torch.rand(2), drawn)


@pytest.mark.parametrize("ask", [lambda t: t.add("a", 8), lambda t: t.add("b", 7), lambda t: t.fork("c").__enter__()])
def test_names_and_seeds_are_taken_once(ask: object) -> None:
    tracker = RngTracker()
    tracker.add("a", 7)
    with pytest.raises(ConfigError) as caught:
        ask(tracker)  # type: ignore[operator]
    assert caught.value.code == "rng-name"
    tracker.reset()
    tracker.add("b", 7)


@pytest.mark.parametrize("form", ["checkpoint", "checkpoint_reentrant"])
def test_a_recomputation_draws_what_its_call_drew(form: str) -> None:
    policy = ActivationCheckpointing()
    policy.tracker.add("ours", 11)
    torch.manual_seed(2)
    seen: list[Tensor] = []

    def draws(x: Tensor) -> Tensor:
        with policy.tracker.fork("ours"):
            named = torch.rand(3)
        seen.append(torch.cat([named, torch.rand(3)]))
        return (x * seen[-1][:3]).sin()

    x = torch.ones(3, requires_grad=True)
    out = getattr(policy, form)(draws, getattr(policy, form)(draws, x))
    default, named = torch.get_rng_state(), policy.tracker.states()["ours"]
    out.sum().backward()
    assert torch.equal(seen[2], seen[1])
    assert torch.equal(seen[3], seen[0])
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(torch.get_rng_state(), default)
    assert torch.equal(policy.tracker.states()["ours"], named)
