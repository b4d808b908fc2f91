"""How a Hugging Face module remembers from token to token: keys and values, states, or both.

Where its states are differs from model to model, so this is learnt from its configuration and from one token:

    in layers of transformers' cache     Mamba, Jamba, Zamba, Qwen3-Next, LFM2 and most others
    in attributes of its modules         RecurrentGemma
    in an argument and a result          RWKV, xLSTM

`RecurrentState` makes the *past* that a forward is given and takes the states out of it afterwards, always as a list of tensors [G, ...].
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from ds_config.errors import UnsupportedError

__all__ = ["RecurrentState", "strange"]

# A forward of several tokens begins with the states that these were given. The scans of the others (Mamba 1 and its kin) begin
# with zeros whatever they are given, so that tokens which follow others need a forward each.
_CONTINUES = frozenset(
    {
        "bailing_hybrid",
        "bamba",
        "falcon_h1",
        "granitemoehybrid",
        "inkling_text",
        "kimi_linear",
        "lara_mini",
        "lfm2",
        "lfm2_moe",
        "lfm3",
        "mamba2",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "rwkv",
        "xlstm",
        "zamba2",
        "zaya",
    }
)
# The forward of one token mixes the sequences of a batch up (transformers 5.24: states [G, hidden] meet inputs [G, 1, hidden]).
_ALONE = frozenset({"rwkv"})
_ATTRIBUTES: Mapping[str, tuple[str, ...]] = {"recurrent_gemma": ("conv1d_state", "recurrent_states")}
_STATES = ("conv_states", "recurrent_states")


class RecurrentState:
    """The memory of one module.

    Attributes:
        argument: Of the module's forward, that takes the past.
        saved_lengths: Numbers of the layers, in the past, that keep keys and values.
        continues: Whether several tokens may follow others in one forward.
        alone: A forward takes one sequence.
    """

    def __init__(self, module: nn.Module) -> None:
        self._config = cast("Any", module).config
        self._kind = str(self._config.model_type)
        known = inspect.signature(module.forward).parameters
        names = ("cache", "past_key_values", "cache_params", "state")  # the first is that of transformers since 5
        self.argument = next((name for name in names if name in known), "past_key_values")
        self.saved_lengths: tuple[int, ...] = ()
        self.continues, self.alone = True, self._kind in _ALONE
        self._loose = _LOOSE.get(self._kind) if self.argument in ("state", "cache") else None
        self._makers = [] if self._loose else _makers(self._kind, self._config)
        self._places: tuple[tuple[int, str, int], ...] = ()
        self._holders = [
            (part, name)
            for part in module.modules()
            for name in _ATTRIBUTES.get(self._kind, ())
            if name in part.__dict__
        ]

    @property
    def stateful(self) -> bool:
        """Whether there are states."""
        return bool(self._places or self._holders or self._loose)

    def new_past(self, states: Sequence[Tensor] = ()) -> Any:
        """Build a past that holds only `states`, which the forward may change; empty for sequences that begin."""
        if self._loose:
            return self._loose(self._config, states)
        past = _cache_of([make() for make in self._makers])
        for (at, what, number), state in zip(self._places, states, strict=False):
            layer = past.layers[at]
            getattr(layer, what)[number] = state
            getattr(layer, f"is_{what}_initialized")[number] = True
            if what == "conv_states":
                layer.has_previous_state[number] = True
                layer.conv_kernel_size[number] = state.shape[-1]
                layer.device, layer.dtype = state.device, state.dtype
        rest = states[len(self._places) :]
        for i, (part, name) in enumerate(self._holders):
            setattr(part, name, rest[i] if rest else None)
        return past

    def forward_keywords(self, past: Any) -> dict[str, Any]:
        """Return the keyword arguments of a forward with this past."""
        return {self.argument: past.state if isinstance(past, _Loose) else past, "use_cache": True}

    def collect_states(self, past: Any, result: Any) -> list[Tensor]:
        """Collect the states after a forward that had this past and this result. Clears the attributes of modules."""
        if isinstance(past, _Loose):
            return past.collect_states(result)
        states = [getattr(past.layers[at], what)[number] for at, what, number in self._places]
        for part, name in self._holders:
            states.append(getattr(part, name))
            setattr(part, name, None)
        return states

    def learn(self, past: Any) -> list[tuple[Tensor, Tensor]]:
        """Detect which layers of a past store keys and values, and which states, after a single-token forward.

        The past was empty before. Returns the keys and values [1, heads, 1, width] of the layers that store any.

        Raises:
            UnsupportedError: a layer stores a value of an unknown kind, or nothing ("inference-foreign").
        """
        pairs: list[tuple[Any, Any]] = [(getattr(y, "keys", None), getattr(y, "values", None)) for y in past.layers]
        self.saved_lengths = tuple(i for i, (keys, _) in enumerate(pairs) if keys is not None)
        self._places = tuple(_places(past.layers))
        self.continues = not self.stateful or self._kind in _CONTINUES
        silent = set(range(len(pairs))) - set(self.saved_lengths) - {at for at, _, _ in self._places}
        silent -= {i for i, y in enumerate(past.layers) if self._holders or type(y).__name__ == "DummyLayer"}
        kv_pairs = [pairs[i] for i in self.saved_lengths]
        strangers = any(t is None or t.dim() != 4 or t.shape[-2] != 1 for pair in kv_pairs for t in pair)
        if silent or strangers or not (kv_pairs or self.stateful):
            raise strange(
                self._kind, "its layers keep neither keys and values of every token nor states that are known"
            )
        return kv_pairs


class _Loose:
    """The past of a module that takes its states as they are: RWKV."""

    def __init__(self, config: Any, states: Sequence[Tensor]) -> None:
        del config
        self.layers: list[Any] = []
        self.state: Any = list(states) or None

    def collect_states(self, result: Any) -> list[Tensor]:
        return list(result.state)


class _XLSTM(_Loose):
    """Three states a layer in a cache of its own."""

    def __init__(self, config: Any, states: Sequence[Tensor]) -> None:
        super().__init__(config, ())
        if states:
            from transformers.models.xlstm.modeling_xlstm import xLSTMCache

            self.state = xLSTMCache(config, len(states[0]), dtype=states[0].dtype, device=str(states[0].device))
            self.state.rnn_state = {i: tuple(states[3 * i : 3 * i + 3]) for i in range(len(states) // 3)}

    def collect_states(self, result: Any) -> list[Tensor]:
        return [state for layer in result.cache.rnn_state.values() for state in layer]


_LOOSE: Mapping[str, type[_Loose]] = {"rwkv": _Loose, "xlstm": _XLSTM}


def strange(kind: str, why: str) -> UnsupportedError:
    """Build the error for a module that cannot run through its own forward here."""
    return UnsupportedError(
        f"generation by a {kind} model: {why}",
        code="inference-foreign",
        fix="Use the model's own generate, or a family that is declared (ds_inference.families).",
    )


def _cache_of(layers: list[Any]) -> Any:
    from transformers import DynamicCache
    from transformers.cache_utils import Cache

    return Cache(layers=layers) if layers else DynamicCache()


def _makers(kind: str, config: Any) -> list[Callable[[], Any]]:
    """List a factory for each layer of the cache; empty if all layers store keys and values.

    Layers with a window store all keys and values, too: blocks do, and masks limit the window.
    """
    try:
        from transformers import DynamicCache
        from transformers.cache_utils import (
            DynamicLayer,
            DynamicSlidingWindowLayer,
            LinearAttentionAndFullAttentionLayer,
            LinearAttentionCacheLayerMixin,
        )
    except ImportError:  # before transformers had layers with states
        return []
    if getattr(config.get_text_config(decoder=True), "layer_types", None) is None:
        return []
    layers = DynamicCache(config=config).layers
    if not any(isinstance(y, LinearAttentionCacheLayerMixin) for y in layers):
        return []
    factories: list[Callable[[], Any]] = []
    for layer in layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            plain = LinearAttentionAndFullAttentionLayer if isinstance(layer, DynamicLayer) else type(layer)
            factories.append(partial(plain, number_of_states=layer.number_of_states))
        elif type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            factories.append(DynamicLayer)
        elif type(layer).__name__ == "DummyLayer":
            factories.append(type(layer))
        else:
            raise strange(kind, f"a layer keeps a {type(layer).__name__}")
    return factories


def _places(layers: Sequence[Any]) -> Iterator[tuple[int, str, int]]:
    """Yield the positions of states: the layer, its attribute, the number in that attribute."""
    for at, layer in enumerate(layers):
        for what in _STATES:
            states = getattr(layer, what, None)
            if isinstance(states, dict):
                yield from ((at, what, number) for number, state in states.items() if state is not None)
