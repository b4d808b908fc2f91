"""A client of upstream's pipeline runs as it is written for upstream."""

import contextlib
import io
import itertools
import re

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineError
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology
from deepspeed.utils import groups
from torch import nn

from ds_comm import as_group
from ds_comm.differentiable import copy, reduce
from ds_config.errors import CheckpointError, UnsupportedError
from ds_testing import world

CONFIG = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 3e-2}},
    "zero_optimization": {"stage": 1},
    "pipeline": {"activation_checkpoint_interval": 1},
    "steps_per_print": 1000,
}


def layers():
    return [
        LayerSpec(nn.Linear, 6, 12),
        torch.tanh,
        LayerSpec(nn.Linear, 12, 12),
        nn.ReLU(),
        LayerSpec(nn.Linear, 12, 1),
    ]


def batches():
    generator = torch.Generator().manual_seed(0)
    xs = torch.randn(8, 2, 6, generator=generator)
    return itertools.cycle([(x, x.sum(1, keepdim=True)) for x in xs])


@world(2)
def test_data_that_end_end_a_loop_on_both_ends_of_a_pipeline():
    """Upstream's last stage waits for the first for ever. What ended between two steps goes on with other data."""
    net = PipelineModule(layers(), num_stages=2, loss_fn=nn.MSELoss())
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=CONFIG)
    for epoch in (1, 2):
        data = itertools.islice(batches(), 16)
        for _ in range(2):
            engine.train_batch(data)
        with pytest.raises(StopIteration, match="the data ended before microbatch 0"):
            engine.train_batch(data)
        assert engine.global_steps == 2 * epoch
    with pytest.raises(StopIteration):
        engine.eval_batch(iter(()))
    assert float(engine.eval_batch(batches())) > 0
    engine.close()


@world(1)
def test_a_cut_that_cannot_be_is_what_upstream_raises_too():
    for wrong in ({"num_stages": 3}, {}, {"num_stages": 1, "partition_method": "type:Nothing"}):
        with pytest.raises(RuntimeError):
            PipelineModule(layers(), **wrong)


@world(2, backend=None)
def test_train_and_evaluate():
    deepspeed.init_distributed("gloo")
    net = PipelineModule(
        layers=layers(),
        topology=PipeDataParallelTopology(num_pp=2, num_dp=1),
        loss_fn=nn.MSELoss(),
        partition_method="parameters",
        activation_checkpoint_interval=1,
        activation_checkpoint_func=deepspeed.checkpointing.checkpoint,
    )
    has = [isinstance(layer, nn.Module) and any(True for _ in layer.parameters()) for layer in net.forward_funcs]
    assert net.is_checkpointable_results == has
    net.set_checkpoint_interval(0)
    assert net.is_checkpointable_results == []
    net.set_checkpoint_interval(1)
    engine, optimizer, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=CONFIG)
    assert isinstance(engine, PipelineEngine)
    assert engine.gradient_accumulation_steps() == engine._config.gradient_accumulation_steps == 8
    assert engine.is_first_stage() != engine.is_last_stage()
    assert engine.mpu is engine.grid
    assert set(engine.module_state_dict()) == {name for name, _ in net.named_parameters()}  # on every rank
    assert (groups._get_data_parallel_world_size(), groups._get_model_parallel_world_size()) == (1, 2)
    assert (engine.micro_batches, engine.micro_batch_size) == (8, 2)
    assert (engine.is_pipe_parallel, engine.is_data_parallel, engine.is_model_parallel) == (True, False, False)
    assert (engine.prev_stage, engine.next_stage) == (engine.stage_id - 1, engine.stage_id + 1)
    data = batches()
    losses = [float(engine.train_batch(data_iter=data)) for _ in range(25)]
    assert losses[-1] < losses[0] / 2
    assert engine.global_steps == 25
    loss, logits = engine.eval_batch(batches(), return_logits=True)
    assert 0 < float(loss) < losses[0]
    assert (logits is None) == (not engine.is_last_stage())
    check_evaluations(engine, data, loss)
    with pytest.raises(UnsupportedError, match="reduce_output"):
        engine.eval_batch(batches(), reduce_output="sum")
    with pytest.raises(UnsupportedError, match="train_batch"):
        engine(torch.zeros(2, 6))
    with pytest.raises(PipelineError, match="train_batch"):
        engine.step()
    state = {name: torch.ones_like(value) for name, value in engine.module.state_dict().items()}
    name, value = state.popitem()
    engine.load_module_state_dict({"module": state}, fetch_z3_params=True, allowed_missing_keys={name})
    assert all(torch.equal(engine.module.state_dict()[key], one) for key, one in state.items())
    with pytest.raises(CheckpointError, match="unexpected keys") as caught:
        engine.load_module_state_dict({"module": {**state, "other": value}}, allowed_missing_keys={name})
    assert isinstance(caught.value, RuntimeError)
    optimizer.close()
    engine.close()


