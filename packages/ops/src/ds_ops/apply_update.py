"""The ops that step optimizers: one pass over memory for a whole list of tensors.

Formula: `ds_ops/reference/update.py`. Cost of AdamW with fp32 everything: 28 bytes an element (read p, g, m, v; write
p, m, v), 30 with a 16-bit copy, 34 when gradients are zeroed too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

import ds_ops._call as _call
import ds_ops.cuda_update as cuda_update
import ds_ops.foreach as foreach
from ds_config.errors import KernelError, UnsupportedError
from ds_ops.reference import update as reference
from ds_ops.registry import Op, choose, cpu_backend, cuda_backend, reference_backend, register, torch_backend
from ds_ops.threads import kernel_threads
from ds_ops.update_rules import StepKernel, UpdateRule, UpdateSpec, UpdateTensors

__all__ = ["Prepared", "lamb_apply", "lamb_moments", "prepare", "update", "update_by"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked update that may be repeated without checking everything again. Holds no tensor alive.

    device: a list of CUDA tensors, whose table of addresses is on the device by now.
    """

    columns: _call.Columns
    device: bool = False

    def run(self, spec: UpdateSpec, tensors: UpdateTensors) -> bool:
        """`update(spec, tensors)` if `tensors` are still where the prepared ones were; else do nothing, return False.

        Cost: about half a microsecond a tensor, a quarter of checking afresh; on a device one launch, on the current stream.
        """
        if not self.columns.same_memory((tensors.params, tensors.grads, *tensors.states)):
            return False
        table = replace(self.columns, keep=(tensors.params, tensors.grads, *tensors.states))
        if self.device:
            _cuda_launch(spec, table, None, sums=False)
        else:
            _native_columns(spec, table)
        return True


def prepare(tensors: UpdateTensors) -> Prepared | None:
    """Check `tensors` once for many updates; None where no native backend runs them, or with copies."""
    if not tensors.params or tensors.copies:
        return None
    choice = choose(_UPDATE, tensors.params[0].device.type, _widest(tensors))
    if choice.backend.name == "cuda":
        return prepare_cuda(tensors)
    if choice.backend.name != "cpu":
        return None
    return Prepared(_table(tensors).forgetting())


def prepare_cuda(tensors: UpdateTensors) -> Prepared:
    """Check `tensors` once for many updates by the CUDA kernel."""
    return Prepared(_table(tensors).forgetting(), device=True)


def update(spec: UpdateSpec, tensors: UpdateTensors) -> None:
    """Update (p, states) = rule(p, scale * g, states) in place, and copy = cast(p).

    See `UpdateSpec` and `UpdateTensors`.

    Args:
        tensors: lists of tensors of any shape, fp32, bf16 or fp16, one dtype a list.
    Cost: bytes an element with fp32 everything: Adam 28, Lion, Adagrad, SGD 20; a 16-bit copy adds 2, zeroing g adds 4.
    Source: the papers beside `UpdateRule` in native/include/ds/update.h (Kingma and Ba 2015, and others).

    Raises:
        KernelError: "kernel-argument" if a tensor is on another device, of another dtype or length, not contiguous, or
            overlaps another one.
    """
    _run(_UPDATE, spec, tensors)


def update_by(kernel: StepKernel, spec: UpdateSpec, tensors: UpdateTensors) -> None:
    """Update as `update` does, by a kernel of the caller's choice.

    AMSGrad has no native kernel: "best" is foreach for it.

    Raises:
        UnsupportedError: "fused" is asked for, and no kernel that makes one pass runs here ("optimizer-fused").
    """
    if not tensors.params:
        return
    choice = choose(_UPDATE, tensors.params[0].device.type, _widest(tensors))
    native = choice.backend.name in ("cpu", "cuda") and spec.rule is not UpdateRule.AMSGRAD
    if kernel == "fused" and not native:
        raise UnsupportedError(
            f"fused=True: {spec.rule.name.lower()} of {_call.describe(tensors.params[0])} has no kernel that makes one pass here; "
            f"the registry chose {choice.backend.name!r}.",
            code="optimizer-fused",
            fix="Run `ds doctor`, which says why; or leave fused out.",
        )
    if kernel in ("best", "fused") and spec.rule is not UpdateRule.AMSGRAD:
        return update(spec, tensors)
    _require_scale(spec.grad_scale, tensors.params[0])
    _require_alike(tensors)
    run = reference.update if kernel == "loop" or choice.backend.name == "reference" else foreach.update
    return run(spec, tensors)


