"""Ranks by named axes, with the names that pipelines of DeepSpeed are written with; and the groups of a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ds_comm
from ds_comm import Group, RankGrid
from ds_config.errors import PlanError

__all__ = [
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineGroups",
    "PipelineParallelGrid",
    "ProcessTopology",
]

GRADIENT_AXES = ("data", "sequence")  # gradients of one parameter are summed over these


class ProcessTopology:
    """Ranks numbered row-major over axes: the last axis varies fastest.

    Args:
        axes: Names, outermost first.
        dims: Ranks along each.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        try:
            self.grid = RankGrid(tuple(axes), tuple(dims))
        except ValueError as error:
            raise PlanError(
                str(error), code="pipe-topology", fix="Name every axis once, with a size of at least 1."
            ) from None
        self.axes, self.dims = list(axes), list(dims)
        # A coordinate is a tuple with names, as callers unpack it.
        self.ProcessCoord: Any = NamedTuple("ProcessCoord", [(axis, int) for axis in axes])  # type: ignore[misc]

    def get_rank(self, **coord_kwargs: int) -> int:
        """Return the rank at a coordinate, which has one index per axis."""
        return self.grid.rank(**coord_kwargs)

    def get_coord(self, rank: int) -> Any:
        """Index along every axis, as a named tuple."""
        return self.ProcessCoord(**self.grid.coordinate(rank))

    def get_axis_names(self) -> list[str]:
        return list(self.axes)

    def get_dim(self, axis: str) -> int:
        """Ranks along `axis`; 0 if there is no such axis."""
        return self.grid.size(axis) if axis in self.axes else 0

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """`model_00`: a rank's index along the axes that are not omitted, for file names."""
        here = self.grid.coordinate(rank)
        return outer_sep.join(f"{axis}{inner_sep}{here[axis]:02d}" for axis in self.axes if axis not in omit_axes)

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Groups of ranks that differ only along `axis`; none for an unknown axis."""
        return [list(ranks) for ranks in self.grid.groups(axis)] if axis in self.axes else []

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Ranks with these indices, in rising order."""
        return self.grid.filter_match(**filter_kwargs)

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Ranks whose index along `axis` is `idx`."""
        return self.grid.filter_match(**{axis: idx})

    def world_size(self) -> int:
        return self.grid.world_size

    def __str__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{a}={d}' for a, d in zip(self.axes, self.dims, strict=True))})"


class PipeDataParallelTopology(ProcessTopology):
    """Stages outermost, so that the ranks of one stage, which reduce gradients, are neighbours."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(("pipe", "data"), (num_pp, num_dp))


class PipeModelDataParallelTopology(ProcessTopology):
    """Stages, data, tensor slices; the slices of a layer are neighbours."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(("pipe", "data", "model"), (num_pp, num_dp, num_mp))


@dataclass(frozen=True, slots=True)
class PipelineGroups:
    """Where a rank is in the pipeline, and whom it works with.

    Attributes:
        topology: All ranks; has an axis `pipe`.
        pipe: The ranks that hold one copy of the model, in the order of their stages.
        data: The ranks that hold the same stages (and tensor slice).
        gradient: Those and the ones with other parts of the same sequences: what gradients are summed over.
        world: All ranks.
        model: The ranks with the same data: pipe x model.
        slice: The tensor slices of this stage.
    """

    topology: ProcessTopology
    pipe: Group
    data: Group
    gradient: Group
    world: Group
    model: Group
    slice: Group

    @classmethod
    def build(cls, topology: ProcessTopology) -> PipelineGroups:
        """Make the groups. Collective over the world.

        Raises:
            PlanError: there is no axis `pipe`, or the world has another size ("pipe-topology").
        """
        world = ds_comm.ensure_world()
        if "pipe" not in topology.axes or topology.world_size() != world.size:
            raise PlanError(
                f"{topology} is for {topology.world_size()} ranks, the world has {world.size}",
                code="pipe-topology",
                fix="Give an axis `pipe`, and dims that multiply to the world size.",
            )
        names = {"pipe": ("pipe",), "slice": tuple(a for a in topology.axes if a not in ("pipe", *GRADIENT_AXES))}
        names |= {"data": ("data",) if "data" in topology.axes else (), "model": ("pipe", *names["slice"])}
        names["gradient"] = tuple(a for a in topology.axes if a in GRADIENT_AXES)
        groups: dict[str, Group] = {}
        known: dict[tuple[int, ...], Group | None] = {}
        for name, axes in sorted(names.items()):
            for ranks in topology.grid.groups(*axes):
                if ranks not in known:
                    known[ranks] = ds_comm.common_group(ranks, name)
                group = known[ranks]
                if group is not None:
                    groups[name] = Group(name, group.ranks, group.rank, group.link)
        return cls(topology, world=world, **groups)

    @property
    def data_size(self) -> int:
        return self.data.size


class PipelineParallelGrid:
    """The groups of a rank by the names of an `mpu`. Here *model parallel* is pipe x tensor, and *slice* is tensor parallel.

    Args:
        places: Of this rank.
    """

    def __init__(self, places: PipelineGroups) -> None:
        self._places, self._topo = places, places.topology
        self.global_rank, self.world_size = places.world.global_rank, places.world.size
        self.data_parallel_size = max(1, self._topo.get_dim("data"))
        self.pipe_parallel_size = max(1, self._topo.get_dim("pipe"))
        self.model_parallel_size = max(1, self._topo.get_dim("model"))
        self.stage_id, self.data_parallel_id = places.pipe.rank, places.data.rank

    def topology(self) -> ProcessTopology:
        return self._topo

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Return the world rank at stage `stage_id`, with this rank's other indices except those in `kwargs`."""
        here: Mapping[str, int] = self._topo.grid.coordinate(self.global_rank)
        return self._topo.grid.rank(**{**here, "pipe": stage_id, **kwargs})

    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        return self.stage_id == self.pipe_parallel_size - 1

    def get_global_rank(self) -> int:
        return self.global_rank

    def get_stage_id(self) -> int:
        return self.stage_id

    def get_data_parallel_id(self) -> int:
        return self.data_parallel_id

    def get_pipe_parallel_rank(self) -> int:
        return self.stage_id

    def get_pipe_parallel_world_size(self) -> int:
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> Any:
        return self._places.pipe.pg

    def get_data_parallel_rank(self) -> int:
        return self._places.data.rank

    def get_data_parallel_world_size(self) -> int:
        return self._places.data.size

    def get_data_parallel_group(self) -> Any:
        return self._places.data.pg

    def get_model_parallel_rank(self) -> int:
        return self._places.model.rank

    def get_model_parallel_world_size(self) -> int:
        return self._places.model.size

    def get_model_parallel_group(self) -> Any:
        return self._places.model.pg

    def get_slice_parallel_rank(self) -> int:
        return self._places.slice.rank

    def get_slice_parallel_world_size(self) -> int:
        return self._places.slice.size

    def get_slice_parallel_group(self) -> Any:
        return self._places.slice.pg

    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size
    get_tensor_model_parallel_group = get_slice_parallel_group


def plain_topology(num_stages: int | None) -> PipeDataParallelTopology:
    """Stages outermost; the rest of the world is for data.

    Raises:
        PlanError: `num_stages` does not divide the world size ("pipe-topology").
    """
    world = ds_comm.ensure_world().size
    if num_stages is None or num_stages < 1 or world % num_stages:
        raise PlanError(
            f"num_stages {num_stages} does not divide a world of {world} ranks",
            code="pipe-topology",
            fix="Give num_stages that divides the world size, or a topology.",
        )
    return PipeDataParallelTopology(num_stages, world // num_stages)
