"""How parameters and gradients travel: as they are, or as small codes in groups that share a scale.

Reference: Wang et al. 2023, "ZeRO++" (qwZ, qgZ); Xie et al. 2024, "LoCo".

Words: a unit's *wire* is a `QuantizedComm` that says it for this unit alone. Parameters are quantized on their way only: a gather writes what
it brought where forward reads, never over a master, and whole access (`GatheredParameters`, `safe_get_*`, checkpoints, `close`) gets
the exact values. Gradients are quantized once a hop and added up in fp32.

A form is *certified* when a model that was trained with it for 500 steps ended within 1 % of the loss of the exact run; a form and
format of parameters without such a run is refused. The runs are in `certificates.json`, made by the package's tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import resources
from typing import Any, Literal

import torch
from torch import Tensor

import ds_comm as comm
from ds_comm import Group
from ds_comm.codecs.compressed import ErrorFeedback, Quantized
from ds_comm.codecs.hierarchy import Hierarchy
from ds_comm.work import Chained
from ds_config.errors import PlanError, UnsupportedError
from ds_config.option_checks import check_options
from ds_ops.formats import INT4, INT8, QuantSpec, QuantTensor
from ds_ops.quant import dequantize, quantize
from ds_zero.layout.dtypes_plan import Dtypes
from ds_zero.layout.elements import UnitLayout
from ds_zero.layout.shard_options import CommFormat
from ds_zero.layout.units import ShardingStrategy
from ds_zero.runtime.unit_groups import node_groups

__all__ = ["EXACT", "LIMIT", "QGZ", "QWZ", "ErrorFeedbackOptions", "QuantizedComm", "certificates", "decoded"]

QWZ = QuantSpec(INT8, 256)
"""Of parameters: int8, 0.254 of fp32's bytes and 0.508 of bf16's."""
QGZ = QuantSpec(INT4, 128)
"""Of gradients: int4, 0.133 of fp32's bytes and 0.266 of bf16's."""
LIMIT = 0.01
"""How far the loss of a certified form may be from the exact one's, relative to it."""

