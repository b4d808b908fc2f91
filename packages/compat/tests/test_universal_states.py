"""Upstream's functions of one parameter in the universal layout, and the flags of its converter."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from deepspeed.checkpoint.ds_to_universal import (
    _group_per_tp_shapes,
    _merge_zero_shards,
    _validate_autotp_conversion_support,
    main,
    merge_tp_slices,
    parse_arguments,
)
from deepspeed.checkpoint.universal_checkpoint import (
    SubparamShape,
    _resolve_autotp_partition,
    enable_universal_checkpoint,
    load_hp_checkpoint_state,
)
from deepspeed.module_inject.layers import (
    SubParamLinearLayer,
    Yuan_LinearLayer,
    collect_autotp_universal_checkpoint_info,
)

from ds_ckpt.convert.part_joins import PartJoins
from ds_config.errors import CheckpointError, UnsupportedError

FULL = torch.arange(16.0).view(8, 2)
ROWS = {0: [0, 1, 4, 6], 2: [2, 3, 5, 7]}  # of queries, keys and values; rank 1 has none


def _fragments(folder, states=("fp32", "exp_avg"), halves=2):
    for rank, rows in ROWS.items():
        (folder / str(rank)).mkdir(parents=True)
        for state in states:
            for index, part in enumerate(FULL[rows].flatten().chunk(halves)):
                torch.save(part.clone(), folder / str(rank) / f"{state}.{index:02d}")
        torch.save(torch.tensor(3.0), folder / str(rank) / "step.00")


def _info(**more):
    several = dataclasses.asdict(SubparamShape(["qkv"], ((4, 2, 2), 2), 0))
    widths = {"qkv": [[2, 0, 2], [1, 0, 1], [1, 0, 1]]}
    return {
        "universal_checkpoint_version": 0.4,
        "parameter_with_sub_params": [several],
        "sub_param_shard_widths": widths,
        **more,
    }


def test_parts_of_a_parameter_are_joined_and_written(tmp_path):
    _fragments(tmp_path / "in" / "qkv")
    shapes = [torch.Size([4, 2]), torch.Size([0, 2]), torch.Size([4, 2])]
    info = _info(tp_replicated_parameter_patterns=["norm"])
    assert merge_tp_slices(info, str(tmp_path / "out"), str(tmp_path / "in"), 3, ("qkv", shapes)) == {"norm"}
    for state in ("fp32", "exp_avg"):
        written = torch.load(tmp_path / "out" / "qkv" / f"{state}.pt", weights_only=False)
        assert written["param"].equal(FULL)
        assert written["sub_param_shape"] == SubparamShape(["qkv"], ((4, 2, 2), 2), 0)
    assert sorted(path.name for path in (tmp_path / "out" / "qkv").iterdir()) == ["exp_avg.pt", "fp32.pt", "step.pt"]
    wrong = [torch.Size([4, 2])] * 3
    with pytest.raises(CheckpointError, match=r"rank 1, whose shape .* is not empty") as caught:
        _merge_zero_shards(str(tmp_path / "in" / "qkv"), "fp32", 3, wrong)
    assert isinstance(caught.value, AssertionError)
    with pytest.raises(AssertionError, match="widths of"):
        merge_tp_slices(
            _info(sub_param_shard_widths={"qkv": [[2, 2]]}),
            str(tmp_path / "o"),
            str(tmp_path / "in"),
            3,
            ("qkv", shapes),
        )
    with pytest.raises(CheckpointError, match="leaves the directory"):
        merge_tp_slices(_info(), str(tmp_path / "out"), str(tmp_path / "in"), 3, ("../up", shapes))


def test_shapes_are_grouped_by_tensor_rank():
    stages = [
        {"a": (3,), "tied": (2,)},
        {"a": (2,), "tied": (2,)},
        {"b": (1,), "tied": (2,)},
        {"b": (4,), "tied": (2,)},
    ]
    assert _group_per_tp_shapes(stages, 2, 2) == {"a": [(3,), (2,)], "tied": [(2,), (2,)], "b": [(1,), (4,)]}
    stages[2]["tied"] = (1,)
    with pytest.raises(AssertionError, match="disagree on shape: tied"):
        _group_per_tp_shapes(stages, 2, 2)


def test_what_cannot_be_said_is_a_value_error():
    _validate_autotp_conversion_support({})
    with pytest.raises(ValueError, match="interleaved") as caught:
        _validate_autotp_conversion_support({"autotp_unsupported_parameter_patterns": {"qkv": "interleaved"}})
    assert isinstance(caught.value, UnsupportedError)
    with pytest.raises(UnsupportedError, match="a single parameter"):
        load_hp_checkpoint_state(None, "zero/w", 0, 1)


class _Mapping:
    """What upstream's optimizers put on a parameter."""

    def __init__(self, start, values):
        self.lp_fragment_address = SimpleNamespace(start=start, numel=values.numel())
        self.get_hp_fragment = lambda: values


