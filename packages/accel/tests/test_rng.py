"""Named streams: reproducible, independent, resumable; forks that leave no trace."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_accel import RngError, RngStreams, derive_seed

CPU = torch.device("cpu")


def draw(streams: RngStreams, name: str, count: int = 4) -> list[float]:
    with streams.fork(name):
        return torch.rand(count).tolist()


def fail_inside(streams: RngStreams) -> None:
    with streams.fork("a"):
        torch.rand(4)
        raise ZeroDivisionError


def test_seeds_are_fixed_for_ever() -> None:
    """A changed mix would change every run that is resumed: these numbers are part of the format."""
    assert derive_seed(0) == 2033344993903900207
    assert derive_seed(1, "dropout") == 2687554919811894279
    assert derive_seed(1, "dropout", 0) == 2741768592991564505
    assert derive_seed(1, "dropout") != derive_seed(1, "dropout", 0) != derive_seed(1, "dropout", "0")
    assert len({derive_seed(seed, name) for seed in range(50) for name in ("a", "b", "ab", "")}) == 200
    assert all(0 <= derive_seed(seed) < 2**63 for seed in (-1, 0, 2**70))


def test_a_stream_is_given_by_seed_and_name() -> None:
    one, two = RngStreams(7, CPU), RngStreams(7, CPU)
    draw(one, "other")  # what else was drawn does not matter
    assert draw(one, "a") == draw(two, "a")
    assert draw(one, "a") == draw(two, "a")
    assert draw(one, "a") != draw(two, "b")
    assert draw(RngStreams(8, CPU), "a") != draw(RngStreams(7, CPU), "a")


def test_generators_and_forks_draw_from_the_same_stream() -> None:
    one, two = RngStreams(7, CPU), RngStreams(7, CPU)
    direct = torch.rand(8, generator=one.stream("a")).tolist()
    assert direct[:4] == draw(two, "a")
    assert direct[4:] == torch.rand(4, generator=two.stream("a")).tolist()


def test_the_global_generator_does_not_notice() -> None:
    streams = RngStreams(7, CPU)
    torch.manual_seed(1)
    expected = torch.rand(3).tolist()
    torch.manual_seed(1)
    draw(streams, "a")
    torch.rand(5, generator=streams.stream("a"))
    with pytest.raises(ZeroDivisionError):
        fail_inside(streams)
    assert torch.rand(3).tolist() == expected


def test_an_exception_does_not_rewind_the_stream() -> None:
    one, two = RngStreams(7, CPU), RngStreams(7, CPU)
    with pytest.raises(ZeroDivisionError):
        fail_inside(one)
    draw(two, "a", 4)
    assert draw(one, "a") == draw(two, "a")


@given(st.lists(st.one_of(st.sampled_from(["a", "b"]), st.none(), st.integers(1, 3)), max_size=25))
@settings(max_examples=150, deadline=None)
def test_any_nesting_gives_each_stream_its_own_sequence(script: list[str | int | None]) -> None:
    """A script enters a fork (a name), leaves one (None) or draws; every stream must see its own sequence unbroken."""
    streams, plain = RngStreams(3, CPU), RngStreams(3, CPU)
    torch.manual_seed(11)
    outside = torch.Generator().manual_seed(11)
    stack: list[tuple[str, object]] = []
    for step in script:
        if isinstance(step, str):
            fork = streams.fork(step)
            fork.__enter__()
            stack.append((step, fork))
        elif step is None:
            if stack:
                stack.pop()[1].__exit__(None, None, None)  # type: ignore[attr-defined]
        else:
            generator = plain.stream(stack[-1][0]) if stack else outside
            assert torch.equal(torch.rand(step), torch.rand(step, generator=generator))
    while stack:
        stack.pop()[1].__exit__(None, None, None)  # type: ignore[attr-defined]
    assert torch.equal(torch.rand(2), torch.rand(2, generator=outside))
    for name in ("a", "b"):
        assert torch.equal(streams.stream(name).get_state(), plain.stream(name).get_state())


def test_state_goes_through_json() -> None:
    streams = RngStreams(7, CPU)
    draw(streams, "a")
    state = json.loads(json.dumps(streams.state_dict()))
    following = [draw(streams, "a"), draw(streams, "new")]
    other = RngStreams(99, CPU)
    draw(other, "a")
    draw(other, "new")
    other.load_state_dict(state)
    assert other.seed == 7
    assert [draw(other, "a"), draw(other, "new")] == following, (
        "a stream that the state does not have starts from its seed"
    )


def test_state_of_another_device_is_refused() -> None:
    state = {**RngStreams(7, CPU).state_dict(), "device": "cuda"}
    with pytest.raises(RngError, match="of device 'cuda', this one is 'cpu'") as caught:
        RngStreams(7, CPU).load_state_dict(state)
    assert caught.value.code == "rng-device"


def test_no_state_inside_a_fork() -> None:
    streams = RngStreams(7, CPU)
    state = streams.state_dict()
    with streams.fork("a"):
        for use in (streams.state_dict, lambda: streams.load_state_dict(state)):
            with pytest.raises(RngError, match=r"inside fork\('a'\)") as caught:
                use()
            assert caught.value.code == "rng-in-fork"


class DeviceModule:
    """A device whose global generator is a generator of the CPU, kept apart from torch's."""

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.asked: list[tuple[int, ...]] = []

    def current_device(self) -> int:
        return 3

    def get_rng_state(self, *index: int) -> torch.Tensor:
        self.asked.append(index)
        return self.generator.get_state()

    def set_rng_state(self, state: torch.Tensor, *index: int) -> None:
        self.asked.append(index)
        self.generator.set_state(state)


def test_forks_of_a_device_touch_its_generator_only() -> None:
    module = DeviceModule()
    streams = RngStreams(7, CPU, module)
    torch.manual_seed(5)
    host, before = torch.get_rng_state(), module.generator.get_state()
    with streams.fork("a"):
        drawn = torch.rand(4, generator=module.generator)
    assert drawn.tolist() == draw(RngStreams(7, CPU), "a")
    assert torch.equal(module.generator.get_state(), before)
    assert torch.equal(torch.get_rng_state(), host)
    assert set(module.asked) == {(3,)}
