"""What `shard` is asked for, and what planning reads of a model.

Words: a *placement* says where state is kept between uses, for a role: masters and optimizer state (`ShardOptions.offload_optimizer`), or parameters
(`ShardOptions.offload_params`). *Host* is memory of the CPU, page-locked where that makes copies faster. *File* is a scratch file of each
rank, of which a bounded number of *buffers* is in host memory at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ds_comm import Group, Work
from ds_comm.codecs.compressed import ErrorFeedback, Quantized
from ds_comm.codecs.hierarchy import Hierarchy
from ds_comm.reduction_group import param_sharding
from ds_config.errors import PlanError
from ds_config.option_checks import check_options
from ds_ops.io import IOSettings
from ds_zero.layout.dtypes_plan import Dtypes, Precision
from ds_zero.layout.elements import Kind, UnitLayout
from ds_zero.layout.model_members import named_members
from ds_zero.layout.reduction_groups import family_name
from ds_zero.layout.units import (
    OUTSIDE,
    STAGES,
    ModuleInfo,
    ParamInfo,
    ShardingStrategy,
    UnitBytes,
    UnitSizePolicy,
    UnitSpec,
)

__all__ = [
    "PAGE_BYTES",
    "PLAIN",
    "CommFormat",
    "NodeTopology",
    "OffloadPolicy",
    "OptimizerTraits",
    "ShardOptions",
    "UpdatePolicy",
    "describe",
    "dtype_name",
    "has_forward",
    "placed_numel",
]

PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class NodeTopology:
    """Where ranks are close to each other, and what is made of it. At stage 3.

    Attributes:
        size: Neighbouring ranks of a node.
        hierarchical: Gather across nodes first, then inside.
        secondary_partition: Keep what was gathered inside the node until the next update: 1/size of the parameters on each rank.
    """

    size: int
    hierarchical: bool = False
    secondary_partition: bool = False

    def __post_init__(self) -> None:
        check_options(self, size=">= 1")


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    """A place for state, usable as `offload_optimizer=` and `offload_params=` of `shard`.

    Attributes:
        device: `"host"` or `"file"`.
        folder: Of the scratch files; made if it is not there. Nothing is left in it, however the process ends.
        pin: Page-lock host memory where the device gains from it; a refusal falls back to plain memory with one warning.
        ratio: Which part of the elements is placed there, counted from the model's end; the rest stays on the device.
        buffer_count: Units of which the bytes of a file may be in memory at a time, at least 2.
        max_in_cpu: Of parameters: so many elements of a rank stay in host memory before files are used.
        read_ahead: Read the next unit while one is used.
        write_behind: Write a unit while the next one is used.
        io: How transfers are cut and queued.
        overlap_ratio: Of optimizer state in host memory: share of a rank's threads, at least one, that update units while backward goes on
            (`update/overlap_plan.py`); 0: all updates begin after it. What such an update overwrites is kept until the step: the same bytes again.
        accumulates: Of optimizer state: several backwards add up before a step, so that the plan has room for their sums on the host.
    Raises:
        PlanError: a number out of range ("config-option"); a file without a folder, or early updates of files ("offload-placement").
    """

    device: Literal["host", "file"] = "host"
    folder: str | None = None
    pin: bool = True
    ratio: float = 1.0
    buffer_count: int = 4
    max_in_cpu: int = 0
    read_ahead: bool = True
    write_behind: bool = True
    io: IOSettings = field(default_factory=IOSettings)
    overlap_ratio: float = 0.0
    accumulates: bool = False

    def __post_init__(self) -> None:
        share = ">= 0, <= 1"
        check_options(self, ratio=share, overlap_ratio=share, buffer_count=">= 2", max_in_cpu=">= 0")
        wrong = []
        if (self.device == "file") != (self.folder is not None):
            wrong.append(f"device = {self.device!r} with folder = {self.folder!r}")
        if self.overlap_ratio and self.device == "file":
            wrong.append(
                f"overlap_ratio = {self.overlap_ratio} with device = 'file': what an early update overwrites is kept in host memory"
            )
        if wrong:
            raise PlanError(
                "; ".join(wrong),
                code="offload-placement",
                fix="Give a folder for files, and none for host memory; early updates are for host memory.",
            )

    def __str__(self) -> str:
        return self.device

    resident = False
    """Never a range of the buffer that forward uses."""

    @property
    def one_unit_at_a_time(self) -> bool:
        """Whether a unit is updated by itself: so many buffers hold all that is in memory."""
        return self.device == "file"

    def planned(self, usage: UnitBytes) -> UnitBytes:
        """Move the bytes of master parameters and optimizer state from the device to this offload target. Pure."""
        moved = usage.shard + usage.optim
        offloaded = 2 * moved if self.overlap_ratio else moved
        return replace(usage, shard=0, optim=0, **{self.device: getattr(usage, self.device) + offloaded})

    def planned_params(self, usage: UnitBytes) -> UnitBytes:
        """Move the bytes of the shards that all-gathers send from the device to this offload target. Pure."""
        return replace(usage, full=0, **{self.device: getattr(usage, self.device) + usage.full})

    def staging(self, units: Sequence[UnitBytes]) -> int:
        """Return the bytes of host memory for staging buffers to and from files."""
        if self.device != "file":
            return 0
        return min(self.buffer_count, len(units)) * max(
            (-(-unit.file // PAGE_BYTES) * PAGE_BYTES for unit in units), default=0
        )

    def spread(self, units: Sequence[UnitSpec]) -> list[str | OffloadPolicy]:
        """Decide for each unit, in canonical order, whether it is offloaded.

        Whole units: at least the ratio asked for.
        """
        numels = [unit.numel if unit.trained else 0 for unit in units]
        return [self if here else "device" for here in placed_numel(numels, self.ratio)]

    def spread_params(self, numels: Sequence[int]) -> list[OffloadPolicy]:
        """Decide for each unit, in canonical order, where its parameters are offloaded between uses.

        Args:
            numels: Of each unit, the elements that a rank holds.
        """
        host, done, policies = replace(self, device="host", folder=None, max_in_cpu=0), 0, []
        for numel in numels:
            done += numel
            policies.append(host if self.device == "file" and done <= self.max_in_cpu else self)
        return policies


def placed_numel(numels: Sequence[int], share: float) -> list[bool]:
    """Return which units lie in the last `ratio` of all elements; a unit across the border counts as inside."""
    threshold, done = (1.0 - share) * sum(numels), 0
    flags = []
    for numel in numels:
        done += numel
        flags.append(share > 0.0 and done > threshold)
    return flags


@dataclass(frozen=True, slots=True)
class CommFormat:
    """How parameters and gradients travel between ranks: as they are. The extension point of policies that send less, which are subclasses.

    Attributes:
        codes_gathers, codes_sums: Whether what arrives is not what was sent, to the bit.
            Only a format that codes gathers is asked to `gather`.
    """

    @property
    def codes_gathers(self) -> bool:
        return False

    @property
    def codes_sums(self) -> bool:
        return False

    def of_unit(self, *, trained: bool, gathered: bool) -> CommFormat:
        """Return the format for a sharded unit; `gathered`: the unit is resharded between uses."""
        del trained, gathered
        return self

    def check(self, residency: ShardingStrategy) -> None:
        """Raise where it could not act."""

    def check_format(self, dtype: torch.dtype) -> None:
        """Raise where it is not known to train parameters of a format as well."""

    def message(self, what: Literal["gather", "reduce"], layout: UnitLayout, dtype: torch.dtype) -> int:
        """Return the bytes of a shard as sent."""
        del what
        return layout.shard_numel * dtype.itemsize

    def buffers(self, layout: UnitLayout, dtypes: Dtypes) -> tuple[int, int, int]:
        """Return the extra bytes per rank beside plain messages: in an all-gather, in a reduction, and persistent."""
        del layout, dtypes
        return 0, 0, 0

    def gather(self, out: Tensor, shard: Tensor, start: Callable[[Tensor, Tensor], Work]) -> Work:
        """Start to fill `out` [ranks * n] from every rank's `shard` [n] by `start(out, shard)`, which gathers tensors of one format."""
        return start(out, shard)

    def levels(self, shards: Group) -> Hierarchy | None:
        """Return the intra-node and inter-node groups for the gradients of `shards`; None where one hop is right.

        Collective over `shards`.
        """
        del shards
        return None

    def sums(self, levels: Hierarchy | None) -> tuple[Quantized | None, ErrorFeedback | None]:
        """Return the collectives that reduce a unit's gradients, and their error feedback; None for exact gradients."""
        del levels
        return None, None


