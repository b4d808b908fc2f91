"""Combinations of degrees on four ranks, drawn; and what one of them comes to, beside one process on all the data.

A combination is data: it can be printed, counted and kept in `support.json`. `outcome` runs one on the ranks of a world test.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import ds_engine
from ds_config.errors import DsError, set_place
from ds_engine import SumLoss
from ds_parallel.sequence import sequence_part
from ds_pipe import DecoderStages, ProcessTopology

RANKS, BATCH, LENGTH, STEPS, VOCABULARY = 4, 8, 8, 2, 32
PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True, slots=True)
class Combination:
    """Degrees whose product (without experts) is 4, and what else is asked for."""

    data: int
    tensor: int
    sequence: int
    pipe: int
    experts: int
    zero: int
    checkpointing: bool
    precision: str
    accumulation: int
    schedule: str

    @property
    def features(self) -> tuple[str, ...]:
        """What is used, by the names of the support matrix."""
        degrees = {axis: getattr(self, axis) for axis in ("data", "tensor", "sequence", "pipe", "experts")}
        found = [axis for axis, n in degrees.items() if n > 1]
        found.append(f"zero{self.zero}")
        found += ["checkpointing"] * self.checkpointing
        found.append(self.precision)
        return tuple(found)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in asdict(self).items())


def drawn(count: int, seed: int = 22) -> list[Combination]:
    """`count` different combinations, the same for a seed. The first ones have more axes at work."""
    rng, found = random.Random(seed), dict[Combination, None]()
    shapes = [
        (d, t, s, p)
        for d in (1, 2, 4)
        for t in (1, 2, 4)
        for s in (1, 2, 4)
        for p in (1, 2, 4)
        if d * t * s * p == RANKS
    ]
    while len(found) < count:
        data, tensor, sequence, pipe = rng.choice(shapes)
        experts = rng.choice([n for n in (1, 2, 4) if data * sequence % n == 0])
        one = Combination(
            data, tensor, sequence, pipe, experts,
            zero=rng.randrange(4),
            checkpointing=rng.random() < 0.4,
            precision=rng.choices(PRECISIONS, (4, 1, 1))[0],
            accumulation=rng.choice([1, 2]) if data < 4 else 1,
            schedule=rng.choice(("1f1b", "zb-h1", "zbv") if pipe == 2 else ("1f1b", "zb-h1")) if pipe > 1 else "1f1b",
        )  # fmt: skip
        found[one] = None
    return list(found)


def model_of(one: Combination) -> nn.Module:
    """A tiny Llama; a Mixtral where experts are over ranks. Two key-value heads, four layers."""
    transformers: Any = __import__("transformers")
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": 16, "attn_implementation": "sdpa",
    }  # fmt: skip
    torch.manual_seed(3)
    if one.experts > 1:
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, num_local_experts=4))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=True))


def steps_of_data() -> Iterator[dict[str, Tensor]]:
    """Whole batches, [8, 8]; labels of some tokens do not count."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
        labels = ids.clone()
        labels[::3, :4] = -100
        yield {"input_ids": ids, "labels": labels}


def sum_loss(logits: Tensor, labels: Tensor) -> SumLoss:
    """`labels` are shifted already."""
    total = functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
    return SumLoss(total, (labels != -100).sum())


def configuration(one: Combination) -> dict[str, Any]:
    found: dict[str, Any] = {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": one.accumulation,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": one.zero, "stage3_param_persistence_threshold": 20},
        "sequence_parallel_size": one.sequence,
        "tensor_parallel": {"autotp_size": one.tensor},
    }
    if one.experts > 1:
        found["expert_parallel"] = {"enabled": True, "autoep_size": one.experts}
    if one.checkpointing:
        found |= {"pipeline": {"activation_checkpoint_interval": 1}} if one.pipe > 1 else {
            "activation_checkpointing": {"modules": ["model.layers.*"]}
        }  # fmt: skip
    if one.precision == "bf16":
        found["bf16"] = {"enabled": True}
    if one.precision == "fp16":
        found["fp16"] = {"enabled": True, "initial_scale_power": 8}
    return found


