"""Every key of `compression_training` and `quantize_training` changes what is done to a model, or is refused or told by its name."""

from __future__ import annotations

import copy
import logging
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_compress import compression_scheduler, init_compression, student_initialization
from ds_compress.compress import layers_of
from ds_compress.config import CompressionConfig, EigenvalueConfig, QuantizeTrainingConfig, compression_of
from ds_compress.eigenvalues import Curvature
from ds_compress.recipe import make_recipe
from ds_config import dotted, keys
from ds_config.errors import ConfigError, UnsupportedError

spec = spec_from_file_location("compress_models", Path(__file__).parent / "conftest.py")
models = module_from_spec(spec)
spec.loader.exec_module(models)


def group(params: dict[str, Any], *modules: str, related: Any = None) -> dict[str, Any]:
    return {"one": {"params": params, "modules": list(modules), **({"related_modules": related} if related else {})}}


def on(**shared: Any) -> dict[str, Any]:
    return {"enabled": True, "schedule_offset": 1, **shared}


BASE: dict[str, Any] = {
    "compression_training": {
        "weight_quantization": {
            "shared_parameters": on(fp16_mixed_quantize={"enabled": True, "quantize_change_ratio": 0.1}),
            "different_groups": group({"start_bits": 8, "target_bits": 4, "quantization_period": 2}, "up")},
        "activation_quantization": {"shared_parameters": on(), "different_groups": group({"bits": 8}, "up")},
        "sparse_pruning": {
            "shared_parameters": on(method="snip_momentum", schedule_offset_end=4),
            "different_groups": group({"dense_ratio": 0.5}, "up")},
        "row_pruning": {
            "shared_parameters": on(), "different_groups": group({"dense_ratio": 0.5}, "up", related=[["down"]])},
        "head_pruning": {
            "shared_parameters": on(num_heads=4),
            "different_groups": group({"dense_ratio": 0.5}, r"attention\.output", related=[["query"]])},
        "channel_pruning": {
            "shared_parameters": on(), "different_groups": group({"dense_ratio": 0.5}, "first", related=[["norm"]])},
        "layer_reduction": {
            "enabled": True, "keep_number_layer": 1, "module_name_prefix": "text.blocks", "teacher_layer": [1],
            "other_module_name": ["text.embed"]},
    },
    "quantize_training": {
        "enabled": True, "quantize_bits": {"start_bits": 10, "target_bits": 6},
        "fp16_mixed_quantize": {"enabled": True, "quantize_change_ratio": 0.1}},
}  # fmt: skip

# What another value of a key is, by its name or its path; numbers that are not here are one more, truths the other one.
OTHER: dict[str, Any] = {
    "quantization_type": "asymmetric", "q_type": "asymmetric", "rounding": "stochastic", "range_calibration": "static",
    "method": "topk", "dense_ratio": 0.25, "quantize_change_ratio": 0.2, "start_bits": 9, "target_bits": 5,
    "block_pattern": "2x2", "excluded_modules": ["blocks"], "modules": ["down"], "teacher_layer": [0],
    "other_module_name": ["text.head"], "module_name_prefix": "other.blocks", "num_heads": 2, "quantize_groups": 2,
    "compression_training.row_pruning.different_groups.*.modules": ["query"],
    "compression_training.row_pruning.different_groups.*.related_modules": [["key"]],
    "compression_training.head_pruning.different_groups.*.modules": ["key"],
    "compression_training.head_pruning.different_groups.*.related_modules": [["value"]],
    "compression_training.channel_pruning.different_groups.*.modules": ["second"],
    "compression_training.channel_pruning.different_groups.*.related_modules": [["last"]],
    "compression_training.channel_pruning.shared_parameters.method": "topk",
    "different_groups": {}, "quantize-algo": {"q_type": "asymmetric"}, "quantize_algo": {"q_type": "asymmetric"},
    **{f"compression_training.{name}.different_groups.*.related_modules": [["down"]]
       for name in ("weight_quantization", "activation_quantization", "sparse_pruning")},
    "compression_training.head_pruning.shared_parameters.method": "l1",
}  # fmt: skip
_UNRELATED = {
    f"compression_training.{name}.different_groups.*.related_modules"
    for name in ("weight_quantization", "activation_quantization", "sparse_pruning")
}
DEAD = {
    "compression_training.weight_quantization.shared_parameters.quantizer_kernel",
    "compression_training.weight_quantization.shared_parameters.quantize_weight_in_forward",
    "quantize_training.quantizer_kernel",
    *_UNRELATED,
}
# Where the other value of a key is no schema at all: it acts by what it needs.
FORBIDDING = {
    "compression_training.layer_reduction.keep_number_layer": "keep_number_layer = 2, and teacher_layer has 1"
}
CURVED = "quantize_training.eigenvalue"
WHOLE = [dotted(("compression_training", *key.path)) for key in keys(CompressionConfig)] + [
    dotted(("quantize_training", *key.path)) for key in keys(QuantizeTrainingConfig)
]