def check_evaluations(engine, data, loss):
    """What `eval_batch` returns where nothing is averaged, or outputs are; and that it goes on training with what it was given."""
    losses = engine.eval_batch(batches(), reduce_output=None, bcast_loss=False)
    outputs = engine.eval_batch(batches(), compute_loss=False, reduce_output=None)
    mean = engine.eval_batch(batches(), compute_loss=False)
    if engine.is_last_stage():
        assert float(sum(losses)) / len(losses) == pytest.approx(float(loss))
        assert [out.shape for out in outputs] == [(2, 1)] * 8
        assert torch.allclose(mean, sum(outputs) / 8)
    else:
        assert losses is outputs is mean is None
    next(data)
    engine.eval()
    engine.train_batch()
    assert engine.module.training
    again = list(itertools.islice(batches(), 2))[1][0]
    assert torch.equal(next(data)[0], again)  # 8 of 8 batches that come again were drawn between


@world(2)
def test_upstreams_line_of_a_step_is_printed():
    """Programs look for it in logs, for their losses and speeds."""
    net = PipelineModule(layers(), num_stages=2, loss_fn=nn.MSELoss())
    engine, *_ = deepspeed.initialize(
        model=net, model_parameters=net.parameters(), config={**CONFIG, "steps_per_print": 2}
    )
    data, out = batches(), io.StringIO()
    with contextlib.redirect_stdout(out):
        losses = [float(engine.train_batch(data)) for _ in range(5)]
    lines = re.findall(
        r"^steps: (\d+) loss: ([\d.]+) iter time \(s\): [\d.]+ samples/sec: [\d.]+$", out.getvalue(), re.MULTILINE
    )
    assert lines == ([("2", f"{losses[1]:0.4f}"), ("4", f"{losses[3]:0.4f}")] if engine.global_rank == 0 else [])
    engine.destroy()


@world(2, backend=None)
def test_layers_of_a_rank_and_files_of_them(tmp_path):
    deepspeed.init_distributed("gloo")
    tied = {"forward_fn": lambda layer, x: x @ layer.weight, "tied_weight_attr": "weight"}

    def build():
        return PipelineModule(
            [TiedLayerSpec("e", nn.Linear, 3, 3), torch.tanh, nn.Linear(3, 3), TiedLayerSpec("e", nn.Linear, 3, 3, **tied)],
            num_stages=2, partition_method="uniform",
        )  # fmt: skip

    torch.manual_seed(1)
    net = build()
    grid, rank = net.mpu(), net.global_rank
    assert (net.world_size, net._num_layers, net._local_start, net._local_stop) == (2, 4, 2 * rank, 2 * rank + 2)
    assert len(net.forward_funcs) == 2
    assert net.fwd_map == ({} if rank == 0 else {"2": 0})
    assert net.tied_comms["e"]["ranks"] == [0, 1]
    assert net.tied_comms["e"]["weight_attr"] == net.tied_weight_attrs["e"] == ["weight"]
    assert net.tied_comms["e"]["module"] is net.tied_modules["e"]
    assert (grid.p2p_groups, grid.slice_group, grid.get_data_parallel_group_ranks()) == (
        [[0, 1], [1, 0]],
        [rank],
        [rank],
    )
    assert (grid.get_pipeline_model_parallel_rank(), grid.get_pipeline_model_parallel_world_size()) == (rank, 2)
    assert net.ckpt_prefix("a", "b") == f"a/b/module-pipe_0{rank}"
    files = TorchCheckpointEngine()
    net.save_state_dict(str(tmp_path), files)
    torch.distributed.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"layer_0{i}-model_states.pt" for i in (0, 2)]
    if rank == 1:
        assert net.ckpt_layer_path_list(str(tmp_path), 0) == [net.ckpt_layer_path(str(tmp_path), 0)]
    torch.manual_seed(2)
    other = build()
    other.load_state_dir(str(tmp_path), files)
    assert torch.equal(other.tied_modules["e"].weight, net.tied_modules["e"].weight)
    assert rank == 0 or torch.equal(other.get_parameter("2.weight"), net.get_parameter("2.weight"))
    with pytest.raises(CheckpointError, match="has no file"):
        other.load_state_dir(str(tmp_path / "nowhere"), files)
    torch.distributed.barrier()


