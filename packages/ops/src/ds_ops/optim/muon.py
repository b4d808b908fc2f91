"""Muon (Jordan et al. 2024): momentum whose matrices are replaced by their nearest orthogonal ones.

m = m + (1-mu)(g - m);  u = g + mu (m - g);  o = orthogonalize(u);  p = p (1 - lr wd) - lr sqrt(max(1, rows/cols)) o.

Words: a *matrix* parameter has two or more dims. Which of them form the matrix is asked, not guessed, where it can be both:
`muon_matrices` is "flat" (one matrix [out, rest]: the weight of a convolution) or "stack" (matrices in the last two dims: packed
experts). Four dims are a two-dimensional convolution's weight, flat, unless told; three dims, and five and more, must be told.
Everything else (biases, norms, and groups with `use_muon=False`: embeddings, heads) takes an AdamW step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ds_config.errors import ConfigError
from ds_ops.optim.optimizer_base import (
    NO_FUSION,
    FusedOps,
    OpsOptimizer,
    Params,
    _is_dtensor,
    _local,
    _local_grad,
    require_rate,
)
from ds_ops.update_rules import AdamHyper, UpdateRule, UpdateSpec, adam_coefficients

__all__ = ["Muon", "orthogonalize"]

# The quintic a x + b x^3 + c x^5 of Jordan et al.: steep at 0, and maps [0, 1] into about [0.7, 1.2] within five steps.
_A, _B, _C = 3.4445, -4.7750, 2.0315

Method = Literal["standard", "gram"]
Matrices = Literal["flat", "stack"]


def orthogonalize(
    x: Tensor, *, steps: int = 5, method: Method = "standard", dtype: torch.dtype | None = None
) -> Tensor:
    """Replace the singular values of each matrix by values near 1 (0.7 to 1.2): Newton-Schulz.

    Args:
        x: [..., rows, cols]; leading dims are batched.
        method: `standard` multiplies the matrix at every step; `gram` iterates on the small Gram matrix and multiplies
            the matrix twice in all, which is cheaper the less square it is. Equal in exact arithmetic.
        dtype: of the multiplications; default bf16 on accelerators, fp32 on the CPU.
    Returns: same shape and dtype as `x`. All-zero matrices stay zero.
    Cost: with m = min(rows, cols), n = max: standard steps (4 m^2 n + 2 m^3) FLOP; gram 4 m^2 n + steps 6 m^3.
    """
    work = dtype or (torch.float32 if x.device.type == "cpu" else torch.bfloat16)
    y = x.to(work)
    tall = y.size(-2) > y.size(-1)
    y = y.mT if tall else y
    y = y / (torch.linalg.matrix_norm(y.float(), keepdim=True) + 1e-7).to(work)
    y = _standard(y, steps) if method == "standard" or y.size(-2) == y.size(-1) else _gram(y, steps)
    return (y.mT if tall else y).to(x.dtype)


def _standard(y: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        gram = y @ y.mT
        y = _A * y + (_B * gram + _C * (gram @ gram)) @ y
    return y


def _gram(y: Tensor, steps: int) -> Tensor:
    """Compute y_k = q_k y_0 with q a product of polynomials of the Gram matrix: the loop has only small matrices.

    Restarted once from the multiplied matrix: rounding in the Gram matrix grows with the number of steps taken on it.
    """
    for part in (min(2, steps), steps - min(2, steps)):
        gram, q = y.float() @ y.float().mT, None
        for _ in range(part):
            poly = _B * gram + _C * (gram @ gram)
            poly.diagonal(dim1=-2, dim2=-1).add_(_A)
            q = poly if q is None else poly @ q
            gram = poly @ gram @ poly  # commuting and symmetric: the Gram matrix of the next iterate
        y = y if q is None else (q @ y.float()).to(y.dtype)
    return y


def asked_of(group: Mapping[str, Any], p: Tensor) -> Any:
    """What somebody said of the matrices of `p`, or of its group's; None: nothing."""
    return getattr(p, "muon_matrices", None) or group.get("muon_matrices")


