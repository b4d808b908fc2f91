"""Owners of a DeepSpeed checkpoint's files, from their names alone."""

from pathlib import Path

import pytest

from ds_ckpt.convert.rank_files import RankFiles
from ds_config.errors import CheckpointError


def _files(*names):
    return RankFiles.among(map(Path, names))


def _names(paths):
    return [path.name for path in paths]


def test_data_ranks_are_in_order_of_their_numbers_within_each_model_parallel_rank():
    names = [f"bf16_zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt" for dp in (10, 2, 0) for mp in (1, 0)]
    files = _files(*names, "mp_rank_01_model_states.pt", "mp_rank_00_model_states.pt", "zero_to_fp32.py")
    assert sorted(files.models) == sorted(files.optims) == [0, 1]
    assert _names(files.optims[1]) == [f"bf16_zero_pp_rank_{dp}_mp_rank_01_optim_states.pt" for dp in (0, 2, 10)]


@pytest.mark.parametrize(
    ("layers", "states", "degree"),
    [
        ((), [{"param_shapes": [{"a": 1}]}], 1),
        ((), [{"checkpoint_parallel_dimensions": {"tp_degree": 2}}, {}], 2),
        ((), [{"param_shapes": [{"a": 1}]}, {"param_shapes": [{"a": 1}]}], 2),  # one name on two ranks: cut
        ((), [{"param_shapes": [{"0.a": 1}]}, {"param_shapes": [{"1.a": 1}]}], 1),  # stages
        ((), [{"param_shapes": [{"tied_modules.e.w": 1}]}] * 2, 1),  # whole on each stage
        (("layer_00-model_00-model_states.pt",), [{"param_shapes": [{"a": 1}]}] * 2, 1),
        (("layer_00-model_00-model_states.pt", "layer_00-model_01-model_states.pt"), [{}] * 4, 2),
    ],
)
def test_the_degree_is_what_files_say_or_what_their_names_show(layers, states, degree):
    models = [f"mp_rank_{mp:02d}_model_states.pt" for mp in range(len(states))]
    assert _files(*models, *layers).degree(dict(enumerate(states))) == degree


def test_ranks_that_the_degree_does_not_divide_are_refused():
    with pytest.raises(CheckpointError, match="of 2 tensor-parallel ranks, and has files of 3 model-parallel"):
        _files().degree({mp: {"checkpoint_parallel_dimensions": {"tp_degree": 2}} for mp in range(3)})


def test_a_tensor_rank_has_every_nth_model_file_and_its_parts_of_the_layers():
    layers = [f"layer_{n:02d}-model_{tp:02d}-model_states.pt" for n in (2, 11) for tp in (0, 1)]
    files = _files(*layers, *[f"mp_rank_{mp:02d}_model_states.pt" for mp in range(4)])
    assert files.stages_of(1, 2) == [1, 3]
    assert [(before, path.name) for before, path in files.parts_of(1, 2)] == [("2.", layers[1]), ("11.", layers[3])]


def test_experts_are_every_ranks_and_carry_whole_names():
    expert = "layer_0_expert_3_mp_rank_00_model_states.pt"
    files = _files(expert, "layer_04-model_states.pt", "mp_rank_00_model_states.pt")
    assert [(before, path.name) for before, path in files.parts_of(0, 1)] == [
        ("4.", "layer_04-model_states.pt"),
        ("", expert),
    ]
