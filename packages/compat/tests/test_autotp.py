"""Rules of tensor parallelism as objects; a model's own plan; which part of ALiBi a rank takes."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from deepspeed.module_inject import auto_tp_model_utils as alibi
from deepspeed.module_inject.autotp_config import AutoTPConfig, PartitionType, TPLayerSpec, merge_autotp_configs
from deepspeed.module_inject.layers import fused_LinearLayer
from deepspeed.module_inject.tp_plan_converter import TPPlanConverter
from deepspeed.runtime.tensor_parallel.config import _get_hf_tp_plan, get_tensor_parallel_config
from torch import nn


def test_a_plan_becomes_rules():
    rules = TPPlanConverter.convert(
        {"layers.*.q_proj": "colwise", "layers.*.o_proj": "rowwise", "lm_head": "colwise_rep"}
    )
    assert [(rule.partition_type, rule.gather_output) for rule in rules] == [
        (PartitionType.COLUMN, False), (PartitionType.ROW, False), (PartitionType.COLUMN, True),
    ]  # fmt: skip
    assert re.match(rules[0].patterns[0], "model.layers.11.q_proj.weight")
    assert not re.match(rules[0].patterns[0], "model.layers.11.k_proj.weight")
    whole = TPPlanConverter.convert({"norm": "replicated_with_grad_allreduce", "gate": "replicated"})
    assert [(rule.partition_type, rule.grad_allreduce) for rule in whole] == [
        (PartitionType.SKIP, True), (PartitionType.SKIP, False),
    ]  # fmt: skip
    assert TPPlanConverter.convert({}) is None
    with pytest.raises(ValueError, match="rowwise_split_input"):  # no rule can say it
        TPPlanConverter.convert({"layers.*.o_proj": "rowwise_split_input"})
    with pytest.raises(ValueError, match=r"unsupported partition style.*local_colwise"):
        TPPlanConverter.convert({"layers.*.q_proj": "local_colwise"})


def test_a_models_plan_is_what_configuration_class_and_model_say():
    class Model:
        _tp_plan = {"lm_head": "colwise_rep"}  # noqa: RUF012  as transformers writes it

        def __init__(self, **said):
            self.config = SimpleNamespace(base_model_tp_plan={"layers.*.q": "colwise"})
            vars(self).update(said)

    own = {"model.layers.*.q": "rowwise", "extra": "rowwise"}
    assert _get_hf_tp_plan(Model(_tp_plan=own)) == {
        "layers.*.q": "colwise",
        "lm_head": "colwise_rep",
        "extra": "rowwise",
    }
    assert _get_hf_tp_plan(nn.Linear(2, 2)) is None


def test_rules_are_read_and_tried_in_order():
    config = AutoTPConfig.from_dict(
        {
            "layer_specs": [
                {"patterns": [r".*\.a\.weight$"], "partition_type": "skip", "model_types": ["Llama"]},
                {"patterns": [r".*\.a\.weight$"], "partition_type": "row", "shape": [-1, [2, 4]]},
            ]
        }
    )
    assert config.find_matching_spec("x.a.weight", "llama").partition_type is PartitionType.SKIP
    assert config.find_matching_spec("x.a.weight").shape == (-1, (2, 4))
    assert config.find_matching_spec("x.b.weight") is None
    both = merge_autotp_configs(config, AutoTPConfig(tp_size=2, layer_specs=[TPLayerSpec([".*"])]))
    assert (both.tp_size, len(both.layer_specs), both.layer_specs[0].patterns) == (2, 3, [".*"])
    with pytest.raises(ValueError, match="nested tuple only allowed at partition_dim"):
        TPLayerSpec([".*"], shape=(2, (1, 1)))
    assert get_tensor_parallel_config({"tensor_parallel": {"autotp_size": 4}}).degree == 4


def test_a_fused_weight_that_is_laid_out_otherwise_is_refused():
    class CodeGenBlock(nn.Module):
        pass

    layer = fused_LinearLayer(nn.Linear(4, 24), skip_partition=True, fused_module=CodeGenBlock())
    with pytest.raises(RuntimeError, match="interleaves or replicates blocks"):
        layer.gather_params([layer.weight])


def test_alibi_is_the_models_own():
    transformers = pytest.importorskip("transformers")
    del transformers
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    for heads in (4, 6):
        found = alibi.build_bloom_alibi_tensor(
            mask, heads, torch.float32, head_shard_sizes=[heads], total_num_heads=heads
        )
        torch.testing.assert_close(found, build_alibi_tensor(mask, heads, torch.float32))


def test_a_method_that_makes_something_for_all_heads():
    class Model(nn.Module):
        def build_mpt_alibi_tensor(self, heads, length):
            return torch.arange(heads).view(-1, 1, 1).expand(heads, 1, length)

    one, other = Model(), Model()
    alibi.install_head_sharded_helper(one, "build_mpt_alibi_tensor", alibi.build_mpt_alibi_tensor, num_heads=6)
    assert one.build_mpt_alibi_tensor(1, 3).shape == (6, 1, 3)
    assert other.build_mpt_alibi_tensor(2, 3).shape == (2, 1, 3)
