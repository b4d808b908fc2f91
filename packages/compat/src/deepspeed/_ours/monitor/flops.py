"""`deepspeed.profiling.flops_profiler`: the counter of ds-engine under upstream's names. Profiles are logged, or written."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from deepspeed._ours.base.raising import refused
from ds_engine.feature_table import FlopsProfilerConfig
from ds_engine.flops import ForwardCounter
from ds_engine.profiling import Profile, profile_text, write_profile

_log = logging.getLogger("DeepSpeed")


class FlopsProfiler:
    """Counts what a model computes between `start_profile` and `stop_profile`.

    Args:
        model: The module; an engine's model, where it has one.
        ds_engine: Its engine, for the number of samples.
        recompute_fwd_factor: Share of the forward that backward computes again.
        counter: What counts; one of its own by default.
    """

    def __init__(
        self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0, *, counter: ForwardCounter |
        None = None,
    ) -> None:  # fmt: skip
        self.model, self.ds_engine, self.recompute_fwd_factor = model, ds_engine, recompute_fwd_factor
        self.started, self._open = False, ExitStack()
        self._counter = counter or ForwardCounter()
        self._seconds, self._begun = 0.0, 0.0

    flops = property(lambda self: int(self.get_total_flops()), doc="Operations that were counted last.")
    macs = property(lambda self: int(self.get_total_macs()), doc="Multiply-adds that were counted last.")
    params = property(lambda self: int(self.get_total_params()), doc="Elements of the model's parameters.")

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        """Count from here on, but not in modules of the classes of `ignore_list`. Slows the model down several times."""
        self.reset_profile()
        self._open.enter_context(self._counter.watch(self.model, ignore_list or ()))
        self.started, self._begun = True, time.perf_counter()

    def stop_profile(self) -> None:
        """Count no more; totals stay."""
        if self.started:
            self._seconds = time.perf_counter() - self._begun
            self._open.close()
            self.started = False

    def reset_profile(self) -> None:
        """Forget what was counted."""
        self._counter = ForwardCounter()
        self._seconds, self._begun = 0.0, 0.0

    def end_profile(self) -> None:
        """`stop_profile`, and forget."""
        self.stop_profile()
        self.reset_profile()

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """Return the floating-point operations of the forward; a multiply-add counts as two."""
        flops = self._counter.modules[0].flops if self._counter.modules else 0
        return f"{_short(flops)}FLOPs" if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Multiply-adds."""
        macs = int(self.get_total_flops()) // 2
        return f"{_short(macs)}MACs" if as_string else macs

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Return the number of elements of the model's parameters."""
        numel = sum(param.numel() for param in self.model.parameters())
        return _short(numel).strip() if as_string else numel

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Return the seconds between start and stop, counting included."""
        return f"{self._seconds * 1e3:.2f} ms" if as_string else self._seconds

    def print_model_profile(
        self, profile_step: int = 1, module_depth: int = -1, top_modules: int = 1, detailed: bool = True, output_file:
        str | None = None,
    ) -> None:  # fmt: skip
        """Log the profile as ds-engine does, or write it into `output_file`."""
        section = FlopsProfilerConfig(
            profile_step=profile_step,
            module_depth=module_depth,
            top_modules=top_modules,
            detailed=detailed,
            recompute_fwd_factor=self.recompute_fwd_factor,
        )
        samples = self.ds_engine.train_micro_batch_size_per_gpu() if self.ds_engine is not None else 0
        counter = self._counter
        backward = counter.backward if counter.has_backward else None
        profile = Profile(counter.modules, {"forward": self._seconds}, samples, backward, counter.again)
        text = profile_text(profile, section)
        if output_file is None:
            _log.info("%s", text)
        else:
            write_profile(text, output_file)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Log totals and the largest modules of each level."""
        self.print_model_profile(module_depth=module_depth, top_modules=top_modules, detailed=False)


def get_model_profile(
    model: nn.Module, input_shape: Sequence[int] | None = None, args: Sequence[Any] = (), kwargs: Mapping[str, Any] |
    None = None, print_profile: bool = True, detailed: bool = True, module_depth: int = -1, top_modules: int = 1,
    warm_up: int = 1, as_string: bool = True, output_file: str | None = None, ignore_modules: Sequence[type[nn.Module]]
    | None = None, mode: str = "forward",
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Count operations, multiply-adds and parameters of a call without gradients; as text or as numbers.

    Args:
        input_shape: Of a single fp32 input of ones, instead of `args` and `kwargs`.
        warm_up: Calls before the call that is counted.
        mode: "forward", or "generate" for `model.generate`.
    Raises:
        UnsupportedError: another mode ("compat-argument").
    """
    if mode not in ("forward", "generate"):
        raise refused("profile-mode", mode)
    inputs = [torch.ones(tuple(input_shape))] if input_shape is not None else list(args)
    call: Any = model if mode == "forward" else model.generate
    profiler = FlopsProfiler(model)
    with torch.no_grad():
        for _ in range(warm_up):
            call(*inputs, **(kwargs or {}))
        profiler.start_profile(ignore_modules)
        try:
            call(*inputs, **(kwargs or {}))
        finally:
            profiler.stop_profile()
    if print_profile:
        profiler.print_model_profile(1, module_depth, top_modules, detailed, output_file)
    return profiler.get_total_flops(as_string), profiler.get_total_macs(as_string), profiler.get_total_params(as_string)


def _short(value: float) -> str:
    for unit in ("", "K", "M", "G", "T"):
        if value < 1000:
            return f"{value:.4g} {unit}"
        value /= 1000
    return f"{value:.4g} P"
