"""Where models are cut, and what is refused before anything is built."""

import itertools
import random
import time

import pytest
import torch
from torch import nn

from ds_config.errors import CommError, DsError, PlanError, UnsupportedError
from ds_pipe import (
    LayerSpec,
    PipelineModule,
    PipeModelDataParallelTopology,
    ProcessTopology,
    TiedLayerSpec,
    pipeline,
    profile_layers,
)
from ds_pipe.partition import balanced, matching, uniform
from ds_pipe.stage_link import StageLink, ValueStructure, describe


@pytest.mark.parametrize("seed", range(60))
def test_balanced_has_the_lightest_heaviest_part(seed: int) -> None:
    rng = random.Random(seed)
    weights = [rng.choice([0.0, 1.0, rng.uniform(0, 10)]) for _ in range(rng.randint(1, 14))]
    parts = rng.randint(1, len(weights))
    bounds = balanced(weights, parts)
    assert bounds[0] == 0
    assert bounds[-1] == len(weights)
    assert all(a < b for a, b in itertools.pairwise(bounds))
    heaviest = max(sum(weights[a:b]) for a, b in itertools.pairwise(bounds))

    def least(start: int, left: int) -> float:  # by trying every first cut
        if left == 1:
            return sum(weights[start:])
        ends = range(start + 1, len(weights) - left + 2)
        return min(max(sum(weights[start:end]), least(end, left - 1)) for end in ends)

    if len(weights) <= 8:
        assert heaviest == pytest.approx(least(0, parts))


def test_uniform_differs_by_one_layer_at_most() -> None:
    for layers in range(1, 40):
        for parts in range(1, layers + 1):
            sizes = [b - a for a, b in itertools.pairwise(uniform(layers, parts))]
            assert sum(sizes) == layers
            assert max(sizes) - min(sizes) <= 1


def test_patterns_match_class_names() -> None:
    assert matching(["Embedding", "Block", "GPTBlock", "Linear"], "block") == [0, 1, 1, 0]
    for pattern in ("transformer", "("):
        with pytest.raises(PlanError) as caught:
            matching(["Linear"], pattern)
        assert caught.value.code == "pipe-partition"


def refused(code: str, **options: object) -> DsError:
    options = {"layers": [nn.Linear(2, 2), nn.Linear(2, 2)], "num_stages": 1, "loss_fn": None} | options
    with pytest.raises(DsError) as caught:
        PipelineModule(**options)  # type: ignore[arg-type]
    assert caught.value.code == code
    return caught.value


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    assert "2 layers cannot be cut into 3" not in str(refused("pipe-topology", num_stages=3))
    refused("pipe-topology", num_stages=None)
    refused("pipe-topology", topology=ProcessTopology(("data",), (1,)))
    refused("pipe-topology", topology=PipeModelDataParallelTopology(2, 1, 1))
    assert "1 layers cannot be cut into 2" in str(refused("pipe-layers", layers=[nn.Linear(2, 2)], schedule="zbv"))
    refused("pipe-partition", partition_method="best")
    assert "Linear" in str(refused("pipe-partition", partition_method="type:attention"))
    assert "int" in str(refused("pipe-layer", layers=[3]))
    tied = TiedLayerSpec("a", nn.Linear, 2, 2, tied_weight_attr="table")
    assert "tied_modules.a.table" in str(refused("pipe-tied", layers=[tied, nn.Linear(2, 2), tied]))
    with pytest.raises(PlanError):
        LayerSpec(torch.relu)  # type: ignore[arg-type]


def test_layers_without_weights_stay_with_the_part_before_them() -> None:
    """An activation that works in place must not be a stage's first layer, where its input is a leaf."""
    assert balanced([0, 3136, 0, 0, 4160, 0, 0, 650], 2) == (0, 4, 8)
    assert balanced([5, 0, 5, 0, 5, 0], 3) == (0, 2, 4, 6)


def test_profiled_layers_are_balanced_by_time() -> None:
    class Slow(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.1)
            return super().forward(x)

    state = torch.get_rng_state()
    layers = [LayerSpec(Slow, 2, 2), *(LayerSpec(nn.Linear, 2, 2) for _ in range(5)), LayerSpec(Slow, 2, 2)]
    seconds = profile_layers(layers, torch.zeros(1, 2))
    assert min(seconds[0], seconds[-1]) >= 0.1 > max(seconds[1:-1])
    assert torch.equal(torch.get_rng_state(), state)
    model = PipelineModule(layers, num_stages=1, partition_method="profile", sample=torch.zeros(1, 2), schedule="zbv")
    assert 0 < model.partitions()[1] < 7
    assert "sample" in str(refused("pipe-partition", partition_method="profile"))


