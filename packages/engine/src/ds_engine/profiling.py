"""What counted operations say of a model: the report of `flops_profiler`. What is counted, and how: `ds_engine.flops`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_engine.feature_table import FlopsProfilerConfig
from ds_engine.flops import ModuleFlops

__all__ = ["Profile", "profile_text", "write_profile"]

_log = logging.getLogger("ds_engine")
_PHASES = ("forward", "backward", "step")


@dataclass(frozen=True, slots=True)
class Profile:
    """One microbatch, and how long the phases of its step took (seconds; empty where they were not timed).

    Attributes:
        modules: What its forward did, the model first.
        backward: Operations of its backward; None where that was not watched.
        again: Of the forward, computed again in backward.
    """

    modules: tuple[ModuleFlops, ...]
    seconds: Mapping[str, float]
    samples: int = 0
    backward: int | None = None
    again: int = 0

    @property
    def flops(self) -> int:
        """Operations of the whole forward."""
        return self.modules[0].flops


def write_profile(text: str, output_file: str) -> None:
    """Write a report to a file, in a folder that is made where it is missing.

    A report ends no training: where the file cannot be written (a full disk, no permission), a warning holds the report.
    """
    try:
        Path(output_file).parent.mkdir(parents=True, exist_ok=True)
        Path(output_file).write_text(text + "\n")
    except OSError as error:
        _log.warning("flops_profiler: %s was not written (%s); the profile:\n%s", output_file, error, text)


def profile_text(profile: Profile, section: FlopsProfilerConfig) -> str:
    """Format the report: totals, speeds, the largest module classes of each level, and (if detailed) every module."""
    forward = profile.flops
    backward, again, how = _backward(profile, section)
    lines = [
        f"flops profile of step {section.profile_step}, one microbatch on rank 0",
        f"  parameters          {profile.modules[0].numel:,}",
        f"  forward             {_count(forward)}FLOPs ({_count(forward / 2)}MACs)",
        f"  backward            {_count(backward)}FLOPs, {how}; computed again {_count(again)}FLOPs",
    ]
    for name, flops in (("forward", forward), ("backward", backward + again)):
        if seconds := profile.seconds.get(name):
            lines.append(f"  {name + ' speed':<19} {seconds * 1e3:.2f} ms, {_count(flops / seconds)}FLOPS")
    if profile.seconds and profile.samples:
        lines.append(
            f"  samples per second  {profile.samples / sum(profile.seconds.get(name, 0.0) for name in _PHASES):.2f}"
        )
    shown = [m for m in profile.modules if section.module_depth < 0 or m.depth <= section.module_depth]
    lines += ["  largest classes by level (parameters | operations | time):", *_largest(shown, section.top_modules)]
    if section.detailed:
        lines += ["  every module (parameters, operations, time with the counting in it):"]
        lines += [_line(m, profile.modules[0]) for m in shown]
    return "\n".join(lines)


def _backward(profile: Profile, section: FlopsProfilerConfig) -> tuple[float, float, str]:
    """Return operations of backward, recomputed operations, and whether they were counted or estimated."""
    if profile.backward is not None:
        return profile.backward, profile.again or profile.flops * section.recompute_fwd_factor, "counted"
    return 2 * profile.flops, profile.flops * section.recompute_fwd_factor, "twice the forward"


def _largest(modules: Sequence[ModuleFlops], count: int) -> list[str]:
    """List for each level the classes with the most parameters, operations and time, as sums over the level."""
    lines = []
    for depth in sorted({m.depth for m in modules}):
        level = [m for m in modules if m.depth == depth]
        columns: tuple[tuple[Callable[[ModuleFlops], float], Callable[[float], str]], ...] = (
            (lambda m: m.numel, lambda v: f"{v:,.0f}"),
            (lambda m: m.flops, lambda v: f"{_count(v)}FLOPs"),
            (lambda m: m.seconds, lambda v: f"{v * 1e3:.2f} ms"),
        )
        columns_text = (_ranked(level, value, text, count) for value, text in columns)
        lines.append(f"    {depth}: " + " | ".join(columns_text))
    return lines


def _ranked(
    level: Sequence[ModuleFlops], value: Callable[[ModuleFlops], float], text: Callable[[float], str], count: int
) -> str:
    sums: dict[str, float] = {}
    for module in level:
        sums[module.kind] = sums.get(module.kind, 0) + value(module)
    largest = sorted(sums.items(), key=lambda item: -item[1])[:count]
    return ", ".join(f"{kind} {text(total)}" for kind, total in largest)


def _line(module: ModuleFlops, whole: ModuleFlops) -> str:
    name = f"{'  ' * module.depth}{module.name.rpartition('.')[2] or '(model)'}"
    speed = f"{_count(module.flops / module.seconds)}FLOPS" if module.seconds else "-"
    return (
        f"    {name:<28} {module.kind:<24} {module.numel:>14,} {_share(module.numel, whole.numel)}  "
        f"{_count(module.flops):>10}FLOPs {_share(module.flops, whole.flops)}  "
        f"{module.seconds * 1e3:>9.2f} ms {_share(module.seconds, whole.seconds)}  {speed}"
    )


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:5.1f} %" if whole else "  0.0 %"


def _count(value: float) -> str:
    for unit in ("", "K", "M", "G", "T"):
        if abs(value) < 1000:
            return f"{value:.4g} {unit}"
        value /= 1000
    return f"{value:.4g} P"
