"""`deepspeed.checkpointing`: activation checkpointing, by torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ds_accel import get_accelerator
from ds_config.errors import ConfigError, UnsupportedError

__all__ = [
    "CheckpointFunction",
    "CudaRNGStatesTracker",
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "reset",
    "set_num_layers",
]

_MODEL_PARALLEL_RNG_TRACKER_NAME = "model-parallel-rng"
_TENSOR_OFFSET = 2718
_configured: list[bool] = []


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Say how `checkpoint` keeps activations: whole, on the device. What asks for more is refused.

    Raises:
        UnsupportedError: partitioned, contiguous or host activations, or their profile ("compat-activations").
    """
    del mpu_, deepspeed_config, num_checkpoints
    asked = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    wanted = [name for name, value in asked.items() if value]
    if wanted:
        raise UnsupportedError(
            f"deepspeed.checkpointing.configure({', '.join(f'{name}=True' for name in wanted)})",
            code="compat-activations",
            fix="Leave it out; torch.autograd.graph.save_on_cpu keeps activations on the host.",
        )
    _configured[:] = [True]


def is_configured() -> bool:
    """Whether `configure` was called since the last `reset`."""
    return bool(_configured)


def reset() -> None:
    """Forget `configure`. There are no buffers to free."""
    _configured.clear()


def set_num_layers(nlayers: int) -> None:
    """Nothing depends on it: there is no buffer to size."""
    del nlayers


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Run `function` and keep only its inputs; it runs again in backward."""
    return torch_checkpoint(function, *args, use_reentrant=True)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """The same by saved-tensor hooks."""
    return torch_checkpoint(function, *args, use_reentrant=False)


# ---- random states by name


def _get_state() -> torch.Tensor:
    accelerator = get_accelerator()
    state: torch.Tensor = torch.get_rng_state() if accelerator.name == "cpu" else accelerator.module.get_rng_state()
    return state


def _set_cuda_rng_state(new_state: torch.Tensor, device: Any = -1) -> None:
    """Set the device's random state; the host's on the CPU."""
    del device
    accelerator = get_accelerator()
    if accelerator.name == "cpu":
        torch.set_rng_state(new_state)
    else:
        accelerator.module.set_rng_state(new_state)


class CudaRNGStatesTracker:
    """Named random states of the device; `fork(name)` computes with one of them."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forget all."""
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """A copy of the table."""
        return dict(self.states_)

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Replace the table."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """A new state, begun at `seed`.

        Raises:
            ValueError: name or seed is there already.
        """
        if seed in self.seeds_ or name in self.states_:
            raise ConfigError(f"random state {name!r} or seed {seed} exists", code="compat-rng", fix="Use another.")
        before = _get_state()
        get_accelerator().manual_seed(seed)
        self.states_[name] = _get_state()
        self.seeds_.add(seed)
        _set_cuda_rng_state(before)

    @contextmanager
    def fork(self, name: str = _MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        """Inside, the device draws from the named state.

        Raises:
            ValueError: there is none of that name.
        """
        if name not in self.states_:
            raise ConfigError(
                f"there is no random state {name!r}", code="compat-rng", fix="Call add(name, seed) first."
            )
        before = _get_state()
        _set_cuda_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = _get_state()
            _set_cuda_rng_state(before)


_CUDA_RNG_STATE_TRACKER = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """The one of this process."""
    return _CUDA_RNG_STATE_TRACKER


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Begin the named state of tensor parallelism anew; there is one tensor-parallel rank."""
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    tracker.add(_MODEL_PARALLEL_RNG_TRACKER_NAME, seed + _TENSOR_OFFSET)


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device with `seed`, and the named state apart from it."""
    model_parallel_reconfigure_tp_seed(seed)
    get_accelerator().manual_seed(seed)
