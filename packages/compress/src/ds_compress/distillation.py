"""Distillation: a student learns from what a teacher computes: logits, hidden states, attention.

Hinton et al., arXiv:1503.02531 (logits); Jiao et al., TinyBERT, arXiv:1909.10351 (hidden states and attention, layer by layer).
The teacher may be any module: whole, or sharded by `ds_zero.shard(teacher, None, stage=3)`. It is not trained, and what it
computes can be kept on disk.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_comm import Group, ReduceOp, all_reduce, world_group
from ds_config.errors import PlanError
from ds_config.regular_file import replacing

__all__ = ["Distillation", "Distiller", "TeacherCache", "attention_loss", "hidden_loss", "logit_loss"]


def logit_loss(student: Tensor, teacher: Tensor, temperature: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """Compute T^2 * KL(softmax(teacher / T) || softmax(student / T)), the mean over rows.

    Args:
        student, teacher: [..., classes].
        mask: [...], which rows count; all by default.
    Raises:
        PlanError: the shapes differ, or the temperature is not above 0 ("compress-distill").
    """
    if student.shape != teacher.shape or not 0 < temperature < math.inf:
        raise PlanError(
            f"logits of the student are {list(student.shape)}, of the teacher {list(teacher.shape)}, the temperature is {temperature}",
            code="compress-distill",
            fix="Give both the same classes and rows, and a temperature above 0.",
        )
    student_log_probs = torch.log_softmax(student.float() / temperature, -1)
    wanted = torch.log_softmax(teacher.detach().float() / temperature, -1)
    rows = (wanted.exp() * (wanted - student_log_probs)).sum(-1) * temperature**2
    return _mean(rows, mask)


def hidden_loss(student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute the mean squared difference of hidden states [..., width] of student and teacher.

    A student of another width needs a projection first.
    """
    if student.shape != teacher.shape:
        raise PlanError(
            f"hidden states of the student are {list(student.shape)}, of the teacher {list(teacher.shape)}",
            code="compress-distill",
            fix="Give the pair a projection, or name layers of one width.",
        )
    return _mean((student.float() - teacher.detach().float()).square().mean(-1), mask)