class Both(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.images, self.other = models.Net(1), models.Images(), models.Net(1)


class Teacher(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.other = models.Net(2), models.Net(2)


def based(path: str) -> dict[str, Any]:
    """The section in which a key acts."""
    config = copy.deepcopy(BASE)
    if path.startswith("quantize_training"):
        del config["compression_training"]
    else:
        del config["quantize_training"]
    if path.endswith("sparse_pruning.shared_parameters.dense_ratio"):  # what all layers keep, where no group says it
        config["compression_training"]["sparse_pruning"]["different_groups"] = {}
    return config


def changed(config: dict[str, Any], path: str) -> dict[str, Any]:
    config = copy.deepcopy(config)
    *above, name = path.replace("*", "one").split(".")
    inside = config
    for part in above:
        inside = inside.setdefault(part, {})
    old, wanted = inside.get(name), OTHER.get(path, OTHER.get(name))
    if wanted is None:
        default = _default(path) if old is None else old
        wanted = not default if isinstance(default, bool) else default + 1
    inside[name] = wanted
    return config


def _default(path: str) -> Any:
    return next(
        key.model.model_fields[key.field].default
        for model, top in ((CompressionConfig, "compression_training"), (QuantizeTrainingConfig, "quantize_training"))
        for key in keys(model)
        if dotted((top, *key.path)) == path
    )


def done(config: dict[str, Any]) -> Any:
    """What a configuration does: the recipe of each layer, and the values of a student."""
    model = Both()
    torch.manual_seed(0)
    teacher = Teacher()
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
    section = compression_of(config)
    if section.layer_reduction.enabled:
        student_initialization(model, teacher, section)
    values = {name: float(value.detach().double().sum()) for name, value in model.named_parameters()}
    return make_recipe(section, layers_of(model)), values


LEAVES = [
    path for path in WHOLE
    if not any(other.startswith(f"{path}.") for other in WHOLE) and not path.startswith(CURVED)
]  # fmt: skip


@pytest.mark.parametrize("path", LEAVES)
def test_a_key_acts_or_is_told_by_name(path: str, caplog: pytest.LogCaptureFixture) -> None:
    config = based(path)
    with caplog.at_level(logging.WARNING):
        before = done(config)
        assert path.rpartition(".")[2] not in caplog.text
        if path in FORBIDDING:
            with pytest.raises(ConfigError, match=FORBIDDING[path]):
                done(changed(config, path))
            return
        after = done(changed(config, path))
    if path in DEAD:
        assert path.rpartition(".")[2] in caplog.text
    else:
        assert after != before


def test_the_walk_sees_all_techniques() -> None:
    assert len(LEAVES) > 55
    assert {path.split(".")[1] for path in LEAVES if path.startswith("compression_training")} == set(
        CompressionConfig.model_fields
    )


def test_eigenvalue_is_refused_where_no_loss_is_known_and_acts_where_one_is(
    small: Any, tokens: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"quantize_training": {"enabled": True, "eigenvalue": {"enabled": True, "layer_name": "blocks"}}}
    with pytest.raises(UnsupportedError, match=r"quantize_training\.eigenvalue"):
        init_compression(small, config)
    init_compression(small, {"quantize_training": {"enabled": True}})
    base = {"enabled": True, "layer_name": "blocks", "max_iter": 3, "tol": 1e-9}

    def found(**more: Any) -> tuple[int, dict[str, float]]:
        curvature, asked = Curvature(small, EigenvalueConfig(**{**base, **more})), []
        for _ in range(2):
            curvature.step(lambda: asked.append(1) or small(tokens).square().mean())  # type: ignore[func-returns-value]
        return len(asked), dict(curvature.last)

    first = found()
    assert first[0] == 2
    assert len(first[1]) == 2
    assert found(gas_boundary_resolution=2)[0] == 1
    assert found(layer_num=1)[1].keys() == {"blocks.0"}
    assert found(max_iter=50)[1] != first[1]
    assert found(max_iter=50, tol=0.9)[1] != found(max_iter=50)[1]
    assert found(stability=10.0)[1] != first[1]
    assert compression_scheduler(small).training_steps == 0
    with caplog.at_level(logging.INFO, "ds_compress"):
        found(verbose=True)
    assert "largest eigenvalue of blocks.0" in caplog.text
