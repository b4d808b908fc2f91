"""Random-LTD: in training, the middle layers see a random part of the tokens; the others pass them by (Yao et al., arXiv:2211.11586).

Words: *kept* is how many tokens of a sequence a wrapped layer sees; a *routed* layer is one that is wrapped. With t the step,

    kept(t) = floor(t / require_steps * (max - min) + min), down to a multiple of seq_per_step, at most max

and stays at the most it may be once it is there. Every routed layer draws its own tokens, anew in each forward, from torch's generator of
the CPU: a checkpointed layer draws the same again. They keep their order.

    convert_to_random_ltd(model, Block)
    router = start_routing(model, RouterConfig(...))
    for step in ...:
        router.update(step)
        ...                              # the training as ever

Names, parameters, hooks and state dicts of the model stay: a layer's class is replaced by one of the same name whose forward draws.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ds_config.errors import ConfigError
from ds_data.difficulty_schedules import Root

__all__ = [
    "RandomLayerTokenDrop",
    "Router",
    "RouterConfig",
    "convert_to_random_ltd",
    "is_converted",
    "remove_random_ltd_state_dict",
    "save_without_random_ltd",
    "start_routing",
    "stop_routing",
]

_PREFIX = ".random_ltd_layer."  # where DeepSpeed keeps a wrapped layer


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """How tokens are left out.

    Attributes:
        total_layers: Layers of the model, routed or not; only for counting tokens.
        layers: Numbers of the routed layers among those of the class, from 0.
        min_value, max_value: Tokens kept at step 0, and in the end (the length of sequences).
        require_steps: Steps until all are kept.
        seq_per_step: What the number is rounded down to; 8 or 16 suit a GPU.
        mask_name: The forward's keyword for the attention mask; None leaves keywords alone.
        model_type: An encoder's mask [batch, ..., length] or [batch, ..., length, length] is cut for every sample to the tokens
            that were drawn; of a decoder's, which only says the order of tokens, the first kept rows and columns are taken.
        order: Whether hidden states are [batch, length, width] or [length, batch, width].
    Raises:
        ConfigError: numbers that say nothing ("data-routing").
    """

    total_layers: int
    layers: tuple[int, ...]
    min_value: int
    max_value: int
    require_steps: int
    seq_per_step: int = 8
    mask_name: str | None = None
    model_type: Literal["encoder", "decoder"] = "decoder"
    order: Literal["batch_seq_dim", "seq_batch_dim"] = "batch_seq_dim"

    def __post_init__(self) -> None:
        wrong = [
            text
            for bad, text in (
                (not 1 <= self.min_value <= self.max_value, f"min_value {self.min_value}, max_value {self.max_value}"),
                (self.require_steps < 1 or self.seq_per_step < 1, f"{self.require_steps} steps by {self.seq_per_step}"),
                (self.seq_per_step > self.min_value, f"seq_per_step {self.seq_per_step} rounds {self.min_value} to 0"),
                (len(set(self.layers)) != len(self.layers) or not self.layers, f"layers {self.layers}"),
                (
                    any(not 0 <= n < self.total_layers for n in self.layers),
                    f"layers {self.layers} of {self.total_layers}",
                ),
                (self.model_type not in ("encoder", "decoder"), f"model_type {self.model_type}"),
                (self.order not in ("batch_seq_dim", "seq_batch_dim"), f"hidden_state_order {self.order}"),
            )
            if bad
        ]
        if wrong:
            raise ConfigError(
                f"random-LTD: {'; '.join(wrong)}",
                code="data-routing",
                fix="Give 1 <= seq_per_step <= min_value <= max_value, at least 1 step, and layers of the model.",
            )

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> RouterConfig:
        """Build from a section `data_efficiency.data_routing.random_ltd` of DeepSpeed's configuration.

        Raises:
            ConfigError: a key is missing or unknown, or asks for an unsupported feature ("data-routing").
        """
        try:
            schedule = dict(section["random_ltd_schedule"])
            options = dict(schedule["schedule_config"])
            layers, count = tuple(section["random_ltd_layer_id"]), int(section["random_ltd_layer_num"])
            config = cls(
                total_layers=int(section["total_layer_num"]),
                layers=layers,
                min_value=int(schedule["min_value"]),
                max_value=int(schedule["max_value"]),
                require_steps=int(options["require_steps"]),
                seq_per_step=int(options["seq_per_step"]),
                mask_name=section.get("model_mask_name"),
                model_type=section.get("model_type", "decoder"),
                order=section.get("hidden_state_order", "batch_seq_dim"),
            )
        except KeyError as error:
            raise ConfigError(f"random_ltd has no {error}", code="data-routing", fix="Give this key.") from error
        known = {
            "enabled",
            "total_layer_num",
            "random_ltd_layer_num",
            "random_ltd_layer_id",
            "model_mask_name",
            "model_type",
        }
        known |= {
            "hidden_state_order",
            "random_ltd_schedule",
            "layer_token_lr_schedule",
            "global_batch_size",
            "micro_batch_size",
        }
        unknown = sorted(section.keys() - known) + sorted(options.keys() - {"require_steps", "seq_per_step"})
        unknown += sorted(schedule.keys() - {"min_value", "max_value", "schedule_type", "schedule_config"})
        if unknown or schedule.get("schedule_type", "fixed_linear") != "fixed_linear" or count != len(layers):
            raise ConfigError(
                f"random_ltd: unknown keys {unknown}, schedule {schedule.get('schedule_type')}, {count} layers with numbers {layers}",
                code="data-routing",
                fix="Use fixed_linear, the keys of DeepSpeed's section, and one number a layer.",
            )
        if section.get("layer_token_lr_schedule", {}).get("enabled", False):
            raise ConfigError(
                "layer_token_lr_schedule is not built; DeepSpeed refuses it, too",
                code="data-routing",
                fix="Schedule the rate by steps.",
            )
        return config


class Router:
    """What the routed layers of a model share: how many tokens are kept.

    Attributes:
        config: How.
        num_kept: Tokens a routed layer sees now.
        step: Of the last `update`; -1 before the first.
        consumed: Tokens times layers that were computed, as DeepSpeed counts them.
    """

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self._schedule = Root(config.min_value, config.max_value, config.require_steps, config.seq_per_step)
        self.num_kept, self.step, self.consumed = config.min_value, -1, 0

    def update(self, step: int, samples: int = 0) -> int:
        """Go to a step; `samples` of its global batch are added to what was consumed. Returns the tokens kept."""
        if self.num_kept < self.config.max_value:
            self.num_kept = self._schedule(step)
        if step != self.step:
            self.step, routed = step, len(self.config.layers)
            unrouted = self.config.max_value * (self.config.total_layers - routed)
            self.consumed += samples * (self.num_kept * routed + unrouted)
        return self.num_kept

    def draw(self, batch: int, length: int, device: torch.device) -> Tensor:
        """Draw the tokens of each sample, int64 [batch, kept], rising; every set of tokens is equally likely."""
        return torch.rand(batch, length, device="cpu").argsort(1)[:, : self.num_kept].sort(1).values.to(device)

    def state_dict(self) -> dict[str, int]:
        """Return the state to resume from. JSON-able."""
        return {"kept": self.num_kept, "step": self.step, "consumed": self.consumed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a saved state."""
        self.num_kept, self.step, self.consumed = int(state["kept"]), int(state["step"]), int(state["consumed"])


