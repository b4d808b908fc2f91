"""Named random states of the device, and the seeds that tensor-parallel ranks begin them with.

Words: the *default* state is the device's own generator, the same on all tensor-parallel ranks (what they compute alike,
such as dropout of whole activations, must drop alike); a *named* state is put in its place by `fork`, and differs between
ranks where each rank has its own part of an activation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from ds_accel import Accelerator, get_accelerator
from ds_config.errors import ConfigError

__all__ = ["TENSOR_PARALLEL", "RngTracker", "tensor_seed"]

TENSOR_PARALLEL = "model-parallel-rng"
"""Name of the state that differs between tensor-parallel ranks, as Megatron-style models ask for it."""

_OFFSET = 2718


def tensor_seed(seed: int, tensor_rank: int) -> int:
    """Return the seed of a rank's named random state: seed + 2718 + rank, as in Megatron and DeepSpeed."""
    return seed + _OFFSET + tensor_rank


class RngTracker:
    """Named random states of one device. `fork(name)` draws from one of them.

    Args:
        accelerator: Whose generator it is; the process's own by default.
    """

    def __init__(self, accelerator: Accelerator | None = None) -> None:
        self._accelerator = accelerator
        self._states: dict[str, Tensor] = {}
        self._seeds: set[int] = set()

    @property
    def accelerator(self) -> Accelerator:
        """Whose generator it is."""
        return self._accelerator or get_accelerator()

    def states(self) -> dict[str, Tensor]:
        """Return a copy of the table of random states, uint8 tensors by name.

        The tensors are never written, so the copy of the table is a snapshot.
        """
        return dict(self._states)

    def restore(self, states: Mapping[str, Tensor]) -> None:
        """Replace the table."""
        self._states = dict(states)

    def reset(self) -> None:
        """Forget all states and seeds."""
        self._states, self._seeds = {}, set()

    def add(self, name: str, seed: int) -> None:
        """Add a random state that starts at `seed`; the default state does not change.

        Raises:
            ConfigError: the name or the seed is in use: two states would draw the same numbers ("rng-name").
        """
        if name in self._states or seed in self._seeds:
            raise ConfigError(
                f"random state {name!r} with seed {seed} was added; taken are the names {sorted(self._states)} and seeds "
                f"{sorted(self._seeds)}",
                code="rng-name",
                fix="Use another name and seed, or call reset() first.",
            )
        generator = torch.Generator(device=self.accelerator.device())
        self._states[name] = generator.manual_seed(seed).get_state()
        self._seeds.add(seed)

    def seed_tensor_parallel(self, seed: int, tensor_rank: int) -> None:
        """Seed the default state with `seed`, and begin `TENSOR_PARALLEL` anew at this rank's seed."""
        self.reset()
        self.add(TENSOR_PARALLEL, tensor_seed(seed, tensor_rank))
        self.accelerator.manual_seed(seed)

    @contextmanager
    def fork(self, name: str = TENSOR_PARALLEL) -> Iterator[None]:
        """Draw the device's random numbers from the named state inside the context.

        Afterwards the named state has advanced, and the default state has not.

        Raises:
            ConfigError: there is no state of that name ("rng-name").
        """
        if name not in self._states:
            raise ConfigError(
                f"there is no random state {name!r}; there are {sorted(self._states)}",
                code="rng-name",
                fix="Call add(name, seed) first.",
            )
        before = self.default_state()
        self.set_default_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = self.default_state()
            self.set_default_state(before)

    @contextmanager
    def replayed(self, states: Mapping[str, Tensor]) -> Iterator[None]:
        """Replace the table by `states` (the start of a recomputation) inside the context, and restore the table after."""
        before = self.states()
        self.restore(states)
        try:
            yield
        finally:
            self.restore(before)

    def default_state(self) -> Tensor:
        """Return the default random state of the device."""
        module = self.accelerator.module
        state: Tensor = module.get_rng_state() if hasattr(module, "get_rng_state") else torch.get_rng_state()
        return state

    def set_default_state(self, state: Tensor) -> None:
        """Set the device's own state."""
        module = self.accelerator.module
        module.set_rng_state(state) if hasattr(module, "set_rng_state") else torch.set_rng_state(state)
