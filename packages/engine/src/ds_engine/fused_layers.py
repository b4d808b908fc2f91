"""Norms, rotary embedding, gated MLPs and heads of transformers models, computed by fused kernels.

A module whose formula is known gets a `forward` of its own, which computes the same formula by a `FusedKernels`; its parameters, names and
class stay. Under `torch.compile` all but the head run the model's own code, which the compiler fuses.

Formulas: RMS norm (Zhang and Sennrich 2019), rotary embedding (Su et al. 2021), SwiGLU and GeGLU (Shazeer 2020). A head computes the loss
without logits of all tokens: in training, a forward with labels returns `logits=None`.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from types import FunctionType, MethodType
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from ds_engine.fused_kernels import FusedKernels
from ds_engine.model_sections import FusedKind

__all__ = ["FusedLayers", "fuse_layers"]

Forward = Callable[..., Any]

_ROUNDED_FIRST = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
_OFFSET = ("gemma", "gemma2", "gemma3")
_FAMILIES = (*_ROUNDED_FIRST, *_OFFSET)
_ROTARY = "apply_rotary_pos_emb"
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu-tanh"}


@dataclass(slots=True)
class FusedLayers:
    """Modules of a model that compute by fused kernels, until `restore`.

    Attributes:
        counts: Layers by kind, all kinds included that were looked for.
        forwards: Each module and the forward that it was given.
    """

    counts: dict[FusedKind, int]
    forwards: list[tuple[nn.Module, MethodType]] = field(default_factory=list)

    def restore(self) -> None:
        """Give every module its class's forward again; a forward that somebody else set since stays."""
        for module, forward in self.forwards:
            if module.__dict__.get("forward") is forward:
                del module.forward
        self.forwards.clear()


def fuse_layers(model: nn.Module, kinds: Collection[FusedKind], kernels: FusedKernels) -> FusedLayers:
    """Let the modules of `model` whose formula is known compute by `kernels`.

    A module that has a forward of its own already (a wrapper's) is left alone.
    """
    layers = FusedLayers({kind: 0 for kind in get_args(FusedKind) if kind in kinds})
    for module in model.modules():
        family = _family_of(module)
        if family is None or "forward" in module.__dict__:
            continue
        for kind in layers.counts:
            built = _BUILDERS[kind](module, family, kernels)
            layers.counts[kind] += bool(built)
            for target, forward in built:
                # A method, not a closure over the module: a copy of the model computes with its own weights.
                method = MethodType(forward, target)
                target.forward = method
                layers.forwards.append((target, method))
    return layers


def _family_of(module: nn.Module) -> str | None:
    """Return transformers' name of the family whose code `module` runs; None: of none that is known here."""
    name = type(module).__module__
    family = name.removeprefix("transformers.models.").partition(".")[0]
    return family if name.startswith("transformers.models.") and family in _FAMILIES else None


Built = list[tuple[nn.Module, Forward]]


def _norms(module: nn.Module, family: str, kernels: FusedKernels) -> Built:
    eps = getattr(module, "eps" if family in _OFFSET else "variance_epsilon", None)
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(eps, float):
        return []
    offset, class_forward = (1.0 if family in _OFFSET else 0.0), type(module).forward

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return class_forward(self, hidden_states)
        # A weight in a wider format makes the result of Llama's norm as wide.
        wide = hidden_states if offset else hidden_states.to(_promoted(hidden_states, self.weight))
        return kernels.norm(wide, self.weight, eps, offset)

    return [(module, forward)]


def _promoted(x: Tensor, weight: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, weight.dtype)


def _rotary(module: nn.Module, family: str, kernels: FusedKernels) -> Built:
    del family
    code = _rotary_caller(type(module))
    if code is None:
        return []
    class_forward, plain = type(module).forward, code.__globals__[_ROTARY]

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        whole = cos.dim() == 3 and q.shape[-1] == k.shape[-1] == cos.shape[-1]
        if args or kwargs or not whole:
            return plain(q, k, cos, sin, *args, **kwargs)
        return kernels.rotary(q, k, cos, sin)

    # The function is a global of the family's module, which is not ours to change: a copy of the method sees another one.
    fused = FunctionType(
        code.__code__, {**code.__globals__, _ROTARY: rotary}, code.__name__, code.__defaults__, code.__closure__
    )
    fused.__kwdefaults__ = code.__kwdefaults__

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return class_forward(self, *args, **kwargs) if torch.compiler.is_compiling() else fused(self, *args, **kwargs)

    return [(module, forward)]


def _rotary_caller(kind: type[nn.Module]) -> FunctionType | None:
    """Return the forward of an attention that rotates its queries and keys, without decorators."""
    class_forward = inspect.unwrap(kind.forward)
    if not kind.__name__.endswith("Attention") or not isinstance(class_forward, FunctionType):
        return None
    return (
        class_forward if _ROTARY in class_forward.__code__.co_names and _ROTARY in class_forward.__globals__ else None
    )