def attention_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Compute the mean over heads and queries of KL(teacher || student) of attention probabilities.

    Both are [batch, heads, queries, keys]. A student with fewer heads is compared by the mean over heads.
    """
    wanted, student_probs = teacher.detach().float(), student.float()
    if wanted.shape[1] != student_probs.shape[1]:
        wanted, student_probs = wanted.mean(1, keepdim=True), student_probs.mean(1, keepdim=True)
    least = torch.finfo(torch.float32).tiny
    return (wanted * (wanted.clamp_min(least).log() - student_probs.clamp_min(least).log())).sum(-1).mean()


def _mean(rows: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return rows.mean()
    weight = mask.to(rows.dtype)
    return (rows * weight).sum() / weight.sum().clamp_min(1)


@dataclass(frozen=True, slots=True)
class Distillation:
    """What a student learns.

    Attributes:
        logits, hidden, attention: Weights of the losses; 0 leaves one out.
        temperature: Of logits.
        layers: Pairs of module names (of the student, of the teacher) whose outputs are hidden states to compare.
        attentions: Pairs of positions in the outputs' `attentions`, which the models must be asked for.
    """

    logits: float = 1.0
    hidden: float = 0.0
    attention: float = 0.0
    temperature: float = 1.0
    layers: tuple[tuple[str, str], ...] = ()
    attentions: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        wrong = [
            text
            for broken, text in (
                (not 0 < self.temperature < math.inf, f"temperature = {self.temperature}"),
                (
                    bool(self.hidden) != bool(self.layers),
                    f"hidden = {self.hidden} with {len(self.layers)} pairs of layers",
                ),
                (
                    bool(self.attention) != bool(self.attentions),
                    f"attention = {self.attention} with {len(self.attentions)} pairs of attentions",
                ),
                (not (self.logits or self.hidden or self.attention), "all weights are 0"),
            )
            if broken
        ]
        if wrong:
            raise PlanError(
                f"distillation: {'; '.join(wrong)}",
                code="compress-distill",
                fix="Give weights together with what they weigh.",
            )


class TeacherCache:
    """What a teacher computed, in a folder: one safetensors file for each batch, named by a digest of its inputs.

    A folder belongs to one teacher; nothing checks that. Ranks write whole files, so they may share one.
    """

    def has(self, inputs: Any) -> bool:
        """Whether it is there."""
        return self._path(inputs).exists()

    def __init__(self, folder: str | os.PathLike[str], group: Group | None = None) -> None:
        """`group`: ranks that ask the teacher together; None is all ranks."""
        self.folder, self.group = Path(folder), group
        self.folder.mkdir(parents=True, exist_ok=True)

    def _path(self, inputs: Any) -> Path:
        return self.folder / f"{_digest(inputs)}.safetensors"

    def get(
        self, inputs: Any, compute: Callable[[], Mapping[str, Tensor]], *, again: bool = False
    ) -> dict[str, Tensor]:
        """Return the cached teacher outputs for `inputs`, on their device; compute them if absent, or if `again`."""
        path = self._path(inputs)
        if path.exists() and not again:
            return load_file(path, device=str(_device(inputs)))
        outputs = {name: value.detach() for name, value in compute().items()}
        with replacing(path) as draft:
            save_file({name: value.contiguous().cpu() for name, value in outputs.items()}, draft)
        return outputs


def _leaves(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [t for item in value.values() for t in _leaves(item)]
    return [t for item in value for t in _leaves(item)] if isinstance(value, list | tuple) else []


def _device(inputs: Any) -> torch.device:
    return next((t.device for t in _leaves(inputs)), torch.device("cpu"))


def _digest(value: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)

    def add(item: Any) -> None:
        if isinstance(item, Tensor):
            digest.update(f"{item.dtype}{list(item.shape)}".encode())
            digest.update(item.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(item, Mapping):
            for name in sorted(item, key=str):
                digest.update(f"{name}:".encode())
                add(item[name])
        elif isinstance(item, list | tuple):
            digest.update(f"[{len(item)}]".encode())
            for one in item:
                add(one)
        else:
            digest.update(repr(item).encode())

    add(value)
    return digest.hexdigest()


class Distiller:
    """Computes what a student's forward lacks of its teacher's.

        distiller = Distiller(student, teacher, Distillation(logits=1.0, temperature=2.0))
        outputs = student(**batch)
        loss = distiller.loss(outputs, **batch)

    It listens to the student's last forward; `close` takes its hooks away. With a cache `loss` is collective: the teacher may be sharded,
    so all ranks ask it where one of them lacks its batch.
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        what: Distillation,
        *,
        projections: Mapping[str, nn.Module] | None = None,
        cache: TeacherCache | None = None,
    ) -> None:
        """Attach hooks to the layers of student and teacher that `what` pairs.

        `projections`: modules that bring a student layer's output, by its name, to the teacher's width; train them with
        the
        student.
        """
        self.teacher, self.what, self.cache = teacher.eval(), what, cache
        self.projections = dict(projections or {})
        self._student: dict[str, Tensor] = {}
        self._taught: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        for student_layer, other in what.layers:
            self._listen(student, student_layer, self._student, "student")
            self._listen(teacher, other, self._taught, "teacher")

    def _listen(self, model: nn.Module, name: str, into: dict[str, Tensor], whose: str) -> None:
        try:
            module = model.get_submodule(name)
        except AttributeError:
            raise PlanError(
                f"distillation: the {whose} has no module {name!r}",
                code="compress-distill",
                fix="Use names from the model's outermost module.",
            ) from None

        def note(module: nn.Module, args: Any, output: Any) -> None:
            into[name] = output[0] if isinstance(output, tuple) else output

        self._handles.append(module.register_forward_hook(note))

    def loss(self, outputs: Any, *args: Any, mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Compute the weighted sum of the distillation losses; scalar, fp32.

        Args:
            outputs: Of the student's forward on these inputs: logits, or an object that has them.
            args, kwargs: Inputs of the teacher.
            mask: [batch, length], which positions count.
        """
        taught, total = self._teach(args, kwargs), None
        what = self.what
        for weight, part in (
            (what.logits, lambda: logit_loss(_logits(outputs), taught["logits"], what.temperature, mask)),
            (what.hidden, lambda: self._hidden(taught, mask)),
            (what.attention, lambda: self._attention(outputs, taught)),
        ):
            if weight:
                value = weight * part()
                total = value if total is None else total + value
        if total is None:
            raise RuntimeError("a distillation without losses")
        self._student.clear()
        return total

    def _hidden(self, taught: Mapping[str, Tensor], mask: Tensor | None) -> Tensor:
        losses = []
        for student_layer, other in self.what.layers:
            projection = self.projections.get(student_layer, nn.Identity())
            losses.append(hidden_loss(projection(self._student[student_layer]), taught[f"layer/{other}"], mask))
        return torch.stack(losses).mean()

    def _attention(self, outputs: Any, taught: Mapping[str, Tensor]) -> Tensor:
        attentions = _attentions(outputs)
        return torch.stack(
            [attention_loss(attentions[i], taught[f"attention/{j}"]) for i, j in self.what.attentions]
        ).mean()

    def _teach(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Tensor]:
        if self.cache is None:
            return self._compute(args, kwargs)
        inputs = (args, dict(kwargs))
        # A sharded teacher computes on all ranks or on none: a rank that has its batch computes along with those that have not.
        again = not _all_true(self.cache.has(inputs), _device(inputs), self.cache.group or world_group())
        return self.cache.get(inputs, lambda: self._compute(args, kwargs), again=again)

    @torch.no_grad()
    def _compute(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        outputs = self.teacher(*args, **kwargs)
        results = {f"layer/{name}": value.detach() for name, value in self._taught.items()}
        self._taught.clear()
        if self.what.logits:
            results["logits"] = _logits(outputs).detach()
        if self.what.attentions:
            attentions = _attentions(outputs)
            results |= {f"attention/{j}": attentions[j].detach() for _, j in self.what.attentions}
        return results

    def close(self) -> None:
        """Stop listening."""
        for handle in self._handles:
            handle.remove()


def _all_true(local_value: bool, device: torch.device, group: Group) -> bool:
    if group.size == 1:
        return local_value
    flag = torch.tensor(local_value, dtype=torch.int32, device=device)
    all_reduce(flag, ReduceOp.MIN, group)
    return bool(flag)


def _logits(outputs: Any) -> Tensor:
    logits = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor):
        raise PlanError(
            f"outputs are a {type(outputs).__name__} without logits",
            code="compress-distill",
            fix="Return logits, or an object with `logits`.",
        )
    return logits


def _attentions(outputs: Any) -> Sequence[Tensor]:
    attentions = getattr(outputs, "attentions", None)
    if not attentions:
        raise PlanError(
            "outputs have no attentions",
            code="compress-distill",
            fix="Call student and teacher with output_attentions=True, and attention that computes them (eager).",
        )
    result: Sequence[Tensor] = attentions
    return result