def lamb_moments(spec: UpdateSpec, tensors: UpdateTensors) -> Tensor:
    """Compute the first half of a LAMB step (You et al. 2020): m, v = moments of g; parameters do not change.

    Tensors as in `update`. Returns [count, 2] fp64 on the tensors' device: the sums over each tensor of p^2 and of the
    squared
    direction, summed in one order whatever the number of threads. Cost: 24 bytes an element in fp32: p, g, m, v are
    read, m and v
    written.
    """
    return _run(_LAMB_MOMENTS, spec, tensors)


def lamb_apply(spec: UpdateSpec, tensors: UpdateTensors, ratios: Tensor) -> None:
    """Apply the second half of a LAMB step (You et al. 2020): p -= ratio * lr * u.

    The direction is u = m' / (sqrt(v') + eps) + decay * p.

    ratios: [count] fp32, the trust ratio |p| / |u| of each tensor. Cost: 16 bytes an element in fp32.
    """
    if ratios.dtype != torch.float32 or ratios.numel() != len(tensors.params):
        raise KernelError(
            f"lamb_apply: expected {len(tensors.params)} fp32 ratios, found {_call.describe(ratios)}.",
            code="kernel-argument",
            fix="Pass one trust ratio per tensor.",
        )
    _run(_LAMB_APPLY, spec, tensors, ratios)


def _run(op: Op, spec: UpdateSpec, tensors: UpdateTensors, *extra: Tensor) -> Tensor:
    if not tensors.params:
        return torch.zeros(0, 2, dtype=torch.float64, device="cpu")
    first = tensors.params[0]
    choice = choose(op, first.device.type, _widest(tensors))
    _require_scale(spec.grad_scale, first)
    if choice.backend.name in ("torch", "reference"):  # native ones check more, while they collect addresses
        _require_alike(tensors)
    return choice.backend.run(spec, tensors, *extra)


def _require_scale(scale: float | Tensor, like: Tensor) -> None:
    if isinstance(scale, Tensor) and (
        scale.numel() != 1 or scale.dtype != torch.float32 or scale.device != like.device
    ):
        raise KernelError(
            f"grad_scale: expected a number, or fp32 of one element on {like.device}; found {_call.describe(scale)}.",
            code="kernel-argument",
            fix="Make it where the gradients are, as `ds_ops.stream.clip_scale` does.",
        )


def _require_alike(tensors: UpdateTensors) -> None:
    names = ("param", "grad", *(f"state{i}" for i in range(len(tensors.states))), "copy")
    for name, stream in zip(names, (tensors.params, tensors.grads, *tensors.states, tensors.copies), strict=True):
        if len(stream) != len(tensors.params) and (stream or name != "copy"):
            raise KernelError(
                f"{name}: expected {len(tensors.params)} tensors, found {len(stream)}.",
                code="kernel-argument",
                fix="Pass lists of equal length.",
            )
        for i, (t, p) in enumerate(zip(stream, tensors.params, strict=False)):
            _call.require(f"{name}[{i}]", t, dtypes=(t.dtype,), numel=p.numel(), device=tensors.params[0].device)


def _widest(tensors: UpdateTensors) -> torch.dtype:
    """Return a dtype that only the reference supports if any stream has one, else the parameters' dtype."""
    streams = (tensors.params, tensors.grads, *tensors.states, tensors.copies)
    odd = [s[0].dtype for s in streams if s and s[0].dtype not in _call.DTYPES]
    return odd[0] if odd else tensors.params[0].dtype


def _on_host(scale: float | Tensor) -> float:
    """Return the gradient scale as a number, read from host memory if the scale is a CPU tensor."""
    return float(scale.numpy()) if isinstance(scale, Tensor) else scale


def _numbers(spec: UpdateSpec) -> tuple[float, ...]:
    """The coefficients as native/include/ds/update.h has them: the dither is the twelfth."""
    c = spec.coefficients
    return (*c, *(0.0,) * (11 - len(c)), spec.dither) if spec.dither else c


