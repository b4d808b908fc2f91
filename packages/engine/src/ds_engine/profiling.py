"""How many floating-point operations a forward does, module by module, and what that says of speed.

Counted by torch's own dispatcher counter: every matrix product, convolution and attention, also `@`, einsum and
scaled_dot_product_attention, whoever calls them. A multiply-add is two operations. Elementwise work is not counted, nor is
what is computed again in backward: the section's `recompute_fwd_factor` says how much that is, and it is told apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ds_engine.features import FlopsProfilerConfig

__all__ = ["ForwardCounter", "ModuleFlops", "Profile", "profile_text"]


@dataclass(frozen=True, slots=True)
class ModuleFlops:
    """One module: its qualified name ("" for the model), class, elements of its parameters, operations of its forward."""

    name: str
    kind: str
    numel: int
    flops: int

    @property
    def depth(self) -> int:
        """Levels below the model."""
        return self.name.count(".") + 1 if self.name else 0


@dataclass(frozen=True, slots=True)
class Profile:
    """One forward, and how long the phases of its step took (seconds; empty where they were not timed)."""

    modules: tuple[ModuleFlops, ...]
    seconds: Mapping[str, float]
    samples: int = 0

    @property
    def flops(self) -> int:
        """Operations of the whole forward."""
        return self.modules[0].flops


class ForwardCounter:
    """Counts inside `watch`; `modules` is what the last watched forward did."""

    def __init__(self) -> None:
        self.modules: tuple[ModuleFlops, ...] = ()

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Count what `model` computes here. Slows it down several times; results are the same."""
        counter = FlopCounterMode(display=False)
        with counter:
            yield
        counts = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
        root = type(model).__name__
        found = [ModuleFlops("", root, _numel(model), counter.get_total_flops())]
        for name, module in model.named_modules():
            if name:
                found.append(ModuleFlops(name, type(module).__name__, _numel(module), counts.get(f"{root}.{name}", 0)))
        self.modules = tuple(found)


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def profile_text(profile: Profile, section: FlopsProfilerConfig) -> str:
    """The report: totals, speeds, the largest modules of each level, and (if detailed) every module."""
    forward = profile.flops
    backward = forward * (2 + section.recompute_fwd_factor)
    lines = [
        f"flops profile of step {section.profile_step}, one microbatch on rank 0",
        f"  parameters          {profile.modules[0].numel:,}",
        f"  forward             {_count(forward)}FLOPs ({_count(forward / 2)}MACs)",
        f"  backward            {_count(backward)}FLOPs, of them computed again "
        f"{_count(forward * section.recompute_fwd_factor)}FLOPs",
    ]
    for name, flops in (("forward", forward), ("backward", backward)):
        if seconds := profile.seconds.get(name):
            lines.append(f"  {name + ' speed':<19} {seconds * 1e3:.2f} ms, {_count(flops / seconds)}FLOPS")
    if profile.seconds and profile.samples:
        lines.append(f"  samples per second  {profile.samples / sum(profile.seconds.values()):.2f}")
    shown = [m for m in profile.modules if section.module_depth < 0 or m.depth <= section.module_depth]
    lines += ["  largest by level:", *_largest(shown, section.top_modules)]
    if section.detailed:
        lines += ["  every module:", *(_line(m, forward) for m in shown)]
    return "\n".join(lines)


def _largest(modules: Sequence[ModuleFlops], count: int) -> list[str]:
    lines = []
    for depth in sorted({m.depth for m in modules}):
        level = sorted((m for m in modules if m.depth == depth), key=lambda m: -m.flops)[:count]
        lines.append(f"    {depth}: " + ", ".join(f"{m.name or m.kind} {_count(m.flops)}FLOPs" for m in level))
    return lines


def _line(module: ModuleFlops, total: int) -> str:
    share = f"{100 * module.flops / total:.1f} %" if total else "0 %"
    name = f"{'  ' * module.depth}{module.name.rpartition('.')[2] or '(model)'}"
    return f"    {name:<28} {module.kind:<24} {module.numel:>14,}  {_count(module.flops):>10}FLOPs  {share}"


def _count(value: float) -> str:
    for unit in ("", "K", "M", "G", "T"):
        if abs(value) < 1000:
            return f"{value:.4g} {unit}"
        value /= 1000
    return f"{value:.4g} P"
