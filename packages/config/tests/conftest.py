"""A schema that has one of everything, in the shape of the real one."""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, model_validator

from ds_config import Alias, Deprecated, NoEffect, StrictModel, Unsupported


class Tag(enum.Enum):
    WARN = "Warn"
    FAIL = "Fail"


class Offload(StrictModel):
    device: Literal["none", "cpu", "nvme"] = "none"
    nvme_path: Path | None = None
    buffer_count: Annotated[int, Field(ge=1)] = 4
    ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    pin_memory: bool = True

    @model_validator(mode="after")
    def _path_for_nvme(self) -> Offload:
        if self.device == "nvme" and self.nvme_path is None:
            raise ValueError("device nvme needs nvme_path")
        return self


def as_offload(wanted: bool) -> dict[str, str] | None:
    return {"device": "cpu"} if wanted else None


class Zero(StrictModel):
    stage: Literal[0, 1, 2, 3] = 0
    overlap_comm: bool | None = None
    reduce_bucket_size: Annotated[int, Field(ge=0)] = 500_000_000
    allgather_bucket_size: Annotated[int, Field(ge=0)] = 500_000_000
    prefetch_bucket_size: Annotated[int, Field(ge=0), Alias("stage3_prefetch_bucket_size")] = 50_000_000
    offload_optimizer: Offload | None = None
    offload_param: Offload | None = None
    cpu_offload: Annotated[bool, Deprecated("offload_optimizer", convert=as_offload)] = False
    gather_weights: bool = False
    gather_fp16_weights: Annotated[bool, Deprecated("gather_weights")] = False
    offload_buffers: Annotated[int, Deprecated("offload_optimizer.buffer_count")] = 4
    elastic_checkpoint: Annotated[bool, NoEffect("checkpoints are always elastic")] = False
    round_robin_gradients: Annotated[bool, Unsupported("leave it out")] = False


class Precision(StrictModel):
    enabled: bool = False
    loss_scale: float = 0.0
    initial_scale_power: int = 16


class Group(StrictModel):
    modules: tuple[str, ...] = ("*",)
    bits: int


class Train(StrictModel):
    train_batch_size: Annotated[int, Field(gt=0)] | None = None
    train_micro_batch_size_per_gpu: Annotated[int, Field(gt=0)] | None = None
    gradient_accumulation_steps: Annotated[int, Field(gt=0)] | None = None
    gradient_clipping: Annotated[float, Field(ge=0)] = 1.0
    steps_per_print: int | None = None
    tag_validation: Tag = Tag.WARN
    top_k: int | Literal["auto"] = "auto"
    zero_optimization: Zero = Field(default_factory=Zero)
    fp16: Precision = Field(default_factory=Precision)
    bf16: Annotated[Precision, Alias("bfloat16")] = Field(default_factory=Precision)
    optimizer: dict[str, Any] = Field(default_factory=dict)
    groups: dict[str, Group] = Field(default_factory=dict)
    layers: list[Group] = Field(default_factory=list)
    betas: tuple[float, float] = (0.9, 0.999)
    sparse_attention: Annotated[dict[str, Any] | None, Unsupported("torch's FlexAttention")] = None

    @model_validator(mode="after")
    def _one_precision(self) -> Train:
        if self.fp16.enabled and self.bf16.enabled:
            raise ValueError("fp16 and bf16 are both enabled")
        return self


@pytest.fixture(scope="session")
def train() -> type[Train]:
    return Train


@pytest.fixture(scope="session")
def zero() -> type[Zero]:
    return Zero


@pytest.fixture
def warnings_said() -> Iterator[list[str]]:
    """What the library logged at warning level, in order."""
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler = Keep(level=logging.WARNING)
    logger = logging.getLogger("ds_config")
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)
