"""AdamW of the columns of each weight that matter most, the half of ZenFlow that a program can run by itself (arXiv 2505.12242).

Who selects gives each parameter `selected_indices`, and before every step `selected_grad`, the gradient there. A vector is always
selected whole. `temp_copy_param` remembers what is selected in `temp_selected_param`, for while others write to the weight; `step` begins
with it. With `offload` the moments are `exp_avg_cpu_data` and `exp_avg_sq_cpu_data` of the parameter, else of the optimizer's state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw


class ZenFlowSelectiveAdamW(torch.optim.AdamW):
    """Updates the selected columns of `param.data`, [rows, columns].

    Args:
        offload: The moments stay on the host between updates.
        bucket_size: Ignored: parameters are updated one by one.
    """

    def __init__(self, *args: Any, offload: bool = False, bucket_size: float = 5e8, **options: Any) -> None:
        del bucket_size
        super().__init__(*args, **options)
        self.offload = offload
        self.step = self._step_with_offload if offload else self._step_without_offload  # type: ignore[assignment, method-assign]

    @torch.no_grad()
    def _step_without_offload(self) -> None:
        """Update all that have a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                self._update(param, group, restore=True)

    _step_with_offload = torch.no_grad()(lambda self: self._step_without_offload())

    @torch.no_grad()
    def group_step(self, group_to_paramlist: Mapping[int, Sequence[Tensor]]) -> None:
        """Update these parameters, by the index of their group, as they are now."""
        for group, params in group_to_paramlist.items():
            for param in params:
                self._update(param, self.param_groups[group], restore=False)

    @torch.no_grad()
    def temp_copy_param(self, group_to_paramlist: Mapping[int, Sequence[Tensor]]) -> None:
        """Remember what is selected."""
        for params in group_to_paramlist.values():
            self._remember(params)

    def clear_selected_mv(self) -> None:
        """Begin with moments of 0: other columns are selected from now on."""
        for param, state in self.state.items():
            for moment in self._moments(param) if self.offload else (state["exp_avg"], state["exp_avg_sq"]):
                moment.zero_()

    def copy_mv_from_cpu(self, params: Iterable[Any]) -> None:
        """Bring the moments to the device, as `exp_avg` and `exp_avg_sq`."""
        for param in params:
            param.exp_avg, param.exp_avg_sq = (
                moment.to(param.device, non_blocking=True) for moment in self._moments(param)
            )

    def copy_mv_to_cpu(self, params: Iterable[Any]) -> None:
        """Bring them back."""
        for param in params:
            for kept, moment in zip(self._moments(param), (param.exp_avg, param.exp_avg_sq), strict=True):
                kept.copy_(moment, non_blocking=True)
            param.exp_avg = param.exp_avg_sq = None

    @staticmethod
    def _moments(param: Any) -> tuple[Tensor, Tensor]:
        return param.exp_avg_cpu_data, param.exp_avg_sq_cpu_data

    @contextmanager
    def _weight(self, param: Any, writes: bool) -> Iterator[tuple[Tensor, Any]]:
        """Give the weight, and the index of what is selected in it."""
        yield param.data, (slice(None), param.selected_indices) if param.dim() > 1 else ...

    def _remember(self, params: Iterable[Any]) -> None:
        for param in params:
            if getattr(param, "selected_grad", None) is not None:
                with self._weight(param, writes=False) as (weight, index):
                    chosen = weight[index].clone()
                param.temp_selected_param = chosen.cpu() if self.offload else chosen

    def _update(self, param: Any, group: Mapping[str, Any], restore: bool) -> None:
        grad = getattr(param, "selected_grad", None)
        if grad is None:
            return
        with self._weight(param, writes=True) as (weight, index):
            remembered = getattr(param, "temp_selected_param", None) if restore else None
            chosen = (weight[index] if remembered is None else remembered).to(grad.device, weight.dtype, copy=True)
            state = self.state[param]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=grad.device)
                names = ["exp_avg", "exp_avg_sq"] * (not self.offload) + ["max_exp_avg_sq"] * group["amsgrad"]
                state.update((name, torch.zeros_like(chosen)) for name in names)
            if self.offload:
                self.copy_mv_from_cpu([param])
            moments = (param.exp_avg, param.exp_avg_sq) if self.offload else (state["exp_avg"], state["exp_avg_sq"])
            first, second = (moment.view_as(chosen) for moment in moments)
            most = [state["max_exp_avg_sq"]] if group["amsgrad"] else []
            beta1, beta2 = group["betas"]
            settings = {name: group[name] for name in ("amsgrad", "lr", "weight_decay", "eps", "maximize")}
            adamw([chosen], [grad], [first], [second], most, [state["step"]], beta1=beta1, beta2=beta2, **settings)
            weight[index] = chosen.to(weight.device)
        if self.offload:
            self.copy_mv_to_cpu([param])
        if restore:
            param.temp_selected_param = None
        param.selected_grad = None


class ZenFlowSelectiveAdamW_stage3(ZenFlowSelectiveAdamW):  # noqa: N801  upstream's spelling
    """Updates the selected rows of a rank's part of each weight, `param.ds_tensor`, which lies transposed: `ds_shape` is [columns, rows].

    Of the flat part, `complete_numel` elements from `complete_column_offset` on are whole rows. A part on a disk is brought in by
    `param.nvme_swapper` for as long as it is used.
    """

    @torch.no_grad()
    def group_step(self, paramlist: Iterable[Any]) -> None:
        """Update these parameters, of the groups `group_id`; what a part elsewhere was remembered as is what is updated."""
        for param in paramlist:
            self._update(param, self.param_groups[param.group_id], restore=self._is_away(param))

    @torch.no_grad()
    def temp_copy_param(self, paramlist: Iterable[Any]) -> None:
        """Remember what is selected."""
        self._remember(paramlist)

    @staticmethod
    def _is_away(param: Any) -> bool:
        grad = getattr(param, "selected_grad", None)
        return grad is not None and (param.ds_tensor.dim() == 0 or param.ds_tensor.device != grad.device)

    @contextmanager
    def _weight(self, param: Any, writes: bool) -> Iterator[tuple[Tensor, Any]]:
        on_disk = param.ds_tensor.dim() == 0
        if on_disk:
            param.nvme_swapper.swap_in([param], async_op=False)
        data, indices = param.ds_tensor.data, ...
        if len(param.ds_shape) > 1:
            data = data.narrow(0, param.complete_column_offset, param.complete_numel).view(-1, param.ds_shape[1])
            indices = param.selected_indices.to(data.device)
        yield data, indices
        if on_disk and writes:
            param.nvme_swapper.swap_out_and_release([param])
        elif on_disk:
            param.nvme_swapper.remove_partition_and_release_buffers([param])


def split_affinity(cores: list[int], pt_reserved_cores_perc: float) -> tuple[list[int], list[int]]:
    """Split cores between an optimizer that runs by the side and the training, which gets the first ones; all for both where one would get none."""
    kept = math.ceil(pt_reserved_cores_perc * len(cores))
    return (cores[kept:], cores[:kept]) if 0 < kept < len(cores) else (cores, cores)