def _stored(folder, whole, **entries):
    for state, factor in (("fp32", 1), ("exp_avg", 2)):
        torch.save({"param": whole * factor, **entries}, folder / f"{state}.pt")
    torch.save(torch.tensor(7.0), folder / "step.pt")


@pytest.mark.parametrize(
    ("told", "entries", "shape", "rows"),
    [
        ({"partition_dim": 0, "logical_shape": (7, 2), "partition_sizes": (3, 4)}, {}, (4, 2), [3, 4, 5, 6]),
        ({"partition_dim": 0, "logical_shape": (7, 2), "sub_param_sizes": (4, 3), "universal_checkpoint_version": 0.4,
          "sub_param_shard_widths": [[1, 3], [2, 1]]}, {}, (4, 2), [1, 2, 3, 6]),
        ({"replicated": True}, {}, (7, 2), [0, 1, 2, 3, 4, 5, 6]),
        (None, {"vocab_tensor": True}, (4, 2), [4, 5, 6, None]),
        (None, {}, (7, 2), [0, 1, 2, 3, 4, 5, 6]),
    ],
)  # fmt: skip
def test_a_parameter_loads_its_fragment(tmp_path, told, entries, shape, rows):
    whole = torch.arange(14.0).view(7, 2)
    expected = torch.cat([whole.new_zeros(1, 2) if row is None else whole[row : row + 1] for row in rows]).flatten()
    param = torch.nn.Parameter(torch.zeros(shape))
    fragment = torch.zeros(expected.numel() - 3)
    param._hp_mapping = _Mapping(3, fragment)
    param.ds_autotp_universal_checkpoint_meta = told
    enable_universal_checkpoint([param])
    _stored(tmp_path, whole, **entries)
    assert param.load_hp_checkpoint_state(str(tmp_path), 1, 2) == 7.0
    assert torch.equal(fragment, expected[3:])
    assert torch.equal(param._hp_mapping.optim_fragment["exp_avg"], 2 * expected[3:])


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"partition_dim": 0, "logical_shape": (7, 2)}, "records no partition_sizes"),
        ({"partition_dim": 0, "logical_shape": (7, 2), "sub_param_sizes": (4, 3)}, "records no sub_param_shard_widths"),
        ({"partition_dim": 0, "logical_shape": (7, 2), "sub_param_sizes": (4, 3), "universal_checkpoint_version": 0.4,
          "sub_param_shard_widths": [[1, 3], [1, 1]]}, "parts of"),
        ({"replicated": True}, "begins at 12"),
    ],
)  # fmt: skip
def test_a_parameter_that_does_not_fit_is_refused(tmp_path, told, message):
    param = torch.nn.Parameter(torch.zeros(4, 2))
    param._hp_mapping = _Mapping(12, torch.zeros(8))
    param.ds_autotp_universal_checkpoint_meta = told
    _stored(tmp_path, torch.arange(14.0).view(7, 2))
    with pytest.raises(AssertionError, match=message):
        load_hp_checkpoint_state(param, str(tmp_path), 0, 2)
    param.ds_autotp_universal_checkpoint_meta = {"conversion": {"unsupported_reason": "blocks are interleaved"}}
    with pytest.raises(RuntimeError, match="interleaved"):
        load_hp_checkpoint_state(param, str(tmp_path), 0, 2)


