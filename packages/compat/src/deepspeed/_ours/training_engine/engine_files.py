"""What an engine saves and loads under upstream's names: checkpoints, whole state dicts, one file of weights."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed._ours.base.raising import refused
from deepspeed._ours.base.runtime_utils import bwc_tensor_model_parallel_rank
from deepspeed._ours.base.version import version
from deepspeed._ours.checkpoint.checkpoint_api import (
    get_fp32_state_dict_from_zero_checkpoint,
    get_model_ckpt_name_for_rank,
    get_zero_ckpt_name_for_rank,
    leave_files,
    leave_model,
    leave_signs,
    name_of_tag,
)
from deepspeed._ours.checkpoint.grids import check_layers, cut_layers
from deepspeed._ours.monitor.upstream_logging import logger
from ds_ckpt.coordinator import TRANSFER_S, Coordinator
from ds_comm import all_gather_object
from ds_engine import Engine
from ds_engine.deepspeed_checkpoints import translated
from ds_engine.full_state import save_whole
from ds_moe.utils import has_moe_layers
from ds_zero import GatheredParameters

_log = logging.getLogger("DeepSpeed")


class SavesAndLoads(Engine):
    """The engine's part that meets files."""

    def save_checkpoint(  # type: ignore[override]
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save a run into `save_dir/tag`, with `latest` and `zero_to_fp32.py` beside it. Collective.

        Args:
            client_state: Values of the caller's own, see `ds_ckpt.client_state`; rank 0's is stored.
        """
        if not save_dir:
            raise refused("no-directory", save_dir)
        world = self.mesh["world"]
        name = self._one_tag(str(tag or f"global_step{self.global_steps}"))
        super().save_checkpoint(save_dir, name, client_state, exclude_frozen_parameters)
        if save_latest:
            self.checkpointer.wait()
        whole = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters) if self._one_file() else {}
        sharded, root = self.plan.config.zero_optimization.stage > 0, os.fspath(save_dir)
        first, *others = self._shapes_by_rank() if self._one_file() else [{}]

        def leave() -> None:
            leave_signs(root, name, latest=save_latest, sharded=sharded)
            if self.plan.config.checkpoint.layout == "ds":
                optim, facts = self._get_optimizer_ckpt_name(root, name, 0), self._facts(client_state or {})
                leave_files(f"{root}/{name}", whole, {**facts, **first}, optim)
                for rank, shapes in enumerate(others, 1):
                    leave_model(get_model_ckpt_name_for_rank(f"{root}/{name}", f"{rank:02d}"), {}, {**facts, **shapes})

        Coordinator(world).first(leave, patience_s=TRANSFER_S)
        return True

    def _one_tag(self, tag: str) -> str:
        """Return rank 0's tag on every rank, after checking the tags by `checkpoint.tag_validation`. Collective."""
        tags = self.mesh["world"].size * [None]
        all_gather_object(tags, tag, group=self.mesh["world"])
        if len(set(tags)) > 1:
            message = f"ranks save under different tags: {sorted(set(map(str, tags)))[:5]}"
            mode = str((self.config.get("checkpoint") or {}).get("tag_validation", "Warn")).upper()
            if mode == "FAIL":
                raise refused("tags-differ", message)
            if mode == "WARN":
                _log.warning("%s; the one of rank 0 is used", message)
        return str(tags[0])

    def _one_file(self) -> bool:
        # Where every rank has the whole model, which upstream then stores in one file.
        return not self.plan.residency.shard_params and self.plan.config.checkpoint.layout == "ds"

    def _shapes_by_rank(self) -> list[dict[str, Any]]:
        """Collect what the file of each model-parallel rank says of its parameters. Collective."""
        ranks = self.mesh["model"]
        own = {name: param.shape for name, param in self.module.named_parameters() if param.requires_grad}
        every = ranks.size * [own]
        all_gather_object(every, own, group=ranks)
        degrees = {"pp_degree": self.mesh["pipe"].size, "tp_degree": self.mesh["tensor"].size}
        return [{"param_shapes": [shapes], "checkpoint_parallel_dimensions": degrees} for shapes in every]

    def _get_zero_param_shapes(self) -> list[dict[str, Any]]:
        """Return the shapes of the trained parameters by name, of each unit, in the order of the optimizer's state."""
        trained = [unit.spec.params for unit in self.sharding.units if unit.spec.trained]
        return [{param.name: torch.Size(param.shape) for param in params} for params in trained]

    def _facts(self, client_state: Mapping[str, Any]) -> dict[str, Any]:
        """Collect the values that upstream stores beside the weights.

        Client state that only pickle could hold was refused before.
        """
        counters = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
        return {
            **client_state,
            **{name: getattr(self, name) for name in counters},
            "ds_version": version,
            "dp_world_size": self.dp_world_size,
            "mp_world_size": 1,
            "partition_count": self.dp_world_size,
            "zero_stage": self.plan.config.zero_optimization.stage,
            "ds_autoep_layers": cut_layers(self.module) or None,
        }

    @staticmethod
    def _get_expert_ckpt_name(
        checkpoints_path: str, layer_id: int, expert_id: int, tag: str, mpu: Any = None, checkpoint_mp_rank: int | None = None,
    ) -> str:  # fmt: skip
        """Return the path of upstream's file of an expert; a negative `layer_id` stands for the layout without layers."""
        rank = bwc_tensor_model_parallel_rank(mpu) if checkpoint_mp_rank is None else checkpoint_mp_rank
        layer = "" if layer_id < 0 else f"layer_{layer_id}_"
        name = f"{layer}expert_{expert_id}_mp_rank_{rank:02d}_model_states.pt"
        return os.path.join(checkpoints_path, str(tag or ""), name)

    @staticmethod
    def load_moe_state_dict(
        checkpoint_path: str, tag: str, state_dict: dict[str, Any], old_moe_load: bool = False, model: Any = None,
        autoep_layers: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        """Check what a checkpoint says of its experts. They are read with the rest: `load_checkpoint`.

        Raises:
            CheckpointError: it is no list of layers with their fields ("compat-files"); a RuntimeError, too.
            UnsupportedError: files of experts are to be read by themselves ("compat-argument").
        """
        check_layers(autoep_layers or [])
        if model is not None and not has_moe_layers(model)[0]:
            return  # there is nothing to read
        raise refused("load-experts", checkpoint_path, tag)

    def _get_ckpt_name(
        self, checkpoints_path: str, tag: str, mp_placeholder: str | None = None, pp_placeholder: str | None = None
    ) -> str:
        """Return the path of the file with this rank's shard of the model's states, in upstream's layout."""
        tensor = mp_placeholder or f"{self.checkpoint_mp_rank:02d}"
        if not self.plan.residency.shard_params:
            return get_model_ckpt_name_for_rank(os.path.join(checkpoints_path, str(tag)), tensor)
        data = pp_placeholder or self.mesh["data"].rank
        return os.path.join(checkpoints_path, str(tag), f"zero_pp_rank_{data}_mp_rank_{tensor}_model_states.pt")

    def _get_optimizer_ckpt_name(self, checkpoints_path: str, tag: str, expp_rank: int) -> str:
        """Return the path of the file with a rank's optimizer state, in upstream's layout."""
        name = os.path.basename(get_zero_ckpt_name_for_rank("", expp_rank, 0))
        return f"{checkpoints_path}/{tag}/{'bf16_' if self.bfloat16_enabled() else ''}{name}"

    def _create_checkpoint_file(self, save_dir: str, tag: str, zero_checkpoint: bool) -> bool:
        """Make the folder of a tag; whether that could be done."""
        del zero_checkpoint
        try:
            Path(save_dir, str(tag)).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            logger.error("Failed saving model checkpoint to %s with tag %s: %s", save_dir, tag, error)
            return False
        return True

    def _save_checkpoint(
        self,
        save_dir: str,
        tag: str,
        client_state: Mapping[str, Any] | None = None,
        exclude_frozen_parameters: bool = False,
    ) -> None:
        """Write the model's file of a checkpoint in upstream's layout and nothing else, for programs that save no optimizer.

        Not collective: the weights are of a model that this rank has whole; at stage 3 the file has none.
        """
        whole = (
            {}
            if self.plan.residency.shard_params
            else self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        )
        leave_model(self._get_ckpt_name(save_dir, tag), whole, self._facts(client_state or {}))

    def _change_recovery_script_permissions(self, dst: str) -> None:
        """Make `zero_to_fp32.py` a program. Some file systems have no such permission, which is no reason to stop."""
        try:
            Path(dst).chmod(0o755)
        except OSError as error:
            logger.info("%s cannot be made a program: %s", dst, error)

    def load_checkpoint(  # type: ignore[override]
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from a checkpoint of ours or of upstream's, saved on any number of ranks. Collective.

        Args:
            custom_load_fn: Called as `custom_load_fn(src=state_dict, dst=module)` on every rank, after all else was loaded, with the whole
                weights in fp32, instead of loading them; at stage 3 while all parameters are gathered.
        Returns:
            Path of this rank's model states in upstream's layout (whose folder is the tag's), and client state; (None, None) where
            there is none.
        Raises:
            CheckpointError: `checkpoint.load_universal` is on, and there is nothing to load ("ckpt-not-found").
        """
        root, world = os.fspath(load_dir), self.mesh["world"]
        universal = self.load_universal_checkpoint()
        name = name_of_tag(root, tag, world, universal)
        path, client = None, None
        if name is None and not Path(root).is_dir():
            _log.warning("there is no checkpoint directory %s", root)
        else:
            with translated(root, name, self) as copy:
                path, client = super().load_checkpoint(
                    root,
                    copy or name,
                    load_optimizer_states=load_optimizer_states,
                    load_lr_scheduler_states=load_lr_scheduler_states,
                    load_module_only=load_module_only,
                    load_data_state=not load_module_only,
                    strict="model" if load_module_strict else False,
                    load_module=custom_load_fn is None,
                )
        if path is None and universal:
            raise refused("no-universal", root)
        if path is None:
            return None, None
        if custom_load_fn is not None:
            weights = get_fp32_state_dict_from_zero_checkpoint(root, name or os.path.basename(path))
            self.load_module_state_dict(weights, custom_load_fn=custom_load_fn)
        return self._get_ckpt_name(root, name or os.path.basename(path)), client or {}

    def module_state_dict(
        self, destination: Any = None, prefix: str = "", keep_vars: bool = False, exclude_frozen_parameters: bool =
        False,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Return the full state dict: on rank 0 where parameters are sharded, else on every rank.

        Collective where parameters are sharded.
        """
        del destination, keep_vars
        if self.plan.residency.shard_params or self.mesh["tensor"].size > 1:
            full_state = self.full_state_dict(exclude_frozen=exclude_frozen_parameters)
            return {prefix + name: value for name, value in full_state.items()}
        frozen = {name for name, param in self.module.named_parameters() if not param.requires_grad}
        state = self.module.state_dict()
        return {prefix + k: v for k, v in state.items() if not (exclude_frozen_parameters and k in frozen)}

    def load_module_state_dict(
        self, checkpoint: Mapping[str, Any], strict: bool = True, custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False, z3_params_to_fetch: Any = None, allowed_missing_keys: Collection[str] | None = None,
    ) -> None:  # fmt: skip
        """Load a whole state dict, or the `module` of a checkpoint dict, as `load_full_state_dict`. Collective.

        Args:
            fetch_z3_params, z3_params_to_fetch: Change nothing: sharded parameters are always loaded.
            allowed_missing_keys: Of a strict load; others that are missing, or unexpected, are an error afterwards, as upstream's.
        """
        del fetch_z3_params, z3_params_to_fetch
        state = checkpoint.get("module", checkpoint)
        if custom_load_fn is not None:
            released = list(self.module.parameters()) if self.plan.residency.shard_params else []
            with GatheredParameters(released, modifier_rank=0):
                custom_load_fn(src=state, dst=self.module)
            self.sharding.adopt_edits()
            self.sharding.refresh()
        else:
            missing, unexpected = self.load_full_state_dict(state, strict and allowed_missing_keys is None)
            missing = [key for key in missing if key not in (allowed_missing_keys or ())]
            if strict and (missing or unexpected):
                raise refused("keys-differ", missing, unexpected)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """Return the full state dict in the compute dtype on rank 0; None on other ranks. Collective."""
        return self.full_state_dict(exclude_frozen=exclude_frozen_parameters) or None

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """Return the same at every stage; at stage 3 by the method above, which programs replace on an engine (MS-SWIFT's does)."""
        if self.plan.residency.shard_params:
            return self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        return self.full_state_dict(exclude_frozen=exclude_frozen_parameters) or None

    def save_16bit_model(  # type: ignore[override]
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the whole model into one file. At stage 3 only if the configuration asks for gathering, as upstream."""
        if self.plan.residency.shard_params and not self.zero_gather_16bit_weights_on_model_save():
            _log.warning(
                "the model was not saved: zero_optimization.stage3_gather_16bit_weights_on_model_save is false"
            )
            return False
        if self.plan.residency.shard_params:
            state = self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
            save_whole(state or {}, Path(save_dir) / save_filename, self.mesh["world"])
            return True
        return super().save_16bit_model(save_dir, save_filename, exclude_frozen_parameters)

    save_fp16_model = save_16bit_model

    # ---- state that moves, the end