def _gated_mlp(module: nn.Module, family: str, kernels: FusedKernels) -> Built:
    del family
    config: Any = getattr(module, "config", None)
    word = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    activation = _ACTIVATIONS.get(str(word))
    parts = ("gate_proj", "up_proj", "down_proj", "act_fn")
    if not type(module).__name__.endswith("MLP") or activation is None or not all(hasattr(module, p) for p in parts):
        return []
    if type(module.act_fn) is not type(_activation_module(str(word))):
        return []
    class_forward = type(module).forward

    def forward(self: Any, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return class_forward(self, x)
        return self.down_proj(kernels.gated(self.gate_proj(x), self.up_proj(x), activation))

    return [(module, forward)]


def _activation_module(word: str) -> nn.Module:
    """Return transformers' module of an activation; the configuration's word is not always what an MLP was made with."""
    return importlib.import_module("transformers.activations").ACT2FN[word]


def _head(module: nn.Module, family: str, kernels: FusedKernels) -> Built:
    del family
    head: Any = getattr(module, "lm_head", None)
    if not type(module).__name__.endswith("ForCausalLM") or type(head) is not nn.Linear or "forward" in head.__dict__:
        return []
    if not isinstance(getattr(module, "model", None), nn.Module) or _softcap(module):
        return []
    return [(module, _causal_forward(type(module))), (head, _head_forward(kernels))]


def _softcap(module: Any) -> bool:
    return getattr(module.config, "final_logit_softcapping", None) is not None


def _head_forward(kernels: FusedKernels) -> Forward:
    """Build the forward of a head: a linear layer, which with labels returns the sum of their losses.

    The loss is made inside the module's call, where hooks have its weight in memory.
    """

    def forward(self: Any, x: Tensor, labels: Tensor | None = None, ignore_index: int = -100) -> Tensor:
        if labels is None:
            return functional.linear(x, self.weight, self.bias)
        return kernels.head(x.flatten(0, -2), self.weight, self.bias, labels.flatten(), ignore_index)

    return forward


def _causal_forward(kind: type[nn.Module]) -> Forward:
    """Build the forward of a causal model, which in training gives the labels to the head."""
    class_forward = kind.forward
    names = list(inspect.signature(inspect.unwrap(class_forward)).parameters)[1:]
    scope = vars(sys.modules[kind.__module__])
    result: Any = scope.get("MoeCausalLMOutputWithPast") or scope["CausalLMOutputWithPast"]
    balancing: Any = scope.get("load_balancing_loss_func")
    entries = tuple(entry.name for entry in fields(result))
    loss_function = importlib.import_module("transformers.loss.loss_utils").ForCausalLMLoss

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        plain = (
            not (self.training and torch.is_grad_enabled())
            or named.get("labels") is None
            or isinstance(named.get("logits_to_keep", 0), Tensor)
            or named.get("logits_to_keep", 0)
            or named.get("return_dict") is False
            or self.loss_function is not loss_function
        )
        if plain:
            return class_forward(self, *args, **kwargs)
        labels, _ = named.pop("labels"), named.pop("logits_to_keep", None)
        routers = balancing is not None and (
            self.config.output_router_logits
            if named.get("output_router_logits") is None
            else named["output_router_logits"]
        )
        outputs = self.model(**{**named, **({"output_router_logits": True} if routers else {})})
        values = {name: getattr(outputs, name, None) for name in entries}
        loss = _loss(self.lm_head, outputs.last_hidden_state, labels, named)
        if routers:
            aux_loss = values["aux_loss"] = balancing(
                outputs.router_logits, self.num_experts, self.num_experts_per_tok, named.get("attention_mask")
            )
            loss = loss + self.router_aux_loss_coef * aux_loss.to(loss.device)
        return result(**{**values, "loss": loss, "logits": None})

    return forward


def _loss(head: nn.Module, hidden: Tensor, labels: Tensor, named: Mapping[str, Any]) -> Tensor:
    """Compute transformers' loss of a causal model: token n predicts token n + 1; a mean, or a sum over a given number."""
    ignore_index = named.get("ignore_index", -100)
    shifted = named.get("shift_labels")
    if shifted is None:
        shifted = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    shifted = shifted.to(hidden.device)
    total: Tensor = head(hidden, shifted, ignore_index)
    items = named.get("num_items_in_batch")
    if items is None:
        return total / (shifted != ignore_index).sum()
    return total / (items.to(total.device) if isinstance(items, Tensor) else items)


_BUILDERS: Mapping[FusedKind, Callable[[nn.Module, str, FusedKernels], Built]] = {
    "norms": _norms,
    "rotary": _rotary,
    "gated_mlp": _gated_mlp,
    "head": _head,
}
