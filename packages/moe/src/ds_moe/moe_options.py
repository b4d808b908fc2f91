"""What `MoE` can do beyond the parameters that it shares with DeepSpeed's layer."""

from __future__ import annotations

from dataclasses import dataclass

from ds_config.option_checks import check_options

__all__ = ["MoEOptions"]


@dataclass(frozen=True, slots=True)
class MoEOptions:
    """Options of an `MoE` layer. The defaults are the layer of DeepSpeed.

    Attributes:
        grouped: Compute all experts of a rank by one grouped product a linear layer (Gale et al. 2022), not one expert after the other. Experts are an
            `nn.Sequential` of `nn.Linear` and elementwise activations.
        draw_apart: Experts begin with values of their own, each as its modules' `reset_parameters` draws them, the same ones on any
            number of ranks. Otherwise all begin as copies of `expert`.
        expert_choice: Experts choose tokens, not tokens experts (Zhou et al. 2022): each takes the even share of tokens times k and the capacity
            factor. Not for decoders that generate: the choice looks at later tokens.
        z_loss: Add so many times the z-loss (Zoph et al. 2022) to the layer's loss: relative to the balance loss, which the model weighs.
        bias_rate: Balance without a loss (Wang et al. 2024): experts are chosen by scores plus a bias, which `ds_moe.balance_experts` moves by
            this much a step, towards the experts with few tokens. 0: no bias.
    """

    grouped: bool = False
    draw_apart: bool = False
    expert_choice: bool = False
    z_loss: float = 0.0
    bias_rate: float = 0.0

    def __post_init__(self) -> None:
        check_options(self, z_loss=">= 0", bias_rate=">= 0")