class Halves(nn.Module):
    """A linear layer over the ranks of a group, by its inputs; every rank sees all of them."""

    def __init__(self, inputs, outputs, group):
        super().__init__()
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.weight = nn.Parameter(torch.randn(outputs, inputs).chunk(self.size, 1)[self.rank].clone() * 0.3)
        self.weight.model_parallel = True
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        mine = copy(x, as_group(self.group), unit="x").chunk(self.size, -1)[self.rank]
        return reduce(mine @ self.weight.t(), as_group(self.group), unit="y") + self.bias


@world(4, backend=None)
def test_layers_that_are_parallel_by_themselves_train_in_stages(tmp_path):
    deepspeed.init_distributed("gloo")
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
    rank, slices, pipelines = dist.get_rank(), [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    assert (topology.get_axis_comm_lists("model"), topology.get_axis_comm_lists("pipe")) == (slices, pipelines)
    group = [dist.new_group(ranks) for ranks in slices][rank // 2]

    def begin():
        torch.manual_seed(4)
        layers = [LayerSpec(Halves, 6, 8, group), torch.tanh, LayerSpec(Halves, 8, 1, group)]
        net = PipelineModule(layers, topology=topology, loss_fn=nn.MSELoss(), partition_method=[1.0, 0.0, 1.0])
        config = {**CONFIG, "gradient_clipping": 0.1}
        return deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)[0]

    engine = begin()
    grid, ranks_of = engine.grid, dist.get_process_group_ranks
    assert engine.mpu is grid is engine.module.mpu()
    assert (ranks_of(grid.get_slice_parallel_group()), grid.get_slice_parallel_rank()) == (slices[rank // 2], rank % 2)
    assert (ranks_of(grid.get_model_parallel_group()), grid.get_model_parallel_rank()) == ([0, 1, 2, 3], rank)
    assert (ranks_of(grid.get_pipe_parallel_group()), grid.get_pipe_parallel_rank()) == (pipelines[rank % 2], rank // 2)
    assert (grid.dp_group, grid.get_data_parallel_world_size(), grid.slice_group) == ([rank], 1, slices[rank // 2])
    assert (engine.mp_world_size, engine.dp_world_size, engine.is_model_parallel) == (4, 1, True)
    assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (16, 8)
    assert (groups._get_data_parallel_world_size(), groups._get_model_parallel_world_size()) == (1, 4)
    assert groups.get_model_parallel_world_size() == 2
    wanted, data = train_alone(3), batches()
    for loss, norm in wanted[:2]:
        assert float(engine.train_batch(data)) == pytest.approx(loss, rel=1e-5)
        assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-5)
    engine.save_checkpoint(folder[0], "t")
    engine.destroy()
    engine = begin()
    path, _ = engine.load_checkpoint(folder[0], "t")
    assert path == f"{folder[0]}/t/mp_rank_0{rank}_model_states.pt"
    assert float(engine.eval_batch(batches())) == pytest.approx(wanted[2][0], rel=1e-5)

    def from_the_reader(batch):  # as programs of Megatron: one rank of each tensor-parallel group reads
        assert (batch is None) == bool(rank % 2)
        told = [batch]
        dist.broadcast_object_list(told, src=rank - rank % 2, group=group)
        return told[0]

    engine.set_batch_fn(from_the_reader)
    data = None if rank % 2 else batches()
    assert float(engine.eval_batch(data)) == pytest.approx(wanted[2][0], rel=1e-5)
    assert float(engine.train_batch(data)) == pytest.approx(wanted[2][0], rel=1e-5)
    engine.close()


def train_alone(steps):
    """Return loss and norm of each step of the same layers, whole and by torch alone."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    for layer in (model[0], model[2]):
        torch.manual_seed(4)  # every stage draws for itself
        layer.weight.data = torch.randn(layer.weight.shape) * 0.3
        layer.bias.data.zero_()
    optimizer, told = torch.optim.Adam(model.parameters(), lr=3e-2), []
    for _ in range(steps):
        optimizer.zero_grad()
        losses = [nn.functional.mse_loss(model(x), y) / 8 for x, y in itertools.islice(batches(), 8)]
        sum(losses).backward()
        told.append((float(sum(losses)), float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))))
        optimizer.step()
    return told


class Manual(PipelineModule):
    """As programs cut a model by hand."""

    def _partition_layers(self, method="uniform"):
        if method != "manual":
            super()._partition_layers(method)
            return
        stage = self._topo.get_coord(self.global_rank).pipe
        self.parts = [0, 4, len(self._layer_specs)]
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])


@world(2, backend=None)
def test_a_program_cuts_by_hand(monkeypatch):
    deepspeed.init_distributed("gloo")
    net = Manual(layers(), num_stages=2, loss_fn=nn.MSELoss(), partition_method="manual")
    assert [*net.parts] == [0, 4, 5]
    assert (net._local_start, net._local_stop) == [(0, 4), (4, 5)][dist.get_rank()]
    engine = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=CONFIG)[0]
    losses = [float(engine.train_batch(batches())) for _ in range(2)]
    assert losses[1] < losses[0]
    engine.close()
    assert [*Manual(layers(), num_stages=2, partition_method="parameters").parts] == [0, 2, 5]
    monkeypatch.setattr(PipelineModule, "_count_layer_params", lambda self: [0, 0, 5, 5, 0])
    assert [*PipelineModule(layers(), num_stages=2, partition_method="parameters").parts] == [0, 3, 5]


class Forked(nn.Linear):
    """A layer whose dropout differs between tensor-parallel ranks."""

    def forward(self, x):
        with deepspeed.checkpointing.get_cuda_rng_tracker().fork():
            return nn.functional.dropout(super().forward(x), 0.5)


@world(2, backend=None)
def test_layers_that_are_computed_again_draw_from_the_tracker_again():
    deepspeed.init_distributed("gloo")
    norms = []
    for schedule, interval in (("1f1b", 0), ("1f1b", 1), ("zb-h1", 1)):
        deepspeed.checkpointing.model_parallel_cuda_manual_seed(3)
        net = PipelineModule(
            [LayerSpec(Forked, 6, 64), LayerSpec(Forked, 64, 1)], 2, loss_fn=nn.MSELoss(), seed_layers=True,
            partition_method="uniform", activation_checkpoint_interval=interval, schedule=schedule,
        )  # fmt: skip
        assert (net.activation_checkpoint_func is deepspeed.checkpointing.checkpoint) == (schedule == "1f1b")
        config = {**CONFIG, "pipeline": {}}
        engine = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)[0]
        engine.train_batch(batches())
        norms.append(float(engine.get_global_grad_norm()))
        engine.close()
    assert norms[1:] == pytest.approx([norms[0]] * 2, rel=1e-6)


@pytest.mark.parametrize("reentrant", [True, False])
@world(2, backend=None)
def test_an_embedding_is_trained_where_it_is_computed_again(reentrant):
    """Its input needs no gradient, and reentrant checkpointing gives none to what is between such an input and an output."""
    deepspeed.init_distributed("gloo")
    net = PipelineModule(
        [nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 1)], num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform"
    )  # fmt: skip
    before = [param.detach().clone() for param in net.parameters()]
    section = {"activation_checkpoint_interval": 1, "use_reentrant": reentrant}
    engine = deepspeed.initialize(model=net, model_parameters=net.parameters(), config={**CONFIG, "pipeline": section})[
        0
    ]
    wanted = deepspeed.checkpointing.checkpoint if reentrant else deepspeed.checkpointing.non_reentrant_checkpoint
    assert net.activation_checkpoint_func is wanted
    assert engine._reentrant_activation_checkpointing() == reentrant
    ids = torch.arange(10).view(2, 5) % 7
    engine.train_batch(itertools.repeat((ids, torch.ones(2, 5, 1))))
    assert not any(torch.equal(param, old) for param, old in zip(net.parameters(), before, strict=True))
    engine.close()


@world(2, backend=None)
def test_forwards_of_seeded_layers_draw_what_upstreams_draw():
    deepspeed.init_distributed("gloo")
    seeds = []

    def seed(number):
        seeds.append(number)
        torch.manual_seed(number)

    net = PipelineModule(
        layers=layers(), num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform", seed_layers=True, seed_fn=seed, base_seed=100
    )  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=net, model_parameters=net.parameters(), config=CONFIG | {"pipeline": {}, "train_batch_size": 4}
    )
    engine.train_batch(batches())
    mine = range(net._local_start, net._local_stop)
    assert seeds == [base + layer for base in (100, 200, 300) for layer in mine]
    engine.close()


class Noting(nn.Module):
    """Notes the first number of every microbatch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append((float(x[0, 0]), len(x[0])))
        return x


@world(2, backend=None)
def test_training_data_is_read_in_its_own_order_with_shapes_of_its_own():
    deepspeed.init_distributed("gloo")
    first = Noting()
    net = PipelineModule(
        layers=[first, nn.PReLU(), nn.ReLU(), lambda x: x.mean(-1, keepdim=True), nn.Linear(1, 1)],
        num_stages=2, loss_fn=nn.MSELoss(), dynamic_shape=True,
    )  # fmt: skip
    rows = [(torch.full((1 + i // 8,), float(i)), torch.zeros(1)) for i in range(16)]
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
    }
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config, training_data=rows)
    for _ in range(3):
        engine.train_batch()
    if engine.is_first_stage():
        assert first.seen == [(float(i), 1 + i // 8) for i in [*range(0, 16, 2), *range(0, 8, 2)]]
    engine.close()
