"""`PipelineModule` and its grid under upstream's names: which layers a rank holds, and files of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import ds_pipe
from deepspeed._ours.base.forwarding import answers, reads, tells
from deepspeed._ours.base.raising import not_supported, raising
from deepspeed._ours.base.runtime_utils import prime_factors
from deepspeed._ours.training_engine.activation_checkpointing_api import checkpoint, non_reentrant_checkpoint
from ds_comm import as_group, world_group
from ds_config.errors import CheckpointError
from ds_pipe.building import broadcast_ties
from ds_pipe.topology import PipelineGroups


class PipelineError(Exception):
    """Raised where an engine of stages is called as one of a whole model."""


class PipelineParallelGrid(ds_pipe.PipelineParallelGrid):
    """`ds_pipe.PipelineParallelGrid` from a topology. Collective over the world.

    Args:
        topology: Ranks by axes; None: data x pipe, as square as the number of ranks allows.
        process_group: None, the world.
        places: Groups that are made already.
    Attributes:
        is_first_stage, is_last_stage: Of this rank's stage.
        pp_group, dp_group, slice_group: Ranks of the world in this rank's pipeline, that share its batch, and that hold its stage's slices.
        p2p_groups: Of every rank, itself and the next stage's.
    """

    is_first_stage: bool  # type: ignore[assignment]  # methods of ds-pipe's
    is_last_stage: bool  # type: ignore[assignment]

    def __init__(
        self,
        topology: ds_pipe.ProcessTopology | None = None,
        process_group: Any = None,
        places: PipelineGroups | None = None,
    ) -> None:
        if process_group is not None and as_group(process_group).size != world_group().size:
            raise not_supported(
                "PipelineParallelGrid(process_group=...) of a part of the world",
                "Leave it out, and start as many ranks as the topology has.",
            )
        super().__init__(places or PipelineGroups.build(topology or _squarish(world_group().size)))
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        self.pp_group, self.dp_group = list(self._places.pipe.ranks), list(self._places.data.ranks)
        self.slice_group, self.slice_parallel_size = list(self._places.slice.ranks), self.model_parallel_size
        nexts = {rank: [rank, row[(i + 1) % len(row)]] for row in self._pipelines() for i, rank in enumerate(row)}
        self.p2p_groups = [nexts[rank] for rank in sorted(nexts)]

    def _pipelines(self) -> list[list[int]]:
        return self._topo.get_axis_comm_lists("pipe")

    get_data_parallel_group_ranks = tells("dp_group", "Return the ranks that share this one's batch.")
    get_pipeline_model_parallel_rank = tells("stage_id", "Return this rank's stage.")
    get_pipeline_model_parallel_world_size = tells("pipe_parallel_size", "Return the number of stages.")

    def _is_grid_valid(self) -> bool:
        """Whether the axes multiply to the ranks; others are refused before."""
        return self._topo.world_size() == self.world_size


def _squarish(ranks: int) -> ds_pipe.ProcessTopology:
    pipe = data = 1
    for number, prime in enumerate(prime_factors(ranks)):
        if number % 2:
            data *= prime
        else:
            pipe *= prime
    return ds_pipe.PipeDataParallelTopology(num_pp=pipe, num_dp=data)


class PipelineModule(ds_pipe.PipelineModule):
    """`ds_pipe.PipelineModule`, which builds every layer once to count its parameters, as upstream: later draws come after those."""

    dynamic_shape = True

    @raising(RuntimeError)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._mpu = PipelineParallelGrid(places=self.places)
        # As upstream's, it knows what `deepspeed.checkpointing.configure` was told and the tracker's random states; programs call it, too.
        again = checkpoint if self.schedule == "1f1b" else non_reentrant_checkpoint  # others may split backwards
        self.activation_checkpoint_func = self.activation_checkpoint_func or again

    _grid = reads("_mpu", "The groups of this rank.")
    _topo = reads("places.topology", "All ranks, by axes.")
    _layer_specs = reads("specs", "The layers of the whole model.")
    global_rank = reads("_mpu.global_rank", "This rank.")
    world_size = reads("_mpu.world_size", "The number of ranks.")
    _num_layers = property(lambda self: len(self.specs), doc="The number of layers of the whole model.")
    _local_start = property(lambda self: self.parts[self.stage_id], doc="This rank's first layer.")
    _local_stop = property(lambda self: self.parts[self.stage_id + 1], doc="The layer after this rank's last.")

    @property
    def is_checkpointable_results(self) -> list[bool]:
        """Which blocks of `activation_checkpoint_interval` of this rank's layers are computed again; [] without an interval."""
        every, stop = self.activation_checkpoint_interval, self._local_stop
        starts = range(self._local_start, stop, every) if every else ()
        return [self.is_checkpointable(start, min(start + every, stop)) for start in starts]

    _precompute_checkpointable_values = answers(
        None, "Do nothing: `is_checkpointable_results` is told when it is asked for."
    )

    @property
    def forward_funcs(self) -> list[Callable[[Any], Any]]:
        """This rank's layers, in their order; a tied one that has a `forward_fn` as a call of it."""
        return [self._uses[index] for index in range(self._local_start, self._local_stop)]

    @property
    def fwd_map(self) -> dict[str, int]:
        """Places in `forward_funcs` of the modules that are not tied, by their names."""
        names = [str(index) for index in range(self._local_start, self._local_stop)]
        return {name: at for at, name in enumerate(names) if name in self._modules}

    @property
    def tied_weight_attrs(self) -> dict[str, list[str]]:
        """What this rank's tied layers share, by key."""
        return {layer.key: layer.tied_weight_attr for layer in self._tied() if layer.key in self.tied_modules}

    @property
    def tied_comms(self) -> dict[str, dict[str, Any]]:
        """The ranks and the group that share this rank's tied layers with it, by key."""
        groups = {one.name.split(".")[1]: one.group for one in self._staged.ties}
        return {
            key: {
                "ranks": list(group.ranks),
                "group": group.pg,
                "weight_attr": self.tied_weight_attrs[key],
                "module": self.tied_modules[key],
            }
            for key, group in sorted(groups.items())
        }

    def _tied(self) -> Iterator[ds_pipe.TiedLayerSpec]:
        return (layer for layer in reversed(self.specs) if isinstance(layer, ds_pipe.TiedLayerSpec))

    def _partition(self, method: str | Sequence[float], parts: int) -> tuple[int, ...]:
        self._partition_layers(method)
        return tuple(self.parts)

    def _partition_layers(self, method: str | Sequence[float] = "uniform") -> None:
        """Set `parts`, the first layer of each stage and the number of layers; programs cut by a method of their own here."""
        if isinstance(method, str) and method.lower() == "parameters":
            method = self._count_layer_params()
        self.parts = super()._partition(method, len(self.rank_of))

    def _count_layer_params(self) -> list[int]:
        """Count the trainable parameters of every layer; programs count others."""
        return list(map(_trainable, self.specs))

    _set_bounds = answers(None, "Do nothing: the bounds of a rank's layers are told by `parts`.")

    # ---- files of layers, apart from the engine's checkpoints

    def ckpt_prefix(self, checkpoints_path: str, tag: str) -> str:
        """Return the path that files of this rank's stage begin with, without its place along `data`."""
        here = self._topo.get_coord(self.global_rank)._asdict()
        places = "".join(f"-{axis}_{index:02d}" for axis, index in here.items() if axis != "data")
        return os.path.join(checkpoints_path, str(tag), f"module{places}")

    def ckpt_layer_path(self, ckpt_dir: str, local_layer_idx: int) -> str:
        """Return the path of the file with one of this rank's layers."""
        place = self._topo.get_rank_repr(self.global_rank)
        number = self._local_start + local_layer_idx
        return os.path.join(ckpt_dir, f"layer_{number:02d}{place and '-' + place}-model_states.pt")

    def ckpt_layer_path_list(self, ckpt_dir: str, local_layer_idx: int) -> list[str]:
        """Return the paths of all files with one of this rank's layers, of any tensor slice."""
        number = self._local_start + local_layer_idx
        return sorted(map(str, Path(ckpt_dir).glob(f"layer_{number:02d}-*model_states.pt")))

    def save_state_dict(self, save_dir: str, checkpoint_engine: Any, exclude_frozen_params: bool = False) -> None:
        """Write this rank's layers, one file each, with `checkpoint_engine.save`; the first replica does."""
        if self._mpu.data_parallel_id:
            return
        os.makedirs(save_dir, exist_ok=True)
        for at, layer in self._stored():
            frozen = {
                name for name, param in layer.named_parameters() if exclude_frozen_params and not param.requires_grad
            }
            # Copies: a view is stored with all that it is a part of.
            state = {
                k: v.clone() if isinstance(v, Tensor) else v for k, v in layer.state_dict().items() if k not in frozen
            }
            checkpoint_engine.save(state, self.ckpt_layer_path(save_dir, at))

    def load_state_dir(self, load_dir: str, checkpoint_engine: Any, strict: bool = True) -> None:
        """Read this rank's layers from files of any number of stages, with `checkpoint_engine.load`. Collective over ties.

        Raises:
            CheckpointError: a layer has no file ("compat-files").
        """
        for at, layer in self._stored():
            path = self.ckpt_layer_path(load_dir, at)
            if not Path(path).is_file():
                raise CheckpointError(
                    f"layer {self._local_start + at} has no file {path}",
                    code="compat-files",
                    fix="Load from the directory that save_state_dict or DeepSpeed wrote, with as many tensor slices.",
                )
            layer.load_state_dict(checkpoint_engine.load(path, map_location="cpu"), strict=strict)
        broadcast_ties(self._staged.ties)

    def _stored(self) -> list[tuple[int, nn.Module]]:
        # A tied layer that is called by its `forward_fn` has no file: the one where it is a module has.
        return [(at, layer) for at, layer in enumerate(self.forward_funcs) if isinstance(layer, nn.Module)]


def _trainable(layer: Any) -> int:
    built = layer.build() if isinstance(layer, ds_pipe.LayerSpec) else layer
    return sum(p.numel() for p in built.parameters() if p.requires_grad) if isinstance(built, nn.Module) else 0
