"""AdamW of selected columns: equal to torch's where all are selected, and nothing else moves where not."""

import pytest
import torch
from deepspeed.ops.adam import ZenFlowSelectiveAdamW, ZenFlowSelectiveAdamW_stage3


def _select(param, indices, grad, stage3):
    param.selected_indices = torch.tensor(indices)
    chosen = grad[:, indices]
    param.selected_grad = chosen.T.clone() if stage3 else chosen.clone()


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("stage3", [False, True])
def test_selected_columns_move_as_with_adamw(offload, stage3):
    torch.manual_seed(0)
    param, reference = (torch.nn.Parameter(torch.arange(8.0).reshape(2, 4)) for _ in range(2))
    if stage3:
        param.ds_shape, param.ds_tensor = (4, 2), param.detach().T.flatten()
        param.complete_column_offset, param.complete_numel, param.group_id = 0, 8, 0
    shape = (2, 2)
    param.exp_avg_cpu_data, param.exp_avg_sq_cpu_data = torch.zeros(shape), torch.zeros(shape)
    ours = (ZenFlowSelectiveAdamW_stage3 if stage3 else ZenFlowSelectiveAdamW)([param], lr=0.1, offload=offload)
    torchs = torch.optim.AdamW([reference], lr=0.1)

    def weight():
        return param.ds_tensor.view(4, 2).T if stage3 else param.data

    before = weight().clone()
    for round_ in range(3):
        grad = torch.randn(2, 4)
        _select(param, [1, 3], grad, stage3)
        ours.temp_copy_param([param] if stage3 else {0: [param]})
        weight().mul_(1.5)  # somebody else's update, which what is selected does not take
        reference.grad = grad
        torchs.step()
        if round_:
            ours.step()
        else:
            weight()[:, [1, 3]] = param.temp_selected_param.T if stage3 else param.temp_selected_param
            ours.group_step([param] if stage3 else {0: [param]})
    torch.testing.assert_close(weight()[:, [1, 3]], reference.data[:, [1, 3]])
    torch.testing.assert_close(weight()[:, [0, 2]], before[:, [0, 2]] * 1.5**3)
    assert (param.selected_grad, param.temp_selected_param) == (None, None)
    ours.clear_selected_mv()
    moments = param.exp_avg_cpu_data if offload else ours.state[param]["exp_avg"]
    assert not moments.any()


def test_cores_are_split_between_training_and_the_optimizer():
    from deepspeed.runtime.zenflow.zenflow_utils import _split_affinity

    assert _split_affinity([4, 5, 6, 7, 8], 0.25) == ([6, 7, 8], [4, 5])
    assert _split_affinity([4, 5], 1.0) == _split_affinity([4, 5], 0.0) == ([4, 5], [4, 5])