def _two_ranks(folder, info, dim):
    folder.mkdir()
    for rank, part in enumerate(FULL.chunk(2, dim)):
        states = {"param_shapes": [{"w": part.shape}], "module": {"w": part.clone()}, "universal_checkpoint_info": info}
        torch.save(states, folder / f"mp_rank_{rank:02d}_model_states.pt")
        inner = {"state": {0: {"exp_avg": part.flatten()}}, "param_groups": [{"lr": 1.0, "params": [0]}]}
        outer = {
            "base_optimizer_state": inner,
            "single_partition_of_fp32_groups": [part.flatten()],
            "partition_count": [1],
        }
        torch.save({"optimizer_state_dict": outer}, folder / f"zero_pp_rank_0_mp_rank_{rank:02d}_optim_states.pt")


@pytest.mark.parametrize("info", [None, {"universal_checkpoint_version": 0.4}])
def test_state_is_injected_where_a_checkpoint_says_nothing(tmp_path, info):
    _two_ranks(tmp_path / "in", info, 0)
    words = ["--input_folder", str(tmp_path / "in"), "--output_folder", str(tmp_path / "u")]
    with pytest.raises(UnsupportedError, match="no universal_checkpoint_info"):
        main(parse_arguments(words))
    main(parse_arguments([*words, "--inject_missing_state", "--num_extract_workers", "1"]))
    assert torch.load(tmp_path / "u" / "zero" / "w" / "fp32.pt")["param"].equal(FULL)


def test_injection_does_not_take_the_place_of_what_is_there(tmp_path):
    info = {"universal_checkpoint_version": 0.4, "parameter_with_row_parallelism_patterns": ["w", "other"]}
    _two_ranks(tmp_path / "in", info, 1)
    words = ["--input_folder", str(tmp_path / "in"), "--output_folder", str(tmp_path / "u"), "--inject_missing_state"]
    with pytest.raises(CheckpointError, match="fit no parameter: other"):
        main(parse_arguments(words))
    main(parse_arguments([*words, "--no_strict"]))
    assert torch.load(tmp_path / "u" / "zero" / "w" / "fp32.pt")["param"].equal(FULL)


def test_parts_of_a_fused_layer_join_in_the_order_of_the_whole():
    whole, bias = torch.arange(24.0).view(12, 2), torch.arange(12.0)
    parts, biases = [], []
    for rank in range(2):
        model = torch.nn.Module()
        model.qkv = layer = SubParamLinearLayer(torch.nn.Linear(2, 12), shape=((6, 3, 3), -1), name="qkv")
        layer.weight.data, layer.bias.data = whole.clone(), bias.clone()
        layer.tp_world_size, layer.tp_index = 2, rank
        assert layer._freeze_partition_sizes(12) == (7, 5)
        layer._tp_partition([layer.weight, layer.bias])
        layer._mark_uc_metadata()
        parts.append(layer.weight.data)
        biases.append(layer.bias.data)
        assert torch.equal(_resolve_autotp_partition(layer.weight, {}, whole, rank, 2), parts[rank].flatten())
    joins = PartJoins(collect_autotp_universal_checkpoint_info(model), 2)
    assert torch.equal(joins.join("qkv.weight", parts), whole)
    assert torch.equal(joins.join("qkv.bias", biases), bias)


def test_a_layer_whose_parts_cannot_be_joined_says_so():
    model = torch.nn.Module()
    model.proj = Yuan_LinearLayer(torch.nn.Linear(4, 4), name="proj")
    with pytest.raises(UnsupportedError, match="noncontiguous"):
        PartJoins(collect_autotp_universal_checkpoint_info(model), 2)
    with pytest.raises(UnsupportedError, match="noncontiguous"):
        model.proj.gather_params([model.proj.weight])
