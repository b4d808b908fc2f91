"""The private torch names this package uses, in one place."""

from __future__ import annotations

import torch

__all__ = [
    "foreach_add",
    "foreach_add_",
    "foreach_addcdiv_",
    "foreach_addcmul_",
    "foreach_clamp_max_",
    "foreach_clamp_min_",
    "foreach_copy_",
    "foreach_div_",
    "foreach_lerp_",
    "foreach_maximum_",
    "foreach_mul",
    "foreach_mul_",
    "foreach_norm",
    "foreach_sqrt",
    "foreach_sqrt_",
    "foreach_zero_",
    "fused_adam_",
    "fused_adamw_",
    "grouped_mm",
    "scaled_dot_product_flash_attention",
    "scaled_dot_product_flash_attention_backward",
    "scaled_dot_product_flash_attention_for_cpu",
    "scaled_dot_product_flash_attention_for_cpu_backward",
]

foreach_add = torch._foreach_add
foreach_add_ = torch._foreach_add_
foreach_addcdiv_ = torch._foreach_addcdiv_
foreach_addcmul_ = torch._foreach_addcmul_
foreach_clamp_max_ = torch._foreach_clamp_max_
foreach_clamp_min_ = torch._foreach_clamp_min_
foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
foreach_lerp_ = torch._foreach_lerp_
foreach_maximum_ = torch._foreach_maximum_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sqrt = torch._foreach_sqrt
foreach_sqrt_ = torch._foreach_sqrt_
foreach_zero_ = torch._foreach_zero_
fused_adam_ = torch._fused_adam_
fused_adamw_ = torch._fused_adamw_
grouped_mm = torch._grouped_mm
scaled_dot_product_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention
scaled_dot_product_flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
scaled_dot_product_flash_attention_for_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
scaled_dot_product_flash_attention_for_cpu_backward = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
)
