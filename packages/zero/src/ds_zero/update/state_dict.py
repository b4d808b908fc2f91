"""The state of a sharded optimizer as programs and files have it: torch's `state_dict` with this rank's elements, and what goes beside shards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import ds_comm as comm
from ds_config.errors import CheckpointError
from ds_zero.runtime.unit import Unit
from ds_zero.update.apply_step import Updater
from ds_zero.update.optimizer_state import OptimizerState, offset_text
from ds_zero.update.wrapped_optimizer import class_name_of

__all__ = ["OptimizerStateDict", "state_before"]


@dataclass(frozen=True, slots=True)
class OptimizerStateDict:
    """Gives the state of one optimizer, and takes it back.

    Attributes:
        names: Those of each group's parameters.
    """

    store: OptimizerState
    updater: Updater
    names: list[list[str]]

    # ---- what is not a tensor of a parameter's elements

    def common(self) -> dict[str, Any]:
        """Return groups, scalars, and the names of what there is besides. JSON-able, the same on every rank. Collective."""
        return {
            "format": 1,
            "class": class_name_of(self.store.inner),
            "groups": self.store.groups(),
            "scalars": self.store.scalars(),
            "names": self._all_names(),  # for others that keep states by their place in a group
            "tensors": self.store.keys(),  # what `shards` has besides
            **self.updater.state_dict(),
        }

    def _all_names(self) -> list[list[str]]:
        """Return the parameter names of each group, with those of other pipeline stages and of other ranks' experts; the same on every rank."""
        everyone = self.store.sharding.everyone
        if everyone.ranks == self.store.sharding.group.ranks and len(self.store.sharding.families) == 1:
            return self.names
        known = self.store.sharding.logical
        local_names = [[known[name].name if name in known else name for name in group] for group in self.names]
        gathered = comm.all_gather_json(local_names, everyone, unit="state_dict")
        return [list(dict.fromkeys(name for groups in gathered for name in groups[i])) for i in range(len(local_names))]

    def is_class(self, state_dict: Mapping[str, Any]) -> bool:
        """Whether it is of an optimizer of this class; one that does not say is taken for one."""
        return state_dict.get("class") in (None, class_name_of(self.store.inner))

    def check(self, state_dict: Mapping[str, Any]) -> None:
        """Check that this optimizer may take a state dict.

        Raises:
            CheckpointError: of another class ("optimizer-class"), or no state dict of an optimizer ("zero-state-dict"), or the tensors
                that it is about were not loaded ("zero-state-missing").
        """
        store = self.store
        if not self.is_class(state_dict):
            raise CheckpointError(
                f"the checkpoint has the state of {state_dict['class']}, this optimizer is {class_name_of(store.inner)}",
                code="optimizer-class",
                fix="Go on with the optimizer it was saved with, or load the parameters alone and begin the optimizer's state anew.",
            )
        if self.has_tensors(state_dict):
            return
        if not {"groups", "scalars"} <= state_dict.keys():
            raise _unfit(f"{sorted(map(str, state_dict))}, and neither state and param_groups nor groups and scalars")
        keys = state_dict.get("tensors") or ()
        if keys and any(unit.parts for unit in store.sharding.units) and not store.has_any(keys):
            raise CheckpointError(
                f"common_state_dict() of an optimizer whose state has {', '.join(keys)} of each parameter, and this one has none of them: such "
                "tensors are in shards, or in a state_dict()",
                code="zero-state-missing",
                fix="Save optimizer.shards() with ds_ckpt.save; before load_state_dict call optimizer.materialize(shapes) and ds_ckpt.load(path, "
                "optimizer.shards()).",
            )

    def load(self, state_dict: Mapping[str, Any]) -> None:
        """Take a state dict that was checked."""
        if self.has_tensors(state_dict):
            self._load_entries(state_dict)
            groups = [{k: v for k, v in group.items() if k != "params"} for group in state_dict["param_groups"]]
            state_dict = {"scalars": {}, **state_dict, "groups": groups}
        self.store.load_groups(state_dict["groups"])
        self.store.load_scalars(state_dict["scalars"])
        for unit in self.store.sharding.units:
            unit.gradients.way.rescale(0.0)
        self.updater.load_state_dict(state_dict)

    # ---- tensors

    @staticmethod
    def has_tensors(state_dict: Mapping[str, Any]) -> bool:
        """Whether it has tensors, as torch's."""
        return {"state", "param_groups"} <= state_dict.keys()

    def names_in(self, state_dict: Mapping[str, Any]) -> set[str]:
        """Return the logical names of the parameters that it has state of."""
        known = self.store.sharding.logical
        return {known[name].name for name, place in self._places.items() if state_dict["state"].get(place)}

    @property
    def _places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(chain.from_iterable(self.names))}

    def entries(self) -> dict[str, Any]:
        """Return what torch has in a state dict, with this rank's elements: the state of each parameter by its place in the groups, and the groups.

        Returns: `state`, `param_groups`, and `intervals`: the elements of flattened parameters that this rank has, where that is not all of
            them; such state is 1-D. Its tensors are the optimizer's own memory.
        """
        store = self.store
        places = self._places
        state: dict[int, dict[str, Any]] = {}
        intervals: dict[int, list[list[int]]] = {}
        for unit in store.sharding.units:
            parts: dict[tuple[int, str], list[Tensor]] = {}
            for key, piece, data in store.pieces(unit):
                whole = piece.shape and data.numel() == math.prod(piece.shape)
                parts.setdefault((places[piece.name], key), []).append(data.view(piece.shape) if whole else data)
            for (place, key), values in parts.items():
                state.setdefault(place, {})[key] = values[0] if len(values) == 1 else torch.cat(values)
            for name, held in self._held(unit).items():
                if places.get(name) in state:
                    intervals[places[name]] = held
            for key, of in store.numbers(unit).items():
                for name, number in of.items():
                    state.setdefault(places[name], {})[key] = number
        groups = [
            {
                **{key: value for key, value in group.items() if key != "params"},
                "params": [places[name] for name in members],
            }
            for group, members in zip(store.inner.param_groups, self.names, strict=True)
        ]
        return {"state": state, "param_groups": groups, "intervals": intervals}

    def _held(self, unit: Unit) -> dict[str, list[list[int]]]:
        """Return which elements of its parameters this rank has, without those that it has whole."""
        held: dict[str, list[list[int]]] = {}
        for piece in self.store.sharding.pieces(unit) if unit.parts else ():
            if piece.interval.numel < math.prod(piece.shape):
                held.setdefault(piece.name, []).append([piece.interval.start, piece.interval.stop])
        return held

    def _load_entries(self, state_dict: Mapping[str, Any]) -> None:
        """Take back `state` of `entries`, or this rank's elements of whole tensors, as a plain optimizer's state dict has them.

        Raises:
            CheckpointError: other groups, other shapes, or other elements than this rank has ("zero-state-dict"); nothing is changed then.
        """
        lengths = [len(group["params"]) for group in state_dict["param_groups"]]
        if lengths != [len(group) for group in self.names]:
            raise _unfit(
                f"groups of {lengths} parameters, and this optimizer of {[len(group) for group in self.names]}"
            )
        entries = {name: state_dict["state"].get(place, {}) for name, place in self._places.items()}
        tensors = _tensors_in(
            entries, {i.name: i.shape for unit in self.store.sharding.units for i in unit.spec.params}
        )
        intervals = {name: state_dict.get("intervals", {}).get(place) for name, place in self._places.items()}
        known = self.store.sharding.logical
        stored: dict[str, tuple[int, ...]] = {}
        for unit in [unit for unit in self.store.sharding.units if unit.spec.trained]:
            held, keys = self._held(unit), list(state_dict.get("tensors", ()))
            for info in unit.spec.params:
                for key, value in tensors[info.name].items():
                    own = unit.layout.kind != "flat" and value.shape != info.shape and intervals[info.name] is None
                    if not own and not _fits(value, info.shape, intervals[info.name], held.get(info.name)):
                        has = held.get(info.name, info.shape)
                        raise _unfit(f"{tuple(value.shape)} of {key} of {info.name}, of which this rank has {has}")
                    part = f"@{offset_text(known[info.name])}" if own and not known[info.name].whole else ""
                    shape = tuple(value.shape) if own else known[info.name].shape
                    stored[f"optim/{known[info.name].name}/{key}{part}"] = shape
                keys = list(tensors[info.name]) or keys
            for info in unit.spec.params:  # steps together with others, and this rank has none of its elements
                if entries[info.name] and not tensors[info.name]:
                    stored.update((f"optim/{known[info.name].name}/{key}", known[info.name].shape) for key in keys)
        self.store.materialize(stored)
        for unit in self.store.sharding.units:
            ends: dict[tuple[str, str], int] = {}
            for key, piece, data in self.store.pieces(unit):
                value = tensors[piece.name][key].reshape(-1)
                start = piece.interval.start if intervals[piece.name] is None else ends.get((piece.name, key), 0)
                start = start if value.numel() > data.numel() else 0
                data.view(-1).copy_(value[start : start + data.numel()])
                ends[piece.name, key] = start + data.numel()
        numbers: dict[str, dict[str, float]] = {}
        for name, of in tensors.items():
            for key in entries[name].keys() - of.keys():
                value = entries[name][key]
                numbers.setdefault(key, {})[known[name].name] = value.item() if isinstance(value, Tensor) else value
        self.store.load_scalars(numbers)