def _native_call(spec: UpdateSpec, tensors: UpdateTensors, ratio: int = 0, partials: int = 0) -> None:
    _native_columns(spec, _call.columns(tensors.params, tensors.grads, tensors.states, tensors.copies), ratio, partials)


def _native_columns(spec: UpdateSpec, columns: _call.Columns, ratio: int = 0, partials: int = 0) -> None:
    status = _call.native().update(
        int(spec.rule),
        _numbers(spec),
        _on_host(spec.grad_scale),
        spec.zero_grad,
        columns.rows_address,
        columns.count,
        columns.dtypes,
        ratio,
        partials,
        kernel_threads(),
    )
    _call.finish("update", status)
    _call.mark_written(*columns.keep[:1], *columns.keep[2:], *(columns.keep[1:2] if spec.zero_grad else ()))


def _cpu_lamb_moments(spec: UpdateSpec, tensors: UpdateTensors) -> Tensor:
    block = _call.native().update_block
    blocks = [-(-p.numel() // block) for p in tensors.params]
    partials = torch.zeros(
        sum(blocks) + 1, 2, dtype=torch.float64, device="cpu"
    )  # one more: an empty tensor has no address
    _native_call(spec, tensors, partials=_call.address(partials))
    return torch.stack([part.sum(0) for part in partials[:-1].split(blocks)])


def _cpu_lamb_apply(spec: UpdateSpec, tensors: UpdateTensors, ratios: Tensor) -> None:
    _native_call(spec, tensors, ratio=_call.address(_call.require("ratios", ratios, dtypes=(torch.float32,))))


# ---- CUDA: one launch for the whole list, through a table of addresses in device memory ------------------------------


def _cuda_launch(spec: UpdateSpec, table: _call.Columns, ratio: Tensor | None, sums: bool) -> list[Tensor]:
    """Launch the update on the current stream; with `sums` return the partial sums of each tensor, fp64 [chunks, 2]."""
    if table.count == 0:
        return []
    rows, chunks = _call.device_table(table, cuda_update.CHUNK)
    partials = cuda_update.partial_sums(sum(chunks), rows.device) if sums else None
    cuda_update.launch_update(spec, table, rows, sum(chunks), (ratio, partials))
    _call.mark_written(*table.keep[:1], *table.keep[2:], *(table.keep[1:2] if spec.zero_grad else ()))
    return [] if partials is None else list(partials.split(chunks))


def _table(tensors: UpdateTensors) -> _call.Columns:
    return _call.columns(tensors.params, tensors.grads, tensors.states, tensors.copies)


def cuda_step(spec: UpdateSpec, tensors: UpdateTensors) -> None:
    """Run `update` by the CUDA kernel, on the current stream."""
    _cuda_launch(spec, _table(tensors), None, sums=False)


def cuda_lamb_moments(spec: UpdateSpec, tensors: UpdateTensors) -> Tensor:
    """Run `lamb_moments` by the CUDA kernel; the sums are valid on the current stream."""
    return torch.stack([part.sum(0) for part in _cuda_launch(spec, _table(tensors), None, sums=True)])


def cuda_lamb_apply(spec: UpdateSpec, tensors: UpdateTensors, ratios: Tensor) -> None:
    """Run `lamb_apply` by the CUDA kernel, on the current stream."""
    _call.require("ratios", ratios, dtypes=(torch.float32,))
    _cuda_launch(spec, _table(tensors), ratios.to(tensors.params[0].device), sums=False)


_UPDATE = register(
    Op(
        "update",
        "elementwise optimizer steps (adam, lion, adagrad, sgd), one pass",
        (
            cuda_backend(cuda_step),
            cpu_backend(_native_call),
            torch_backend(foreach.update),
            reference_backend(reference.update),
        ),
    )
)
_LAMB_MOMENTS = register(
    Op(
        "lamb_moments",
        "LAMB: moments and norms",
        (
            cuda_backend(cuda_lamb_moments),
            cpu_backend(_cpu_lamb_moments),
            torch_backend(foreach.lamb_moments),
            reference_backend(reference.lamb_moments),
        ),
    )
)
_LAMB_APPLY = register(
    Op(
        "lamb_apply",
        "LAMB: parameters",
        (
            cuda_backend(cuda_lamb_apply),
            cpu_backend(_cpu_lamb_apply),
            torch_backend(foreach.lamb_apply),
            reference_backend(reference.lamb_apply),
        ),
    )
)