class RandomLayerTokenDrop(nn.Module):
    """What a converted layer is besides its own class: in training, it sees some of the tokens. The others pass unchanged.

    The layer's first argument are its hidden states; it returns hidden states of the same shape, alone or first in a tuple.
    Positions that a layer computes itself (rotary tables passed as keywords) belong to the places before the draw: give them to
    the model's beginning, not to routed layers.

    Attributes:
        random_ltd_router: Shared by the routed layers of a model; None: this one sees all tokens.
    """

    random_ltd_router: Router | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on a random part of the tokens in training; the rest bypass the layer.

        [batch, length, width] (or length first) -> the same shape, with the further outputs of the layer.
        """
        router, plain = self.random_ltd_router, super().forward
        if router is None or not self.training:
            return plain(hidden_states, *args, **kwargs)
        config, axis = router.config, int(router.config.order == "batch_seq_dim")
        length = hidden_states.shape[axis]
        if router.num_kept >= length:
            return plain(hidden_states, *args, **kwargs)
        places = router.draw(hidden_states.shape[1 - axis], length, hidden_states.device)
        if config.mask_name is not None and kwargs.get(config.mask_name) is not None:
            kwargs[config.mask_name] = _cut_mask(kwargs[config.mask_name], places, length, config.model_type)
        index = (places if axis else places.t())[:, :, None].expand(-1, -1, hidden_states.shape[2])
        out = plain(hidden_states.gather(axis, index), *args, **kwargs)
        first, rest = (out[0], out[1:]) if isinstance(out, tuple) else (out, None)
        whole = hidden_states.to(first.dtype).scatter(axis, index, first)
        return whole if rest is None else (whole, *rest)


def convert_to_random_ltd(model: nn.Module, layer: type[nn.Module]) -> nn.Module:
    """Make all layers of a class routable, in place; they see all tokens until `start_routing`. Returns the model.

    Raises:
        ConfigError: the model has no such layer, it is converted already, or a layer's forward is not its class's ("data-routing").
    """
    layers = [module for module in model.modules() if isinstance(module, layer)]
    problem = (
        f"has no {layer.__name__} within it" if not layers or model in layers
        else f"is converted already ({layer.__name__})" if any(isinstance(module, RandomLayerTokenDrop) for module in layers)
        else f"has a {layer.__name__} whose forward was replaced" if any("forward" in vars(module) for module in layers)
        else None
    )  # fmt: skip
    if problem is not None:
        raise ConfigError(
            f"the model {problem}",
            code="data-routing",
            fix="Convert a model once, with the class of its repeated layers.",
        )
    kinds: dict[type[nn.Module], type[nn.Module]] = {}
    for module in layers:
        plain = type(module)
        if plain not in kinds:
            space = {"__module__": plain.__module__, "__doc__": plain.__doc__}
            kinds[plain] = type(plain.__name__, (RandomLayerTokenDrop, plain), space)
        module.__class__ = kinds[plain]
    return model


def is_converted(model: nn.Module) -> bool:
    """Return whether the model has layers that `start_routing` can route tokens around."""
    return any(isinstance(module, RandomLayerTokenDrop) for module in model.modules())


def start_routing(model: nn.Module, config: RouterConfig | Router) -> Router:
    """Route only a part of the tokens through the layers that the configuration names, from now on.

    Layers are counted in the order of the model. A router given instead of a configuration goes on from its step.

    Raises:
        ConfigError: the model's layers were not converted, or the model has fewer ("data-routing").
    """
    router = config if isinstance(config, Router) else Router(config)
    layers = [module for module in model.modules() if isinstance(module, RandomLayerTokenDrop)]
    if not layers or max(router.config.layers) >= len(layers):
        raise ConfigError(
            f"the model has {len(layers)} layers that can be routed; asked for {router.config.layers}",
            code="data-routing",
            fix="Call convert_to_random_ltd(model, the class of its layers) first, and name layers counted from 0.",
        )
    for number in router.config.layers:
        layers[number].random_ltd_router = router
    return router


def stop_routing(model: nn.Module) -> None:
    """Route all tokens through all layers again."""
    for module in model.modules():
        if isinstance(module, RandomLayerTokenDrop):
            module.random_ltd_router = None


def remove_random_ltd_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Rename tensors that DeepSpeed saved from a wrapped model to the plain model's names; nested mappings too."""
    return {
        name.replace(_PREFIX, "."): remove_random_ltd_state_dict(value) if isinstance(value, Mapping) else value
        for name, value in state_dict.items()
    }


def save_without_random_ltd(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of a routed model under the plain model's names: these layers have no wrapper."""
    return remove_random_ltd_state_dict(model.state_dict())


def _cut_mask(mask: Tensor, places: Tensor, length: int, model_type: str) -> Tensor:
    """Cut a mask whose last one or two dimensions are `length` to the tokens at `places`."""
    num_kept = places.shape[1]
    both = mask.dim() > 2 and mask.shape[-2] == length  # rows, too; [batch, 1, 1, length] has columns only
    if model_type == "decoder":
        cut = mask[..., :num_kept]
        return cut[..., :num_kept, :] if both else cut
    if mask.shape[0] == 1 and places.shape[0] > 1:
        mask = mask.expand(places.shape[0], *mask.shape[1:])
    shape = [places.shape[0]] + [1] * (mask.dim() - 2) + [num_kept]
    columns = places.view(shape).expand(*mask.shape[:-1], num_kept)
    cut = mask.gather(-1, columns)
    if not both:
        return cut
    rows = places.view([*shape[:-2], num_kept, 1]).expand(*cut.shape[:-2], num_kept, num_kept)
    return cut.gather(-2, rows)