def matrices_of(group: Mapping[str, Any], p: Tensor) -> Matrices:
    """Which dims of `p` form a matrix: those of the parameter's own `muon_matrices`, or of its group's, or what its shape leaves no doubt of.

    Raises:
        ConfigError: there is doubt, or the word is none of the two ("optimizer-matrices").
    """
    asked = asked_of(group, p)
    if asked in ("flat", "stack"):
        return asked
    if asked is None and p.ndim in (2, 4):
        return "flat"
    shape = list(p.shape)
    raise ConfigError(
        f"muon_matrices: expected 'flat' or 'stack' for a weight of shape {shape}, found {asked!r}. It may be one matrix "
        f"[{shape[0]}, {p[0].numel() if shape[0] else 0}] (a convolution) or a stack of matrices {shape[-2:]} (packed experts).",
        code="optimizer-matrices",
        fix="Set weight.muon_matrices = 'flat' or 'stack', or muon_matrices of its parameter group, or use_muon=False for AdamW.",
    )


class Muon(OpsOptimizer):
    """Muon for matrices, AdamW for the rest; `elementwise` is False: matrices are stepped whole.

    A group with `use_muon=False` is stepped by AdamW (by Adam with `adam_decoupled=False`) with its own `lr`, `betas`, `eps`; `adam_lr`
    and `muon_lr` set the defaults of the two kinds. Parameters with fewer than two dims are AdamW's in every group.

    Of weights with three dims, or five and more, say which form the matrix: `muon_matrices` of the group, or of the parameter, which
    counts first: `conv1d.weight.muon_matrices = "flat"`, `experts.muon_matrices = "stack"`.

    A group with `heads` has weights [heads * width, in]: the rows of each head are a matrix of their own. A weight that is not so is one.

    A matrix that is a DTensor is gathered once a step: its direction, of the dtype of its gradient or fp32. Each rank then steps its elements.

    With `clip_directions` what clips by the global norm (ds_zero's `clip`) calls `direct` first: it takes the norm of directions, beside AdamW's
    gradients, and multiplies them. Gradients of matrices are clipped otherwise, which changes directions only as far as momentum remembers it.

    State: `momentum_buffer` (matrices), or `exp_avg` and `exp_avg_sq`.

    Raises:
        ConfigError: such a weight without a word about its matrices, or with another word ("optimizer-matrices").
    """

    elementwise: ClassVar[bool] = False
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 2e-2,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        *,
        adam_lr: float = 3e-4,
        adam_betas: tuple[float, float] = (0.9, 0.95),
        adam_eps: float = 1e-10,
        adam_decoupled: bool = True,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_method: Method = "gram",
        clip_directions: bool = False,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        for name, value in {"lr": lr, "adam_lr": adam_lr, "adam_eps": adam_eps, "weight_decay": weight_decay}.items():
            require_rate(name, value)
        for name, value in {
            "momentum": momentum,
            "adam_betas[0]": adam_betas[0],
            "adam_betas[1]": adam_betas[1],
        }.items():
            require_rate(name, value, below=1.0)
        if not ns_steps >= 1:
            raise ConfigError(
                f"ns_steps: expected 1 or more, found {ns_steps!r}.", code="optimizer-value", fix="Set it."
            )
        if ns_method not in ("standard", "gram"):
            raise ConfigError(
                f"ns_method: expected 'standard' or 'gram', found {ns_method!r}.", code="optimizer-value", fix="Set it."
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "use_muon": True,
            "adam_lr": adam_lr,
            "betas": adam_betas,
            "eps": adam_eps,
            "decoupled_weight_decay": adam_decoupled,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "ns_method": ns_method,
        }
        # What was said of the weights with so many dims. A sharder steps other tensors of the same shape, without their attributes.
        self._words: dict[int, set[Matrices]] = {}
        self.clip_directions = clip_directions
        self._directed: set[Tensor] = set()  # parameters whose gradients `direct` has replaced
        super().__init__(params, defaults, state_dtype=state_dtype)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        # A group of AdamW's parameters has one learning rate like any other, so that schedulers scale it.
        if param_group.get("use_muon") is False:
            param_group.setdefault("lr", param_group.get("adam_lr", self.defaults["adam_lr"]))
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            words = [(p.ndim, matrices_of(group, p)) for p in group["params"] if self.is_matrix(group, p)]
        except ConfigError:
            self.param_groups.pop()
            raise
        for ndim, word in words:
            self._words.setdefault(ndim, set()).add(word)

    def __getstate__(self) -> dict[str, Any]:
        kept = {"_words": self._words, "clip_directions": self.clip_directions, "_directed": set()}
        return super().__getstate__() | kept

    def needs_whole(self, group: dict[str, Any], p: Tensor) -> bool:
        return self.is_matrix(group, p) and not _is_dtensor(p)

    def states_of(self, group: dict[str, Any], p: Tensor) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.is_matrix(group, p) else self.state_names

    def is_matrix(self, group: dict[str, Any], p: Tensor) -> bool:
        """Whether Muon, not AdamW, steps `p`."""
        return bool(group["use_muon"]) and p.ndim >= 2

    def step_group(self, group: dict[str, Any], fusion: FusedOps = NO_FUSION) -> None:
        matrices = self._matrices_in(group, fusion)
        others = [p for p in group["params"] if not self.is_matrix(group, p)]
        super().step_group({**group, "params": others}, fusion)
        self.ensure_state(group, matrices)
        for p in self._directed.intersection(matrices):
            self._move(group, p, _local_grad_of(p, fusion), float(fusion.grad_scale), fusion)
        others = [p for p in matrices if p not in self._directed]
        self._directed.difference_update(matrices)
        for flat, same in self._batches(group, others):
            directions, scale = self._orthogonal(group, flat, same, fusion)
            for p, o in zip(same, directions, strict=True):
                self._move(group, p, o, scale, fusion)

    @torch.no_grad()
    def direct(self, fusion: FusedOps = NO_FUSION) -> None:
        """Replace gradients of matrices by what their step subtracts, over the rate; their momentum goes on. The step after it takes them for that.

        Args:
            fusion: As of `step`, of which `grads` and `grad_scale` count; gradients are written.
        """
        for group in self.param_groups:
            matrices = self._matrices_in(group, fusion)
            self.ensure_state(group, matrices)
            for flat, same in self._batches(group, matrices):
                directions, scale = self._orthogonal(group, flat, same, fusion)
                for p, o in zip(same, directions, strict=True):
                    _local_grad_of(p, fusion).copy_(o * scale)
                self._directed.update(same)

    def _matrices_in(self, group: dict[str, Any], fusion: FusedOps) -> list[Tensor]:
        return [p for p in group["params"] if self.is_matrix(group, p) and fusion.grad_of(p) is not None]

    def _batches(self, group: dict[str, Any], params: Sequence[Tensor]) -> Iterator[tuple[bool, list[Tensor]]]:
        """Yield matrices of one shape, and whether they are flat: their Newton-Schulz iterations are one batched product."""
        shapes: dict[tuple[Any, ...], list[Tensor]] = {}
        for p in params:
            shapes.setdefault((self._matrices(group, p), p.shape, p.device, p.dtype), []).append(p)
        for (matrices, *_), same in shapes.items():
            yield matrices == "flat", same

    def spec(self, group: dict[str, Any], step: int) -> UpdateSpec:
        lr = float(group["lr"]) if not group["use_muon"] else float(group["adam_lr"]) * self._schedule(group)
        b1, b2 = group["betas"]
        eps, decay = float(group["eps"]), float(group["weight_decay"])
        hyper = AdamHyper(lr, (float(b1), float(b2)), eps, decay, group.get("decoupled_weight_decay", True))
        return UpdateSpec(UpdateRule.ADAM, adam_coefficients(hyper, step))

    @staticmethod
    def _schedule(group: dict[str, Any]) -> float:
        """Return the ratio of the group's rate to its initial rate; vectors inside a Muon group follow this schedule."""
        initial = float(group.get("initial_lr", group["lr"]))
        return float(group["lr"]) / initial if initial else 1.0

    def _matrices(self, group: dict[str, Any], p: Tensor) -> Matrices:
        words = self._words.get(p.ndim, set())
        return next(iter(words)) if len(words) == 1 and not asked_of(group, p) else matrices_of(group, p)

    def _orthogonal(
        self, group: dict[str, Any], flat: bool, params: Sequence[Tensor], fusion: FusedOps
    ) -> tuple[list[Tensor], float]:
        """Return the orthogonalized directions of matrices of one shape, this rank's elements of each, and the factor of all."""
        directions = torch.stack([self._direction(group, p, fusion) for p in params])
        matrices = directions.flatten(2) if flat else directions
        if (
            group.get("heads") and matrices.shape[1] % group["heads"] == 0
        ):  # rows that heads do not share stay one matrix
            matrices = matrices.unflatten(1, (group["heads"], -1))
        rows, cols = matrices.shape[-2:]
        matrices = orthogonalize(matrices, steps=group["ns_steps"], method=group["ns_method"])
        own = [_elements_of(p, o.reshape(p.shape)) for p, o in zip(params, matrices, strict=True)]
        return own, max(1.0, rows / cols) ** 0.5

    @staticmethod
    def _move(group: dict[str, Any], p: Tensor, direction: Tensor, scale: float, fusion: FusedOps) -> None:
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        _local(p).mul_(1 - lr * decay).add_(direction.to(p.dtype), alpha=-lr * scale)
        if p in fusion.copies:
            fusion.copies[p].copy_(p)
        grad = fusion.grad_of(p)
        if fusion.zero_grads and grad is not None:
            grad.zero_()

    def _direction(self, group: dict[str, Any], p: Tensor, fusion: FusedOps) -> Tensor:
        state, grad = self.state[p], fusion.grad_of(p)
        if grad is None:
            return torch.zeros_like(p)
        self._require_whole(group, p, grad)
        state["step"] += 1
        g = _local_grad(p, grad).to(torch.promote_types(torch.float32, p.dtype)) * fusion.grad_scale
        momentum = _local(state["momentum_buffer"])
        new = torch.lerp(momentum.to(g.dtype), g, 1 - group["momentum"])
        momentum.copy_(new)
        return _gathered(p, torch.lerp(g, new, group["momentum"]) if group["nesterov"] else new)


def _local_grad_of(p: Tensor, fusion: FusedOps) -> Tensor:
    grad = fusion.grad_of(p)
    if grad is None:
        raise KeyError("a parameter without a gradient is not stepped")
    return _local_grad(p, grad)


def _gathered(p: Tensor, local: Tensor) -> Tensor:
    """Return the whole tensor of which `local` are the elements that this rank has, as it has those of `p`; collective for a DTensor."""
    if not _is_dtensor(p):
        return local
    part: Any = p
    whole = type(part.data).from_local(
        local, part.device_mesh, part.placements, run_check=False, shape=p.shape, stride=p.stride()
    )
    result: Tensor = whole.full_tensor()
    return result


def _elements_of(p: Tensor, whole: Tensor) -> Tensor:
    """Return the elements of a whole tensor that this rank has of `p`."""
    if not _is_dtensor(p):
        return whole
    part: Any = p
    sizes = tuple(_local(p).shape)
    chunks = part.__create_chunk_list__()
    if not chunks or 0 in sizes:
        return whole.new_empty(sizes)
    for dim, (start, size) in enumerate(zip(chunks[0].offsets, sizes, strict=True)):
        whole = whole.narrow(dim, start, size)
    return whole
