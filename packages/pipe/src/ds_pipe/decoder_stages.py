"""Stages of Hugging Face decoder models, without rewriting them: every stage runs the model's own forward over fewer layers.

The decoder of such a model (`model.base_model`) embeds, loops over a list of layers and normalises. A stage is a copy of that
module object (not of its weights) whose list has only its layers, whose norm is there on the last stage and whose embedding and
positions are there on the first; others are given what the stage before made of `inputs_embeds`. Masks and rotary embeddings are
made by the model's own code, on every stage.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ds_config.errors import UnsupportedError
from ds_pipe.building import annotate_params, broadcast_ties, tie
from ds_pipe.partition import balanced, uniform
from ds_pipe.programs import PipelineSpec, placement_of
from ds_pipe.recompute import Backwards, checkpointed
from ds_pipe.staged import StagedModel
from ds_pipe.topology import PipelineGroups, ProcessTopology, plain_topology

__all__ = ["DecoderStages"]

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
_CARRIED = ("attention_mask", "position_ids")


class DecoderStages(nn.Module):
    """The stages of this rank of a `...ForCausalLM` model of transformers.

    Inputs are dicts with `input_ids` and, if wanted, `attention_mask` and `position_ids`; labels are those of transformers: the
    loss is the model's own `loss_function`. Models with experts are cut as long as their loss has no part of their routers.

    Args:
        model: Whole, the same on every rank, on any device (also meta: then weights are loaded after it was cut). Taken apart: it
            is not to be used afterwards.
        num_stages: Ranks of one pipeline. Or give `topology`.
        topology: Ranks by axes, one of which is `pipe`.
        schedule: Decides how many stages a rank has.
        virtual: Stages a rank, for `interleaved`.
        partition_method: `uniform` or `parameters` over layers; embedding and head count as parameters only.
        loss_fn: `loss_fn(logits, labels)`, of whatever labels the data yield, instead of the model's own: the tokens of a part of a
            sequence, for instance.
    Raises:
        UnsupportedError: a model of another kind, or one whose layers are of several kinds ("pipe-decoder").
        PlanError: fewer layers than stages ("pipe-layers"), or ranks that do not fit ("pipe-topology").
    Collective over the world.
    """

    def __init__(
        self,
        model: nn.Module,
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        *,
        schedule: str = "1f1b",
        virtual: int = 2,
        partition_method: str = "uniform",
        loss_fn: Callable[[Tensor, Any], Any] | None = None,
    ) -> None:
        super().__init__()
        _check(model)
        whole: Any = model
        places = PipelineGroups.build(topology or plain_topology(num_stages))
        self.pipe_staging = PipelineSpec(schedule, places.pipe.size, virtual, partition_method)
        rank_of = placement_of(schedule, places.pipe.size, virtual)
        self.parts = _bounds(whole, partition_method, len(rank_of))
        stages = [s for s, r in enumerate(rank_of) if r == places.pipe.rank]
        self.loss_function, self.vocab_size = whole.loss_function, whole.config.vocab_size
        self.config = whole.config
        parts = {
            s: _DecoderPart(whole, (self.parts[s], self.parts[s + 1]), s == 0, s + 1 == len(rank_of)) for s in stages
        }
        for s, part in parts.items():
            self.add_module(f"stage{s}", part)
        names = {id(p): name for name, p in model.named_parameters()}
        local = {name: names[id(p)] for name, p in self.named_parameters()}
        holders = {}
        if whole.get_output_embeddings().weight is whole.get_input_embeddings().weight:
            holders[names[id(whole.get_input_embeddings().weight)]] = [rank_of[0], rank_of[-1]]
        tied_params = {local[name]: p for name, p in self.named_parameters() if local[name] in holders}
        ties = tie(places, holders, tied_params)
        if not any(p.is_meta for p in self.parameters()):
            broadcast_ties(ties)
        self._staged = StagedModel(self, parts, rank_of, places, loss_fn or self.loss, local, ties)
        annotate_params(self._staged)

    @property
    def staged(self) -> StagedModel:
        """For `ds_pipe.pipeline`."""
        return self._staged

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the original model's loss: labels are shifted by one position, -100 does not count."""
        value: Tensor = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size)
        return value

    def set_checkpoint_interval(self, interval: int) -> None:
        """Enable activation checkpointing of whole stages for an interval above 0.

        Each stage then saves only its input and recomputes its forward in the backward.
        """
        for part in self._staged.parts.values():
            part.again = interval > 0  # type: ignore[assignment]

    def forward(self, value: Any) -> Any:
        """Run the stages of this rank, one after the other: the whole model where there is one rank."""
        for part in self._staged.parts.values():
            value = part(value)
        return value


