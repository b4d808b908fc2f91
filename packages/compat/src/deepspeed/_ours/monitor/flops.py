"""`deepspeed.profiling.flops_profiler`: the counter of ds-engine under upstream's names. Profiles are printed, or written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from deepspeed._ours.base.raising import refused
from ds_engine.feature_table import FlopsProfilerConfig
from ds_engine.flops import ForwardCounter
from ds_engine.profiling import Profile, profile_text, write_profile


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

    flops = property(lambda self: int(self.get_total_flops()), doc="Operations that were counted last.")
    macs = property(lambda self: int(self.get_total_macs()), doc="Multiply-adds that were counted last.")
    params = property(lambda self: int(self.get_total_params()), doc="Elements of the model's parameters.")

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        """Count from here on, but not in modules of the classes of `ignore_list`. Slows the model down several times."""
        self.stop_profile()
        self.reset_profile()
        self._open.enter_context(self._counter.watch(self.model, ignore_list or ()))
        self.started = True

    def stop_profile(self) -> None:
        """Count no more; totals stay until `end_profile`."""
        self._open.close()

    def reset_profile(self) -> None:
        """Forget what was counted."""
        self._counter = ForwardCounter()

    def end_profile(self) -> None:
        """`stop_profile`, and forget."""
        self.stop_profile()
        self.reset_profile()
        self.started = False

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """Return the floating-point operations of the forward; a multiply-add counts as two."""
        flops = self._counter.modules[0].flops if self._counter.modules else 0
        return number_to_string(flops) if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Multiply-adds."""
        macs = int(self.get_total_flops()) // 2
        return macs_to_string(macs) if as_string else macs

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Return the number of elements of the model's parameters."""
        numel = sum(param.numel() for param in self.model.parameters())
        return params_to_string(numel) if as_string else numel

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Return the seconds of the model's forwards, counting included."""
        seconds = self._counter.modules[0].seconds if self._counter.modules else 0.0
        return duration_to_string(seconds) if as_string else seconds

    def print_model_profile(
        self, profile_step: int = 1, module_depth: int = -1, top_modules: int = 1, detailed: bool = True, output_file:
        str | None = None,
    ) -> None:  # fmt: skip
        """Print the profile, or write it into `output_file`. Before `start_profile` there is none."""
        if not self._counter.modules:
            return
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
        profile = Profile(
            counter.modules, {"forward": float(self.get_total_duration())}, samples, backward, counter.again
        )
        text = profile_text(profile, section) + _ranks(self.ds_engine)
        if output_file is None:
            print(text, flush=True)
        else:
            write_profile(text, output_file)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print totals and the largest modules of each level."""
        self.print_model_profile(module_depth=module_depth, top_modules=top_modules, detailed=False)


def _ranks(engine: Any) -> str:
    if engine is None:
        return ""
    data = engine.seq_dp_world_size if engine.dp_world_size is None else engine.dp_world_size
    sizes = (("world", engine.world_size), ("data parallel", data), ("model parallel", engine.mp_world_size))
    return "".join(f"\n  {name + ' size:':<19} {size}" for name, size in sizes)


def get_model_profile(
    model: nn.Module, input_shape: Sequence[int] | None = None, args: Sequence[Any] = (), kwargs: Mapping[str, Any] |
    None = None, print_profile: bool = True, detailed: bool = True, module_depth: int = -1, top_modules: int = 1,
    warm_up: int = 1, as_string: bool = True, output_file: str | None = None, ignore_modules: Sequence[type[nn.Module]]
    | None = None, mode: str = "forward",
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Count operations, multiply-adds and parameters of a call in evaluation, without gradients; as text or as numbers.

    Args:
        input_shape: Of a single input of ones, of the model's format and device, instead of `args` and `kwargs`.
        warm_up: Calls before the call that is counted.
        mode: "forward", or "generate" for `model.generate`.
    Raises:
        ConfigError: nothing is given to call it with ("compat-argument").
        UnsupportedError: another mode ("compat-argument").
    """
    if mode not in ("forward", "generate"):
        raise refused("profile-mode", mode)
    if not (input_shape or args or kwargs):
        raise refused("profile-input")
    inputs = (
        list(args)
        if input_shape is None
        else [next(model.parameters(), torch.empty(0, device="cpu")).new_ones(tuple(input_shape))]
    )
    call: Any = model if mode == "forward" else model.generate
    profiler = FlopsProfiler(model)
    trained = [module for module in model.modules() if module.training]
    model.eval()  # a BatchNorm would count these inputs
    try:
        with torch.no_grad():
            for _ in range(warm_up):
                call(*inputs, **(kwargs or {}))
            profiler.start_profile(ignore_modules)
            call(*inputs, **(kwargs or {}))
    finally:
        profiler.stop_profile()
        for module in trained:
            module.training = True
    if print_profile:
        profiler.print_model_profile(1, module_depth, top_modules, detailed, output_file)
    return profiler.get_total_flops(as_string), profiler.get_total_macs(as_string), profiler.get_total_params(as_string)


_UNITS = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """Format a number with a unit of thousands, the largest that it reaches or the one given."""
    if units is None:
        units = next((unit for unit, size in _UNITS.items() if num >= size), "u") if num else ""
    return f"{round(num / _UNITS.get(units, 1.0), precision):g} {units}"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """Format a number of multiply-adds."""
    return f"{number_to_string(macs, units, precision)}MACs"


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """Format operations a second."""
    return f"{number_to_string(flops, units, precision)}FLOPS"


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """Format seconds."""
    return f"{number_to_string(duration, units, precision)}s"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """Format a number of parameters, in billions (B) where others count in G."""
    text = number_to_string(params_num, units.replace("B", "G") if units else units, precision)
    return text.replace("G", "B").strip()