def test_a_schedule_that_needs_another_cut_is_refused() -> None:
    model = PipelineModule([nn.Linear(2, 2), nn.Linear(2, 2)], num_stages=1)
    with pytest.raises(PlanError) as caught:
        pipeline(model, 2, "zbv")
    assert caught.value.code == "pipe-schedule"


def test_batches_that_are_no_pairs_or_end_early_are_refused() -> None:
    step = pipeline(PipelineModule([nn.Linear(2, 2)], num_stages=1, loss_fn=nn.functional.mse_loss), 2)
    one = torch.zeros(1, 2)
    for data, code in (
        ([one, one], "pipe-batch"),
        ([(one, one, one)] * 2, "pipe-batch"),
        (iter([(one, one)]), "pipe-data"),
    ):
        with pytest.raises(PlanError) as caught:
            step(data)
        assert caught.value.code == code
    assert step([(one, one)] * 3).item() >= 0  # and it goes on


def test_what_cannot_travel_is_named() -> None:
    with pytest.raises(UnsupportedError) as caught:
        describe({"x": torch.zeros(2), "rest": [1, object()]}, "stage 0 -> 1")
    assert caught.value.code == "pipe-unsupported-value"
    assert "['rest'][1] is a object" in caught.value.message


class Mute:
    """Channels to a peer that sends what the test says."""

    group = None

    def __init__(self, *messages: list[torch.Tensor]) -> None:
        self.messages = list(messages)

    def sender(self, peer: int, number: int, unit: str) -> object:
        return self

    receiver = sender

    def recv(self) -> list[torch.Tensor]:
        return self.messages.pop(0)


def test_messages_of_another_program_are_refused() -> None:
    unknown = torch.tensor([3, *[0] * 7], dtype=torch.uint8)
    one, two = torch.zeros(2, requires_grad=True), torch.zeros(3, requires_grad=True)
    signature, _ = describe((one, two), "here")
    upper = StageLink(Mute([unknown]), 0, 0, below=False)  # type: ignore[arg-type]
    lower = StageLink(Mute([torch.zeros(2)]), 1, 0, below=True)  # type: ignore[arg-type]
    for receive, said in (
        (upper.receive, "signature 3 of 0"),
        (lambda: lower.receive_gradients(signature), "1 gradients of 2"),
    ):
        with pytest.raises(CommError) as caught:
            receive()
        assert caught.value.code == "pipe-link"
        assert f"stage 0 -> 1: a message with {said}" in caught.value.message


def test_signatures_survive_their_description() -> None:
    value = {
        "x": torch.zeros(2, 3, requires_grad=True),
        "rest": (None, True, 2, 0.5, "a", [torch.ones(1, dtype=torch.bool)]),
    }
    signature, tensors = describe(value, "here")
    assert ValueStructure.decoded(signature.encoded()) == signature
    assert [t.shape for t in tensors] == [(2, 3), (1,)]
    assert signature.gradients == 1


def test_ranks_are_numbered_as_topologies_say() -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert topology.get_axis_names() == ["pipe", "data", "model"]
    assert topology.get_rank(pipe=1, data=0, model=1) == 5
    assert topology.get_coord(5).pipe == 1
    assert topology.get_dim("model") == 2
    assert topology.get_dim("sequence") == 0
    assert topology.get_rank_repr(5) == "model_01"
    assert topology.get_rank_repr(5, omit_axes=["data"]) == "pipe_01-model_01"
    assert topology.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.get_axis_comm_lists("sequence") == []
    assert topology.filter_match(pipe=0, data=1) == [2, 3]
    assert topology.get_axis_list("data", 0) == [0, 1, 4, 5]
    assert topology.world_size() == 8


def test_names_do_not_depend_on_stages() -> None:
    model = PipelineModule([LayerSpec(nn.Linear, 2, 3), torch.relu, LayerSpec(nn.Linear, 3, 2)], num_stages=1)
    assert list(model.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert model.partitions() == (0, 3)
    assert model.stage_owner(2) == 0
    assert model(torch.ones(1, 2)).shape == (1, 2)
