"""The whole schema: every key of the reference is known here, and no key that is accepted is inert."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_origin

import pytest
from pydantic import SecretStr
from torch import nn
from typos import check_typos

import ds_ckpt.config
import ds_monitor.config
from ds_config import Key, dotted, keys, saying
from ds_config.errors import DsError
from ds_config.schema_fields import Deprecated, NoEffect, Unsupported
from ds_config.shape import aliases, literals, of_field, options, retired
from ds_engine import Config, load_config, make_plan, shapes_of
from ds_engine.lr_schedules import LRScheduler, Schedule
from ds_engine.optimizer_table import make_optimizer
from ds_pipe import PipelineSpec

REFERENCE = Path(__file__).parent / "data" / "reference_keys.txt"
OURS = {
    "kernels",
    "loss_spike_threshold",
    "on_nonfinite",
    *(
        f"optimizer.params.{key}"
        for key in (
            "foreach",
            "fused",
            "initial_accumulator_value",
            "lr_decay",
            "maximize",
            "per_head_muon",
            "clip_directions",
        )
    ),
    "optimizer.params.set_grad_none",
    "tensor_parallel.megatron_layers",
    "tensor_parallel.half_batches",
    "activation_checkpointing.modules",
    "checkpoint.layout",
    "checkpoint.saving",
    "checkpoint.saving.asynchronous",
    "checkpoint.saving.buffer_bytes",
    "checkpoint.saving.keep",
    "checkpoint.saving.incremental",
    "checkpoint.saving.codecs",
    "checkpoint.local",
    "checkpoint.local.folder",
    "checkpoint.local.root",
    "checkpoint.local.every",
    "checkpoint.local.persist_every",
    "monitor",
    "monitor.sinks",
    "monitor.sinks[0].sink",
    "monitor.sinks[0].ranks",
    "monitor.sinks[0].options",
    "monitor.peak_tflops",
}
Path_ = tuple[str | int, ...]


def reference() -> Iterator[tuple[str, str, str]]:
    """(key, class, what it moves to) of every line of the fixture."""
    section = ""
    for line in REFERENCE.read_text().splitlines():
        if line.startswith("["):
            section = f"{line[1:-1]}." if line != "[]" else ""
        elif line and not line.startswith("#"):
            kind, _, names = line.partition(": ")
            for name in names.split():
                old, _, new = name.partition(">")
                yield section + old, kind, section + new if new else ""


KNOWN: dict[str, list[Key]] = {}
for key in keys(Config):
    KNOWN.setdefault(dotted(key.path), []).append(key)


def ancestors(key: Key) -> list[Key]:
    """The keys of the sections that `key` stands in, outermost first."""
    prefixes = [dotted(key.path[:n]) for n in range(1, len(key.path))]
    return [KNOWN[prefix][0] for prefix in prefixes if prefix in KNOWN]


def reason(key: Key) -> Any:
    return retired(key.model.model_fields[key.field])


def kind_of(key: Key) -> str:
    """What becomes of a key; a section that is retired takes its keys with it."""
    for one in [*ancestors(key), key]:
        why = reason(one)
        if isinstance(why, Deprecated):
            return "deprecated"
        if isinstance(why, Unsupported | NoEffect) and not (one is not key and isinstance(reason(key), Deprecated)):
            return "unbuilt" if isinstance(why, Unsupported) else "dead"
    return "alias" if key.path[-1] != key.field else "acts"


def test_every_key_of_the_reference_is_known_and_has_its_class() -> None:
    wrong = []
    for name, kind, new in reference():
        found = {kind_of(key) for key in KNOWN.get(name, [])}
        if kind == "alias":
            owner = [key for key in KNOWN.get(name, []) if key.path[-1] in aliases(key.model.model_fields[key.field])]
            if not owner or dotted((*owner[0].path[:-1], owner[0].field)) != new:
                wrong.append(f"{name}: not an alias of {new}")
        elif kind == "deprecated":
            why = [reason(key) for key in KNOWN.get(name, [])]
            if not why or not isinstance(why[0], Deprecated) or not new.endswith(why[0].new):
                wrong.append(f"{name}: not moved to {new}")
        elif not found & ({kind, "acts"} if kind in ("unbuilt", "dead") else {kind}):
            wrong.append(f"{name}: {sorted(found) or 'unknown'}, expected {kind}")
    assert wrong == []


def test_there_are_no_keys_beside_the_reference() -> None:
    listed = {name for name, _, _ in reference()} | OURS
    techniques = ("row_pruning", "head_pruning", "channel_pruning", "sparse_pruning", "activation_quantization")
    shared = tuple(f"compression_training.{name}." for name in techniques)  # the same two models again
    more = [name for name in KNOWN if name not in listed and not name.startswith(("bfloat16.", *shared))]
    assert [
        name for name in more if not name.startswith(("compression_training.", "tensor_parallel.tensor_parallel."))
    ] == []


# --- no key is inert


class Made(list[Any]):
    """Stands for a class: notes with what it is made."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> SimpleNamespace:
        self.append((self.name, [a for a in args if a is not None], kwargs))
        return SimpleNamespace()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Made]:
    """What would be made, of classes that need files, threads or the network."""
    homes = {
        ds_monitor.config: ("TensorBoardSink", "CsvSink", "WandbSink", "CometSink", "make_sink"),
        ds_ckpt.config: ("SyncCheckpointer", "AsyncCheckpointer", "LocalCheckpointer"),
    }
    recorders = []
    for home, names in homes.items():
        for name in names:
            recorders.append(Made(name))
            monkeypatch.setattr(home, name, recorders[-1])
    return recorders