class _DecoderPart(nn.Module):
    def __init__(self, model: Any, layers: tuple[int, int], first: bool, last: bool) -> None:
        super().__init__()
        self.first, self.last, self.again = first, last, False
        self.backwards: Backwards | None = None  # the Stage that runs it says
        decoder = copy.copy(model.base_model)
        decoder._modules = dict(decoder._modules)
        for name, module in list(decoder._modules.items()):
            if isinstance(module, nn.ModuleList):
                decoder._modules[name] = nn.ModuleList(list(module)[layers[0] : layers[1]])
            elif module is model.get_input_embeddings():
                decoder._modules[name] = module if first else None
            elif name in ("norm", "ln_f"):
                decoder._modules[name] = module if last else nn.Identity()
            elif name == "wpe":
                decoder._modules[name] = module if first else _Nothing()
            elif name == "drop":
                decoder._modules[name] = module if first else nn.Identity()
        self.decoder: nn.Module = decoder
        head = model.get_output_embeddings() if last else None
        # Under its own name, by which rules of tensor parallelism and the user's know it.
        self.head_name = next((name for name, module in model.named_children() if module is head), "head")
        self.add_module(self.head_name, head)

    def forward(self, value: Mapping[str, Any]) -> Any:
        if self.again and self.backwards is not None and torch.is_grad_enabled():
            return checkpointed(self._run, dict(value), self.backwards)
        return self._run(value)

    def _run(self, value: Mapping[str, Any]) -> Any:
        carried = {name: value.get(name) for name in _CARRIED}
        source = {"input_ids": value["input_ids"]} if self.first else {"inputs_embeds": value["hidden"]}
        hidden = self.decoder(**source, **carried, use_cache=False).last_hidden_state
        return getattr(self, self.head_name)(hidden) if self.last else {"hidden": hidden, **carried}


class _Nothing(nn.Module):
    """Positions that were added on the first stage."""

    def forward(self, positions: Tensor) -> Tensor:
        return torch.zeros((), device=positions.device)


def _check(model: nn.Module) -> None:
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    kinds = set(getattr(config, "layer_types", None) or ["one"])
    head = getattr(model, "get_output_embeddings", lambda: None)()
    routed = bool(getattr(config, "output_router_logits", False))
    if kind not in _FAMILIES or len(kinds) > 1 or head is None or routed:
        what = f"layers of kinds {sorted(kinds)}" if len(kinds) > 1 else "no output head" if kind in _FAMILIES else kind
        what = "a loss of its routers (output_router_logits)" if routed else what
        raise UnsupportedError(
            f"a decoder model with {what} is not cut into stages",
            code="pipe-decoder",
            fix=f"Use a ForCausalLM model of {', '.join(_FAMILIES)} with layers of one kind, or a PipelineModule of its layers.",
        )


def _bounds(model: Any, method: str, parts: int) -> tuple[int, ...]:
    layers: nn.ModuleList = next(m for m in model.base_model.children() if isinstance(m, nn.ModuleList))
    if method == "uniform":
        return uniform(len(layers), parts)
    if method != "parameters":
        raise UnsupportedError(
            f"partition_method {method!r} of a decoder model", code="pipe-decoder", fix="Use uniform or parameters."
        )
    weights = [float(sum(p.numel() for p in layer.parameters())) for layer in layers]
    weights[0] += sum(p.numel() for p in model.get_input_embeddings().parameters())
    weights[-1] += sum(p.numel() for p in model.get_output_embeddings().parameters())
    return balanced(weights, parts)