def state_before(optimizer: Optimizer) -> dict[str, Any]:
    """Return a plain optimizer's `state` and `param_groups`, as its `state_dict` has them; that one imports the compiler.

    Without the state that Adagrad gives frozen parameters when it is made: it is what thawed ones get anyway.
    """
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    places = count()
    for group in optimizer.param_groups:
        numbers = [next(places) for _ in group["params"]]
        state |= {
            n: dict(optimizer.state[p])
            for n, p in zip(numbers, group["params"], strict=True)
            if p in optimizer.state and (p.requires_grad or optimizer.state[p].get("step", 1) != 0)
        }
        groups.append({**group, "params": numbers})
    return {"state": state, "param_groups": groups}


def _tensors_in(
    entries: Mapping[str, Mapping[str, Any]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, dict[str, Tensor]]:
    """Return the entries that are no numbers. Of a scalar parameter a plain optimizer has moments without dimensions."""
    sized = {key for of in entries.values() for key, value in of.items() if isinstance(value, Tensor) and value.dim()}
    return {
        name: {
            key: value
            for key, value in of.items()
            if isinstance(value, Tensor) and (value.dim() or (key in sized and shapes.get(name) == ()))
        }
        for name, of in entries.items()
    }


def _fits(value: Tensor, shape: tuple[int, ...], saved: list[list[int]] | None, local: list[list[int]] | None) -> bool:
    """Whether a saved state is that of a whole parameter, or of the elements that this rank has."""
    if saved is None:
        return value.shape == shape or (not shape and value.numel() == 1)
    return list(map(list, saved)) == local and value.shape == (sum(stop - start for start, stop in saved),)


def _unfit(what: str) -> CheckpointError:
    return CheckpointError(
        f"the state dict has {what}",
        code="zero-state-dict",
        fix="Load it with the model, groups, stage and ranks it is of, or a plain optimizer's whole one. To go on with others, save "
        "optimizer.shards() with ds_ckpt.save, and optimizer.common_state_dict() beside them.",
    )