Certificates = Mapping[str, Mapping[str, Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class ErrorFeedbackOptions:
    """What quantization lost is added to the next message of the same unit: e = decay e + (1 - decay) lost.

    Attributes:
        decay: In [0, 1).
        reset_after: Reductions after which the error of a unit is forgotten; 0: never.
    """

    decay: float = 0.8
    reset_after: int = 1024

    def __post_init__(self) -> None:
        check_options(self, decay=">= 0, < 1", reset_after=">= 0")


@dataclass(frozen=True, slots=True)
class QuantizedComm(CommFormat):
    """What is quantized.

    Attributes:
        weights: How gathers of stage 3 send parameters that are trained; None: as they are.
        frozen: The same of those that are not.
        gradients: How gradients are sent to be summed, at stages 1 to 3; None: in the reduce format.
        correction: Of the errors of gradients; None leaves them. Costs an fp32 or reduce-format copy of the unit's gradient.
        node: Neighbouring ranks of a node: gradients are summed there first, and the sums, quantized again, go between nodes. 1: one hop.
    """

    weights: QuantSpec | None = None
    frozen: QuantSpec | None = None
    gradients: QuantSpec | None = None
    correction: ErrorFeedbackOptions | None = None
    node: int = 1

    def __post_init__(self) -> None:
        check_options(self, node=">= 1")

    @property
    def codes_gathers(self) -> bool:
        return self.weights is not None

    @property
    def codes_sums(self) -> bool:
        return self.gradients is not None

    def of_unit(self, *, trained: bool, gathered: bool) -> QuantizedComm:
        weights = self.weights if trained else self.frozen
        form = QuantizedComm(weights if gathered else None)
        if not trained or self.gradients is None:
            return form
        return replace(form, gradients=self.gradients, correction=self.correction, node=self.node)

    def check(self, residency: ShardingStrategy) -> None:
        """Check that the quantization options have an effect under the sharding strategy.

        Raises:
            PlanError: "zero-quantized-comm".
        """
        conflict = ""
        if (self.weights or self.frozen) and not residency.shard_params:
            conflict = (
                "gathers are to send codes, and parameters are gathered after updates only: masters would be lost"
            )
        elif self.gradients and not residency.shard_optim:
            conflict = "gradients are to be sent as codes, and every rank keeps the whole sum"
        elif self.correction and not self.gradients:
            conflict = "errors of quantized gradients are to be corrected, and gradients are exact"
        if conflict:
            raise PlanError(
                conflict,
                code="zero-quantized-comm",
                fix="Quantize parameters at stage 3, gradients at stages 1 to 3, and correct only what is quantized.",
            )

    def check_format(self, dtype: torch.dtype) -> None:
        """Check that every quantized mode of a unit has a certificate for parameters of `dtype`.

        Raises:
            UnsupportedError: a mode has no certificate ("zero-uncertified").
        """
        name = str(dtype).removeprefix("torch.")
        for mode in self.modes:
            if name not in certificates().get(mode, {}):
                known = sorted(
                    f"{certified} of {kind}" for certified, kinds in certificates().items() for kind in kinds
                )
                raise UnsupportedError(
                    f"quantized messages were asked for, {mode}, with parameters of {name}: nobody has shown that they train as well",
                    code="zero-uncertified",
                    fix=f"Use one of {'; '.join(known) or 'none'}, or leave it out.",
                )

    def message(self, what: Literal["gather", "reduce"], layout: UnitLayout, dtype: torch.dtype) -> int:
        form = self.weights if what == "gather" else self.gradients
        if form is None:
            return layout.shard_numel * dtype.itemsize
        return sum(form.layout(segment.chunk).row_bytes for segment in layout.segments)

    def buffers(self, layout: UnitLayout, dtypes: Dtypes) -> tuple[int, int, int]:
        gather = reduce = errors = 0
        if self.weights is not None:  # one's own codes, and all ranks'
            gather = (layout.world + 1) * self.message("gather", layout, dtypes.param)
        if self.gradients is not None:
            hops = 1 if self.node == 1 else 2
            reduce = hops * 2 * layout.world * self.message("reduce", layout, dtypes.reduce)
            if self.correction is not None:
                errors = layout.numel * dtypes.reduce.itemsize + (hops - 1) * layout.numel // self.node * 4
        return gather, reduce, errors

    def gather(self, out: Tensor, shard: Tensor, start: Callable[[Tensor, Tensor], comm.Work]) -> comm.Work:
        return start(out, shard) if self.weights is None else decoded(out, shard, self.weights, start)

    def levels(self, shards: Group) -> Hierarchy | None:
        """Raises:
        PlanError: nodes do not divide the ranks ("zero-nodes").
        """
        if self.gradients is None or not 1 < self.node < shards.size:
            return None
        return Hierarchy(shards, *node_groups(shards, self.node, ("reduce.node", "reduce.across")))

    def sums(self, levels: Hierarchy | None) -> tuple[Quantized | None, ErrorFeedback | None]:
        if self.gradients is None:
            return None, None
        correction = self.correction
        feedback = None if correction is None else ErrorFeedback(correction.decay, correction.reset_after)
        return Quantized(self.gradients, levels, feedback), feedback

    @property
    def modes(self) -> tuple[str, ...]:
        """Names of what loses something, as certificates have them."""
        weights = self.weights or self.frozen
        names = [] if weights is None else [f"weights {_text(weights)}"]
        if self.gradients is not None:
            names.append(f"gradients {_text(self.gradients)}{', corrected' if self.correction else ''}")
        return tuple(names)

    def __str__(self) -> str:
        return " and ".join(self.modes) or "exact"


EXACT = QuantizedComm()


def _text(spec: QuantSpec) -> str:
    return f"{spec.format.name}/{spec.group}"


@cache
def certificates() -> Certificates:
    """Load the certificates: mode -> dtype of the parameters -> `loss`, `exact` and `steps` of the run. Read once."""
    table: Certificates = json.loads(resources.files("ds_zero").joinpath("certificates.json").read_text())
    return table


def decoded(out: Tensor, shard: Tensor, spec: QuantSpec, gather: Callable[[Tensor, Tensor], comm.Work]) -> comm.Work:
    """Start `gather(out, shard)` of codes of them. Every rank gets the same bits, also of its own part; `shard` is only read.

    Args:
        out: [ranks * n], of the format of parameters.
        shard: [n], of the same or a wider format.
        gather: Starts a gather of bytes.
    """
    n = shard.numel()
    if n == 0:
        return gather(out, shard)
    coded = quantize(shard.view(1, n), spec)
    every = QuantTensor.empty(spec, out.numel() // n, n, like=out)

    return Chained(gather(every.wire.view(-1), coded.wire.view(-1)), partial(_decode, coded, every, out))


def _decode(sent: QuantTensor, every: QuantTensor, out: Tensor) -> None:
    del sent  # has to be there until now
    with torch.no_grad():
        dequantize(every, out=out.view(every.rows, -1))
