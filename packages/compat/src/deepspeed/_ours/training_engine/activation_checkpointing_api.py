"""`deepspeed.checkpointing`: activation checkpointing by ds-parallel, with one policy for the process as upstream has it.

What `configure` was told counts; before, what the engine whose forward is running was told in its configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from deepspeed._ours.base.forwarding import calls
from deepspeed._ours.base.raising import raising
from deepspeed._ours.base.runtime_utils import asked_of
from ds_comm import Group, as_group, self_group
from ds_config import load
from ds_config.config_file import read_all
from ds_parallel import (
    TENSOR_PARALLEL,
    ActivationCheckpointing,
    ActivationPolicy,
    RngTracker,
    current_checkpointing,
    tensor_seed,
)
from ds_parallel.config import ActivationCheckpointingConfig


class CudaRNGStatesTracker(RngTracker):
    """Named random states of the device, under upstream's names; `fork(name)` computes with one of them."""

    get_states = calls("states", "Return a copy of the table of random states.")

    set_states = calls("restore", "Replace the table.", "states")


_CUDA_RNG_STATE_TRACKER = CudaRNGStatesTracker()


@dataclass(slots=True)
class _Process:
    """What this process was told. Upstream keeps the same in a dozen module variables."""

    configured: bool = False
    mpu: Any = None
    layers: int | None = None
    group: Group = field(default_factory=lambda: self_group("tensor"))
    policy: ActivationCheckpointing = field(
        default_factory=lambda: ActivationCheckpointing(tracker=_CUDA_RNG_STATE_TRACKER)
    )

    def keep(self, keeping: ActivationPolicy) -> None:
        """Set the activation policy `keeping` for all later checkpointed calls."""
        self.policy = ActivationCheckpointing(keeping, self.group, tracker=_CUDA_RNG_STATE_TRACKER)
        self.configured = True


_process = _Process()


@raising(AssertionError)
def configure(
    mpu_: Any = None, deepspeed_config: Any = None, partition_activations: bool | None = None, contiguous_checkpointing:
    bool | None = None, num_checkpoints: int | None = None, checkpoint_in_cpu: bool | None = None, synchronize: bool |
    None = None, profile: bool | None = None,
) -> None:  # fmt: skip
    """Configure activation checkpointing of this process; arguments override the section of the configuration.

    Of a configuration only `activation_checkpointing` is read.

    Args:
        mpu_: Has `get_tensor_model_parallel_group` or `get_model_parallel_group`: the ranks that partition activations. None: as before.
    Raises:
        ConfigError: contiguous checkpointing without a number, or the section is invalid; an AssertionError, too.
    """
    document = {} if deepspeed_config is None else read_all(deepspeed_config).data
    arguments = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    section = {**(document.get("activation_checkpointing") or {})}
    section |= {name: value for name, value in arguments.items() if value is not None}
    config = load(ActivationCheckpointingConfig, section)
    if mpu_ is not None:
        _process.group, _process.mpu = _tensor_group(mpu_), mpu_
    _process.layers = config.number_checkpoints
    _process.keep(config.keeping)


def _tensor_group(mpu: Any) -> Group:
    group = asked_of(mpu, ("tensor_model_parallel", "model_parallel"), "group", self_group("tensor"))
    return as_group(group)


_LIVE: Mapping[str, Callable[[], Any]] = {
    "PARTITION_ACTIVATIONS": lambda: _process.policy.keeping.slices,
    "CPU_CHECKPOINT": lambda: _process.policy.keeping.host,
    "CONTIGUOUS_CHECKPOINTING": lambda: _process.policy.keeping.slots is not None,
    "SYNCHRONIZE": lambda: _process.policy.keeping.synchronize,
    "PROFILE_TIME": lambda: _process.policy.keeping.profile,
    "num_layers": lambda: _process.layers,
    "mpu": lambda: _process.mpu,
    "mp_rank": lambda: _process.group.rank if _process.configured else None,
    "mp_size": lambda: _process.group.size if _process.configured else None,
    "mp_group": lambda: None if _process.mpu is None else _process.group.pg,
    "deepspeed_checkpointing_enabled": lambda: _process.configured,
}
LIVE = frozenset(_LIVE)
"""What `configure` was told, under the names of upstream's variables; read anew each time."""


def __getattr__(name: str) -> Any:
    if name not in _LIVE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _LIVE[name]()


def is_configured() -> bool:
    """Whether `configure` was called."""
    return _process.configured


def reset() -> None:
    """Drop the buffers of contiguous checkpointing and the host's; what was configured stays."""
    if _process.configured:
        _process.keep(_process.policy.keeping)


def set_num_layers(nlayers: int) -> None:
    """Set the number of buffers that contiguous checkpointing allocates."""
    _process.layers = nlayers
    if _process.policy.keeping.slots is not None:
        _process.keep(replace(_process.policy.keeping, slots=nlayers))


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Whether each tensor-parallel rank keeps its part of every input."""
    _process.keep(replace(_process.policy.keeping, slices=partition_activation))


def _policy() -> ActivationCheckpointing:
    engines = current_checkpointing()
    if _process.configured:
        engines.calls += 1  # its section is heard: these are the calls that it speaks of
        return _process.policy
    engines.tracker = _CUDA_RNG_STATE_TRACKER
    return engines


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `function` and keep only its inputs; it runs again in backward. Several outputs are a tuple, a single one is itself."""
    return _unpacked(_policy().checkpoint_reentrant(function, *args, **kwargs))


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `function` with activation checkpointing by saved-tensor hooks, without a reentrant backward."""
    return _unpacked(_policy().checkpoint(function, *args, **kwargs))


def _unpacked(outputs: Any) -> Any:
    if not isinstance(outputs, list | tuple):
        return outputs
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


class CheckpointFunction:
    """What `checkpoint` calls, for programs that call it themselves."""

    @staticmethod
    def apply(run_function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> Any:
        """Run `run_function`, put its outputs into `all_outputs`, and return the tensors among them: one, or a tuple."""
        outputs = _policy().checkpoint_reentrant(run_function, *args)
        if isinstance(outputs, torch.Tensor):
            all_outputs.append(outputs)
            return outputs
        all_outputs.extend(outputs)
        return tuple(output for output in outputs if isinstance(output, torch.Tensor))


# ---- random states by name


def _set_cuda_rng_state(new_state: torch.Tensor, device: Any = -1) -> None:
    """Set the device's random state; the host's on the CPU."""
    del device
    _CUDA_RNG_STATE_TRACKER.set_default_state(new_state)


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """Return the tracker of random states of this process."""
    return _CUDA_RNG_STATE_TRACKER


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Begin the named state of tensor parallelism anew, at this rank's seed."""
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    tracker.add(TENSOR_PARALLEL, tensor_seed(seed, _process.group.rank))


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device with `seed`, and the named state apart from it, at this rank's seed."""
    get_cuda_rng_tracker().seed_tensor_parallel(seed, _process.group.rank)