MODEL = nn.Sequential(*(nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40)) for _ in range(3)))
SHAPES = shapes_of(MODEL)


class Decoder(nn.Module):
    """Names and sizes that the rules of a family of models speak of."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type="llama", to_dict=lambda: {})
        self.embed_tokens, self.mlp, self.score = nn.Embedding(10, 8), nn.Module(), nn.Linear(8, 4)
        self.mlp.up_proj, self.mlp.down_proj = nn.Linear(8, 46), nn.Linear(46, 8)


CUTTABLE = shapes_of(Decoder())
FROZEN = replace(
    SHAPES,
    params=tuple(replace(p, name=f"some.{p.name}", group=None) if ".0." in p.name else p for p in SHAPES.params),
)
STAGED = replace(SHAPES, stages=2, staging=PipelineSpec("1f1b", 2))


def observed(document: Mapping[str, Any], made: list[Made]) -> str:
    """Everything a configuration leads to, except the configuration itself."""
    config = load_config(document)
    staged = "pipeline" in config.model_fields_set
    whole = SHAPES if config.weight_quantization is None else FROZEN
    whole = whole if config.sparse_attention is None else replace(whole, facts=None)
    plan = make_plan(config, CUTTABLE if config.tensor_parallel else STAGED if staged else whole, 2)
    seen: list[Any] = [f"{f.name}={getattr(plan, f.name)}" for f in fields(plan) if f.name != "config"]
    for recorder in made:
        recorder.clear()
    ds_monitor.config.make_sinks(config)
    ds_ckpt.config.make_engine(config.checkpoint)
    ds_ckpt.config.make_near(config.checkpoint)
    seen += [entry for recorder in made for entry in recorder]
    if config.optimizer is not None:
        optimizer = make_optimizer(config.optimizer, list(MODEL.parameters()), MODEL, plan.states)
        seen += [type(optimizer), optimizer.defaults, getattr(optimizer, "settings", None)]
        seen += [(k, v) for k, v in vars(optimizer).items() if isinstance(v, int | float | tuple)]
        seen += [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    if config.scheduler is not None and isinstance(config.scheduler.params, Schedule):
        scheduler = LRScheduler(
            config.scheduler.params, SimpleNamespace(param_groups=[{"lr": 0.5, "betas": (0.9, 0.9)}])
        )
        for _ in range(60):
            seen += [scheduler.get_lr(), scheduler.schedule.momentum(scheduler.last_batch_iteration)]
            scheduler.step()
    return "\n".join(map(str, seen))


GROWTH: dict[str, Any] = {"total_curriculum_step": 10, "difficulty_step": 8}
CYCLE = {
    "cycle_min_lr": 0.1, "cycle_max_lr": 0.4, "cycle_first_step_size": 7, "cycle_second_step_size": 9,
    "cycle_first_stair_count": 3, "decay_step_size": 5, "decay_lr_rate": 0.5,
}  # fmt: skip
FILES = {"device": "nvme", "nvme_path": "folder"}
SMALL = {"stage": 3, "reduce_bucket_size": 2000, "param_persistence_threshold": 60}
FILES_OF_DEEPSPEED = {"checkpoint": {"layout": "deepspeed"}, "zero_optimization": {"stage": 1}}
BASES: dict[str, Mapping[str, Any]] = {
    "zero_optimization.round_robin_gradients": FILES_OF_DEEPSPEED,
    "zero_optimization.parameter_alignment": FILES_OF_DEEPSPEED,
    "zero_optimization.sub_group_size": FILES_OF_DEEPSPEED,
    "monitor.sinks": {"monitor": {"sinks": [{"sink": "jsonl"}]}},
    "checkpoint.local": {"checkpoint": {"local": {"folder": "node", "root": "store", "every": 10, "persist_every": 1000}}},
    "weight_quantization.quantized_initialization": {"weight_quantization": {"quantized_initialization": {"num_bits": 8}}},
    "weight_quantization.post_init_quant": {"weight_quantization": {"post_init_quant": {"some": {"num_bits": 8, "group_size": 16}}}},
    "zero_optimization.zero_quantized_gradients": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}},
    "zero_optimization.zeropp_loco_param": {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}, "bf16": {"enabled": True}},
    "aio": {"zero_optimization": {**SMALL, "offload_optimizer": FILES}},
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": {
        "zero_optimization": {**SMALL, "offload_optimizer": {"device": "cpu", "super_offload": True}}
    },
    "zero_optimization.offload_optimizer": {"zero_optimization": {**SMALL, "offload_optimizer": FILES}},
    "zero_optimization.zenflow": {"zero_optimization": {**SMALL, "zenflow": {"select_strategy": "step", "select_interval": 8, "update_interval": 4}}},
    "zero_optimization.offload_param": {"zero_optimization": {**SMALL, "offload_param": FILES}},
    "zero_optimization": {"zero_optimization": {"stage": 3, "reduce_bucket_size": 2000, "param_persistence_threshold": 60}},
    "fp16": {"fp16": {"enabled": True}},
    "bf16": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "bfloat16": {"bfloat16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "torch_autocast": {"torch_autocast": {"enabled": True}},
    "elasticity": {"elasticity": {"enabled": True, "max_train_batch_size": 90, "micro_batch_sizes": [2, 3], "min_gpus": 2,
                                  "num_gpus_per_node": 4, "ignore_non_elastic_batch_info": True}},
    "activation_checkpointing": {
        "activation_checkpointing": {"contiguous_memory_optimization": True, "number_checkpoints": 3}
    },
    "checkpoint.writer": {"checkpoint": {"writer": {"decoupled": True}}},
    "checkpoint.saving": {"checkpoint": {"saving": {"asynchronous": True}}},
    **{name: {name: {"enabled": True}} for name in (
        "tensorboard", "csv_monitor", "wandb", "comet", "comms_logger", "flops_profiler", "progressive_layer_drop",
        "hybrid_engine", "nebula", "autotuning", "weight_quantization")},
    "sparse_attention": {"sparse_attention": {"mode": "variable"}},
    "data_efficiency.data_sampling.dynamic_batching": {"data_efficiency": {"data_sampling": {
        "dynamic_batching": {"enabled": True, "max_tokens": 8}}}},
    "data_efficiency": {"data_efficiency": {
        "data_sampling": {"curriculum_learning": {"enabled": True, "curriculum_metrics": {"some": {}}}},
        "data_routing": {"random_ltd": {
            "enabled": True, "total_layer_num": 4, "random_ltd_layer_num": 1, "random_ltd_layer_id": [1],
            "random_ltd_schedule": {"min_value": 8, "max_value": 64, "schedule_config": {"require_steps": 9, "seq_per_step": 4}}}}}},
    "compile": {"compile": {"deepcompile": True}},
    "curriculum_learning": {"curriculum_learning": {"enabled": True, "min_difficulty": 8, "max_difficulty": 64, "schedule_config": GROWTH}},
    "expert_parallel": {"expert_parallel": {"enabled": True, "num_expert_groups": 4, "num_limited_groups": 2}},
    "use_data_before_expert_parallelism": {"expert_parallel": {"enabled": True}},
    "tensor_parallel.vocab_parallel_lm_head": {"tensor_parallel": {"autotp_size": 2, "partition_config": {"lm_head_patterns": ["score"]}}},
    "data_types.keep_in_fp32_modules": {"bf16": {"enabled": True}},
    "tensor_parallel": {"tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": [
        {"patterns": [r".*up_proj"], "shape": [[20, 26], -1]}]}}},
    "compression_training": {"compression_training": {
        "layer_reduction": {"enabled": True, "module_name_prefix": "0", "teacher_layer": [0]},
        **{name: {"shared_parameters": {"enabled": True, **shared}, "different_groups": {"some": {"params": params}}}
           for name, shared, params in (
               ("weight_quantization", {"fp16_mixed_quantize": {"enabled": True}}, {"start_bits": 8, "target_bits": 4}),
               ("activation_quantization", {}, {"bits": 8}), ("sparse_pruning", {}, {"dense_ratio": 0.5}),
               ("row_pruning", {}, {"dense_ratio": 0.5}), ("head_pruning", {"num_heads": 4}, {"dense_ratio": 0.5}),
               ("channel_pruning", {}, {"dense_ratio": 0.5}))}}},
    "quantize_training": {"quantize_training": {"enabled": True}},
}  # fmt: skip
TYPES = {
    "AdamParams": "Adam", "AdamSection": "Adam", "AdamWSection": "AdamW", "AdagradParams": "Adagrad", "AdagradSection": "Adagrad",
    "LionParams": "Lion", "LionSection": "Lion", "LambParams": "Lamb", "LambSection": "Lamb", "MuonParams": "Muon",
    "MuonSection": "Muon", "OneBitAdamParams": "OneBitAdam", "OneBitAdamSection": "OneBitAdam", "OneBitLambParams": "OneBitLamb",
    "OneBitLambSection": "OneBitLamb", "ZeroOneAdamParams": "ZeroOneAdam", "ZeroOneAdamSection": "ZeroOneAdam",
}  # fmt: skip
SCHEDULES: dict[str, Mapping[str, Any]] = {
    "LRRangeTest": {"lr_range_test_step_size": 7},
    "OneCycle": CYCLE,
    "WarmupLR": {"warmup_num_steps": 9},
    "WarmupDecayLR": {"warmup_num_steps": 9, "total_num_steps": 30},
    "WarmupCosineLR": {"warmup_num_steps": 9, "total_num_steps": 30},
}
VALUES: dict[str, list[Any]] = {
    "curriculum_learning.curriculum_type": ["vocabularyrarity"],
    "curriculum_learning.min_difficulty": [16],
    "curriculum_learning.max_difficulty": [128],
    "curriculum_learning.schedule_type": ["fixed_root"],
    "curriculum_learning.schedule_config": [GROWTH | {"total_curriculum_step": 20}],
    "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics": [{"other": {}}],
    "data_efficiency.data_routing.random_ltd.random_ltd_layer_id": [[2]],
    "data_efficiency.data_routing.random_ltd.random_ltd_schedule.schedule_config": [
        {"require_steps": 8, "seq_per_step": 4}
    ],
    "zero_optimization.zeropp_loco_param": [{}],
    "compression_training.sparse_pruning.shared_parameters.schedule_offset_end": [2000],
    "compression_training.sparse_pruning.shared_parameters.block_pattern": ["2x2"],
    "compression_training.layer_reduction.keep_number_layer": [1],
    "compression_training.weight_quantization.different_groups.*.params.start_bits": [6],
    "weight_quantization.post_init_quant.*.group_size": [8],
    "weight_quantization.quantized_initialization.group_size": [8],
    "weight_quantization.q_groups": [200],  # a row of 40 has a group in any case
    **{
        f"compression_training.{name}.different_groups": [{"other": {"params": params}}]
        for name, params in (
            ("weight_quantization", {"start_bits": 8, "target_bits": 4}),
            ("activation_quantization", {"bits": 8}),
            *((f"{what}_pruning", {"dense_ratio": 0.5}) for what in ("sparse", "row", "head", "channel")),
        )
    },
    **{
        f"compression_training.{name}.different_groups.*.related_modules": [[["1"]]]
        for name in (
            "weight_quantization",
            "activation_quantization",
            "sparse_pruning",
            "row_pruning",
            "head_pruning",
            "channel_pruning",
        )
    },
    "activation_checkpointing.modules": [["1"]],
    "monitor.sinks": [[{"sink": "prometheus"}]],
    "optimizer.type": ["Lion", "Adagrad", "Adam"],
    "scheduler.type": ["WarmupLR", "LRRangeTest", "StepLR"],
    "scheduler.params": [{"gamma": 0.5}],
    "optimizer.params": [{"lr": 0.7}],
    "zero_optimization.leaf_module.names": [["1"]],
    "zero_optimization.leaf_module.name_suffixes": [["2"]],
    "zero_optimization.model_persistence_threshold": [50],
    "zero_optimization.stage3_model_persistence_threshold": [50],
    "zero_optimization.overlap_comm": [False],
    "zero_optimization.cpu_offload": [True],
    "zero_optimization.offload_optimizer.pipeline_read": [False],
    "zero_optimization.offload_optimizer.pipeline_write": [False],
    "zero_optimization.cpu_offload_param": [True],
    "comms_logger.prof_ops": [["all_reduce"]],
    "elasticity.micro_batch_sizes": [[1, 5]],
    "elasticity.min_gpus": [3],
    "elasticity.max_gpus": [1],
    "elasticity.model_parallel_size": [3],
    "elasticity.num_gpus_per_node": [3],
    "elasticity.version": [0.1],
    "elasticity.prefer_larger_batch": [False],
    "elasticity.ignore_non_elastic_batch_info": [False],
    "data_types.param_dtype": ["bf16"],
    "pipeline.stages": [4],
    "checkpoint.saving.codecs": [{"optim/": "bf16"}],
    "checkpoint.local.every": [20],
    "checkpoint.local.persist_every": [500],
    "tensor_parallel.partition_config.layer_specs[0].patterns": [[".*nothing"]],
    "tensor_parallel.partition_config.layer_specs[0].shape": [[2, -1]],
    "tensor_parallel.partition_config.lm_head_patterns": [["score"]],
}


def put(document: dict[str, Any], path: Path_, value: Any) -> dict[str, Any]:
    """A copy of `document` with `value` at `path`; `*` is a name, 0 the first of a list."""
    new = copy.deepcopy(document)
    place: Any = new
    for part, following in zip(path, [*path[1:], None], strict=True):
        name: Any = "some" if part == "*" else part
        if following is None:
            place[name] = value
            break
        if isinstance(place, list):
            if not place:
                place.append({})
            place = place[0]
        else:
            place = place.setdefault(name, [] if following == 0 else {})
            if place is None:
                break
    return new


def base_for(key: Key) -> dict[str, Any]:
    document: dict[str, Any] = {"train_batch_size": 12, "gradient_accumulation_steps": 3}
    if key.path[0] == "optimizer":
        kind = TYPES.get(key.model.__name__, "SGD")
        params = {"lr": 0.1} if kind == "SGD" else {}
        return {**document, "optimizer": {"type": kind, "params": params}}
    if key.path[0] == "scheduler":
        name = key.model.__name__.removesuffix("Section")
        kind = name if name in SCHEDULES else "LambdaLR" if name != "TorchScheduler" else "StepLR"
        params = dict(SCHEDULES.get(kind, {"step_size": 3}))
        return {**document, "scheduler": {"type": kind, "params": params}}
    name = dotted(key.path)
    for prefix, base in BASES.items():
        if name == prefix or name.startswith((f"{prefix}.", f"{prefix}[")):
            return {**document, **copy.deepcopy(dict(base))}
    return document


def candidates(key: Key, current: Any) -> Iterator[Any]:
    """Values that are not the default, nearest first."""
    yield from VALUES.get(dotted(key.path), ())
    field = key.model.model_fields[key.field]
    default = current if current is not None else field.get_default(call_default_factory=True)
    found = of_field(field)
    yield from (*(value for value in literals(found) if value != default), *literals(found))
    for option in found:
        kind = get_origin(option.type) or option.type
        if kind is bool:
            yield from (not default, default)
        elif kind is int:
            number = default if isinstance(default, int) else 0
            yield from (number + 1, 2 * number + 3, max(number // 2, 1), number - 1)
        elif kind is float:
            number = default if isinstance(default, int | float) else 0.0
            yield from (number / 2 + 0.03, number / 2, number + 1.5)
        elif kind in (str, SecretStr):
            yield "other"
        elif kind is tuple:
            members = get_args(option.type)
            if len(members) == 2 and members[1] is not Ellipsis:
                yield [0.7, 0.75]
            else:
                inner = [o.type for o in options(members[0])] if members else [str]
                named = literals(options(members[0])) if members else []
                yield named[:1] or ([3] if int in inner else [0.25] if float in inner else ["other"])
            yield []
        elif kind is type(None):
            yield 1
        elif kind in (Mapping, dict, Any):
            yield from ({"enabled": True}, {})


class Stderr:
    """What a script that configures no logging would read, since the last look."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._patch = capsys, monkeypatch
        self.look()

    def look(self) -> str:
        for name in ("ds_config", "ds_zero"):  # pytest listens there and at the root
            self._patch.setattr(logging.getLogger(name), "propagate", False)
            self._patch.setattr(logging.getLogger(name), "handlers", [saying._LAST_RESORT])
        self._patch.setattr(saying._LAST_RESORT, "_once", saying.Once())
        return self._capsys.readouterr().err