_log = logging.getLogger(__name__)
PLAIN = CommFormat()


class UpdatePolicy(Protocol):
    """Says which elements a step updates. A value; the same on all ranks.

    Attributes:
        states: Tensors per element that it keeps beside those of the optimizer.
    """

    @property
    def states(self) -> int: ...

    def start(self, inner: Optimizer, sharding: Any) -> Any:
        """Build the `Updater` of an optimizer whose model is sharded."""


@dataclass(frozen=True, slots=True)
class ShardOptions:
    """How a model is sharded. None stands for a default everywhere.

    Attributes:
        stage: ZeRO stage, 0 to 3, or a `ShardingStrategy`.
        group: Ranks to shard and average over; None: all.
        precision: `"fp32"`, `"bf16"`, `"fp16"`, a Precision, or None for the model's own formats.
        reduce_dtype: Format that gradients travel in between ranks, as in FSDP2's MixedPrecisionPolicy; it is `precision.reduce`. None: that
            of the parameters. Sums are made in fp32 where the transport is ours (shm, gloo), and rounded once; NCCL sums in this format.
        clip: Largest global gradient norm; `math.inf` measures without clipping; None does neither.
        overlap: Communicate while computing. False: each operation is waited for where it starts, the all-gather of new weights in `step`.
        norm: All ranks that hold a part of the model, where some of it is on none of `group` (tensor or pipeline parallelism): the
            norm, whether a step is skipped, and what is merged into a state dict are of all of them. None: those of `group`.
        policy: Sizes of units and of what stays gathered.
        strict: Raise on all ranks if the ranks of a step used different parameters.
        ignore_unused_parameters: Leave a parameter that no rank used in a step as it is; False raises on all ranks.
        layout: How units are laid out: `"flat"`, `"dim0"` or `"whole"`; None: flat for an optimizer that treats elements
            independently of each other, whole for one that needs whole parameters (found out by asking it).
        shard_size: Ranks that share one copy of what is sharded; every such replica holds all of it, and gradients are summed
            over all ranks. None: all ranks share one copy. Of a reduction group on some of the ranks: of its ranks.
        nodes: Which neighbouring ranks are close to each other, and how stage 3 gathers there. None: gathers are flat.
        sparse: Send only the rows of embedding gradients that are not zero, as (index, values). At stage 0.
        memory: `"private"`: every rank keeps its own copies. `"shared"`: the ranks are on one host and keep one copy of
            parameters for all of them, at every stage above 0. `"auto"`: shared where the group's backend is shm.
        offload_optimizer: Where master shards and the optimizer's state are between updates: a name of `ds_zero.offload.state_stores.TIERS`, a
            `ds_zero.OffloadPolicy`, or a function that says one of these for each unit.
        offload_params: Where parameters are between uses, and frozen ones at all, at stage 3: `"device"`, or a `ds_zero.OffloadPolicy`.
        quantized_comm: What travels as small codes instead of as it is (`ds_zero.QuantizedComm`, ZeRO++).
        updates: Which elements are stepped when (`ds_zero.policies.zenflow.ZenFlowOptions`); None: all in every step.
    """

    stage: int | ShardingStrategy = 1
    group: Group | dist.ProcessGroup | None = None
    precision: Precision | str | None = None
    clip: float | None = None
    norm: Group | dist.ProcessGroup | None = None
    overlap: bool = True
    policy: UnitSizePolicy = field(default_factory=UnitSizePolicy)
    strict: bool = False
    ignore_unused_parameters: bool = True
    layout: Kind | None = None
    shard_size: int | None = None
    nodes: NodeTopology | None = None
    sparse: bool = False
    memory: Literal["auto", "private", "shared"] = "auto"
    offload_optimizer: str | OffloadPolicy | Callable[[UnitSpec], str | OffloadPolicy] = "device"
    offload_params: Literal["device"] | OffloadPolicy = "device"
    quantized_comm: CommFormat = PLAIN
    updates: UpdatePolicy | None = None
    reduce_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        """Check the values, and merge `reduce_dtype` into `precision`.

        Raises:
            PlanError: a value has no meaning ("config-option") or no effect ("offload-placement"); gradients cannot travel in this format, or
                `precision` says another one ("precision-reduce").
        """
        for option in fields(self):  # None is what a program has that asks for nothing
            if getattr(self, option.name) is None and option.default is not None:
                object.__setattr__(self, option.name, _default_of(option))
        check_options(self, clip="> 0")
        if self.offload_params != "device" and not self.residency.shard_params:
            raise PlanError(
                f"offload_params = {self.offload_params!r} with stage {self.stage}, whose parameters stay gathered",
                code="offload-placement",
                fix="Use stage 3, or leave offload_params out: offload_optimizer takes masters and optimizer state at every stage.",
            )
        dtype = self.reduce_dtype
        if dtype is None:
            return
        precision = Precision.of(self.precision)
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise _reduce_error(
                f"reduce_dtype is {dtype!r}", "Use torch.float32, torch.bfloat16, torch.float16, or torch.float64."
            )
        if precision.reduce not in (None, dtype):
            raise _reduce_error(
                f"reduce_dtype is {dtype}, and precision.reduce is {precision.reduce}", "Say one of them."
            )
        object.__setattr__(self, "precision", replace(precision, reduce=dtype))

    def offload_policies(self, specs: Sequence[UnitSpec]) -> list[str | OffloadPolicy]:
        """Return the optimizer offload of each unit, in canonical order."""
        if isinstance(self.offload_optimizer, OffloadPolicy):
            return self.offload_optimizer.spread(specs)
        return [
            self.offload_optimizer if isinstance(self.offload_optimizer, str) else self.offload_optimizer(spec)
            for spec in specs
        ]

    def param_offload_policies(self, specs: Sequence[UnitSpec], shards: Sequence[int]) -> list[str | OffloadPolicy]:
        """Return the parameter offload of each unit, in canonical order.

        Args:
            shards: Of each unit, the number of ranks that share its shards.
        """
        if isinstance(self.offload_params, str):
            return [self.offload_params] * len(specs)
        cut = [spec.strategy.shard_params for spec in specs]
        numels = [-(-s.numel // n) if c else 0 for s, n, c in zip(specs, shards, cut, strict=True)]
        return list(self.offload_params.spread_params(numels))

    @property
    def residency(self) -> ShardingStrategy:
        """The stage as a value."""
        if isinstance(self.stage, ShardingStrategy):
            return self.stage
        if self.stage not in STAGES:
            raise PlanError(
                f"ZeRO stage {self.stage!r} does not exist",
                code="zero-stage",
                fix="Use a stage from 0 to 3, or a ds_zero.ShardingStrategy.",
            )
        return STAGES[self.stage]


def _default_of(option: Field[Any]) -> Any:
    return option.default if option.default_factory is MISSING else option.default_factory()


def _reduce_error(problem: str, fix: str) -> PlanError:
    return PlanError(f"{problem}: gradients travel in one floating-point format", code="precision-reduce", fix=fix)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype: `torch.float32` -> `"float32"`."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class OptimizerTraits:
    """What an optimizer needs of its parameters, and keeps for them.

    Attributes:
        layout: How their units are laid out.
        states: Tensors per element that it keeps (AdamW 2, SGD with momentum 1, SGD 0).
        coupled: Whether the update of a tensor depends on other tensors, so that every rank must step all of them.
    """

    layout: Kind = "flat"
    states: int = 2
    coupled: bool = False


def has_forward(module: nn.Module) -> bool:
    """Whether a module is called with hooks, unlike a container of others (a ModuleList), and a scripted module, which takes none."""
    return not isinstance(module, torch.jit.ScriptModule) and type(module).forward is not nn.Module.forward


def describe(
    model: nn.Module,
    groups: Mapping[int, int],
    habits: OptimizerTraits | Mapping[int, OptimizerTraits],
    precision: Precision | None = None,
) -> tuple[list[ParamInfo], list[ModuleInfo]]:
    """Build the planner's records of a model's parameters and modules.

    Args:
        groups: id of a parameter -> number of its optimizer group.
        habits: Traits of the optimizer, for all trained parameters or by number of the group.
        precision: Parameters with different precision rules do not share a unit.
    """
    modules = [
        ModuleInfo(name, has_forward(module), f"{type(module).__module__}.{type(module).__qualname__}")
        for name, module in model.named_modules()
    ]
    params = []
    for name, param in named_members(model).items():
        owner = "" if name.startswith(OUTSIDE) else name.rpartition(".")[0]
        group = groups.get(id(param)) if param.requires_grad else None
        traits = OptimizerTraits(states=0)
        if group is not None:
            traits = habits if isinstance(habits, OptimizerTraits) else habits[group]
        rule = precision.rule_of(name) if precision is not None else None
        shape, dtype, family = tuple(param.shape), dtype_name(param.dtype), family_name(param)
        logical = param_sharding(param).name or ""
        params.append(ParamInfo(name, shape, dtype, owner, group, family, traits.layout, rule, traits.states, logical))
    for number, asked in enumerate(precision.rules if precision is not None else ()):
        if all(param.rule != number for param in params):
            _log.warning(
                "precision: the rule for %r has no effect: earlier rules match all its parameters, or it has none",
                asked.subject,
            )
    return params, modules