def alone(one: Combination) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, norms and values of one process on all the data, in fp32."""
    model = model_of(one)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, norms = [], []
    for batch in steps_of_data():
        part = sequence_part(batch, 0, 1)
        labels = part.pop("shift_labels")
        loss = sum_loss(model(**part, use_cache=False).logits, labels)
        (mean := loss.total / loss.count).backward()
        losses.append(float(mean.detach()))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


def microbatches(one: Combination, data: int, sequence: int, batch: dict[str, Tensor]) -> Iterator[dict[str, Any]]:
    """What a rank takes of a whole batch."""
    for rows in range(one.accumulation):
        size = BATCH // (one.accumulation * one.data)
        start = (rows * one.data + data) * size
        mine = {key: value[start : start + size] for key, value in batch.items()}
        yield sequence_part(mine, sequence, one.sequence)


def cut(one: Combination) -> nn.Module:
    """The model as the engine is given it."""
    if one.pipe == 1:
        return model_of(one)
    axes = {"pipe": one.pipe, "data": one.data, "sequence": one.sequence, "model": one.tensor}
    topology = ProcessTopology(tuple(axes), tuple(axes.values()))
    return DecoderStages(model_of(one), topology=topology, schedule=one.schedule, loss_fn=sum_loss)


def outcome(one: Combination) -> str:
    """ "equal", or "refused: CODE" of what the engine said before anything ran. Collective over four ranks.

    Raises:
        AssertionError: it ran, and came to something else than one process.
    """
    model, engine = cut(one), None
    try:
        engine, *_ = ds_engine.initialize(model=model, config=configuration(one))
    except DsError as error:
        set_place("")
        return f"refused: {error.code}"
    wanted, norms, values = alone(one)
    loose = one.precision != "fp32"
    for number, batch in enumerate(steps_of_data()):
        loss, norm = step(one, engine, batch)
        said = f"{one}: step {number}: loss {loss} of {wanted[number]}, norm {norm} of {norms[number]}"
        assert abs(loss - wanted[number]) <= (2e-2 if loose else 1e-5) * wanted[number], said
        assert abs(norm - norms[number]) <= (5e-2 if loose else 1e-4) * norms[number], said
    if engine.optimizer is not None and not loose:
        engine.optimizer.close()
        if one.tensor == one.experts == 1:
            check_values(model, values, one)
    engine.close()
    dist.barrier()
    set_place("")
    if one.pipe == 1 and not loose:  # all of it is on every rank again
        check_values(model, values, one)
    return "equal"


def step(one: Combination, engine: Any, batch: dict[str, Tensor]) -> tuple[float, float]:
    """One step's mean loss over everything, and the gradient's norm."""
    parts = microbatches(one, engine.mesh["data"].rank, engine.mesh["sequence"].rank, batch)
    if one.pipe > 1:
        pairs = ((part, part.pop("shift_labels")) for part in parts)
        result = engine.train_batch(pairs)
        return float(result.loss), float(result.norm)
    sums = torch.zeros(2)
    for part in parts:
        labels = part.pop("shift_labels")
        loss = sum_loss(engine(**part, use_cache=False).logits, labels)
        engine.backward(loss)
        engine.step()
        sums += torch.stack([loss.total.detach(), loss.count.float()])
    dist.all_reduce(sums)  # ranks of a tensor group count alike
    return float(sums[0] / sums[1]), float(engine.optimizer.last.norm)


def check_values(model: nn.Module, values: dict[str, Tensor], one: Combination) -> None:
    """Parameters of this rank are those of one process."""
    staged = getattr(model, "staged", None)
    named = model.named_parameters() if staged is None else staged.named_logical()
    for name, param in named:
        error = float((param.detach() - values[name]).norm() / values[name].norm().clamp_min(1e-3))
        assert error <= 1e-5, f"{one}: {name} off by {error}"