@pytest.fixture
def stderr(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Stderr:
    return Stderr(capsys, monkeypatch)


def effect(key: Key, made: list[Made], stderr: Stderr) -> str:
    """How a key shows: "differs", "raises" or "says"; "" when nothing that was tried shows."""
    base = base_for(key)
    before = "?" if kind_of(key) == "unbuilt" else observed(base, made)
    place: Any = base
    for part in key.path:
        place = place.get(part) if isinstance(place, Mapping) else None
    for value in candidates(key, place):
        stderr.look()
        try:
            after = observed(put(base, key.path, value), made)
        except DsError as error:
            named = [str(part) for part in key.path if part not in ("*", 0)]
            only_null = all(option.type is type(None) for option in of_field(key.model.model_fields[key.field]))
            meant = only_null or error.code not in ("config-value", "config-invalid")  # otherwise the value was no good
            if meant and any(name in str(error) for name in named):
                return "raises"
            continue
        names = {str(part) for part in key.path if kind_of(key) == "dead"} | {str(key.path[-1]), key.field}
        said = stderr.look()
        if any(name in said for name in names):
            return "says"
        if after != before and kind_of(key) in ("acts", "alias"):
            return "differs"
    return ""


FLAGS = [key for entries in KNOWN.values() for key in {k.model: k for k in entries}.values()]


@pytest.mark.parametrize("section", sorted({str(key.path[0]) for key in FLAGS}))
def test_no_key_is_inert(section: str, made: list[Made], stderr: Stderr) -> None:
    """Every key of the schema, enumerated: another value is seen in the plan or in what is made, raises, or is told of."""
    expected = {"acts": ("differs", "raises"), "alias": ("differs", "raises", "says"), "unbuilt": ("raises",),
                "dead": ("says",), "deprecated": ("says", "raises")}  # fmt: skip
    inert = []
    for key in FLAGS:
        if key.path[0] != section:
            continue
        field = key.model.model_fields[key.field]
        if any(hasattr(o.type, "model_fields") for o in of_field(field)):
            continue  # a section: its keys are in the list
        found = effect(key, made, stderr)
        if found not in expected[kind_of(key)]:
            inert.append(f"{dotted(key.path)} ({key.model.__name__}): {kind_of(key)}, but {found or 'nothing'}")
    assert inert == []


def test_typos_are_refused_and_explained() -> None:
    report = check_typos(Config, samples=200)
    assert report.rejected == report.total == 200
    assert report.suggested >= 180, report.missed
