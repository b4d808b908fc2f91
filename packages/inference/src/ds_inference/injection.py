"""`init_inference`: a live module becomes an engine that is called as the module is.

Without kernel injection the module is cast, loaded and moved, and runs its own forward. With it, `generate` runs through the
paged engine of this package, whose weights are read from the module; its tokens are those of the module's own `generate`. A module
whose family is not declared runs its own forward with it, too, and a warning says so.
"""

from __future__ import annotations

import re
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import ds_comm
from ds_config import load as load_config
from ds_config.errors import CheckpointError, ConfigError, PlanError, UnsupportedError
from ds_config.json_files import read_json
from ds_inference.config import InferenceConfig, QuantConfig
from ds_inference.cuda_graphs import CudaGraphRunner, cuda_graph
from ds_inference.families import FAMILIES, undeclared
from ds_inference.llm_engine import LLMEngine
from ds_inference.model_loader import declared, load
from ds_inference.quantize import QuantizationOptions
from ds_inference.sampling import SamplingParams
from ds_inference.scheduler import SchedulerConfig
from ds_inference.spec import DecoderSpec
from ds_inference.tensor_parallel import ranks_of
from ds_parallel.config import LayerSpecConfig
from ds_parallel.tensor import TensorOptions, TensorParallelModel, facts_of, make_tensor_plan, parallelize_model

__all__ = ["InferenceEngine", "init_inference"]


def init_inference(model: nn.Module, config: Any = None, **keys: Any) -> InferenceEngine:
    """Build an inference engine around `model`, with the signature of DeepSpeed's `init_inference`.

    Args:
        model: Any module; changed in place (cast, moved, loaded).
        config: An InferenceConfig, a dict, or the path of a JSON file.
        keys: More keys of the configuration. A key that is also in `config`, with another value, is an error.
    Raises:
        ConfigError: unknown keys, wrong values; all at once.
        ConfigError, PlanError: no module, no configuration, or a key is given twice with different values ("inference-config").
        UnsupportedError: a requested feature is not supported here; the message names the feature.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"init_inference() was called with a model of type {type(model).__name__}",
            code="inference-config",
            fix="Pass a torch.nn.Module.",
        )
    return InferenceEngine(model, _resolved(config, keys))


def _resolved(config: Any, keys: Mapping[str, Any]) -> InferenceConfig:
    if isinstance(config, InferenceConfig):
        if not keys:
            return config
        values: dict[str, Any] = {name: getattr(config, name) for name in config.model_fields_set}
    elif isinstance(config, str | Path):
        values = read_json(config, partial(ConfigError, code="inference-config", fix="Give the path of a JSON file."))
    elif config is None or isinstance(config, Mapping):
        values = dict(config or {})
    else:
        raise ConfigError(
            f"a configuration of type {type(config).__name__}",
            code="inference-config",
            fix="Give an InferenceConfig, a dict, or the path of a JSON file.",
        )
    twice = [name for name in keys if name in values and values[name] != keys[name]]
    if twice:
        raise PlanError(
            ", ".join(f"{n} is {values[n]!r} in the configuration and {keys[n]!r} in the call" for n in twice),
            code="inference-config",
            fix="Give each key once.",
        )
    values.update(keys)
    for name in ("injection_policy", "injection_dict"):
        if isinstance(values.get(name), Mapping):  # its keys are classes, which no configuration file has
            values[name] = {k if isinstance(k, str) else repr(k): names for k, names in values[name].items()}
    return load_config(InferenceConfig, values)


@dataclass(frozen=True, slots=True)
class _GenerateCall:
    """What a call of `generate` asks for.

    Attributes:
        pad: Token behind answers that are shorter than others.
        padding: Token of prompts that is none, where no attention mask says so.
        foreign: Keywords that the paged engine does not do.
    """

    how: SamplingParams
    pad: int = 0
    padding: int | None = None
    foreign: Sequence[str] = ()


class InferenceEngine(nn.Module):
    """A module that answers. Unknown attributes are looked up in the module.

    Attributes:
        module: The model.
        inference_config: What `init_inference` was given.
    """

    def __init__(self, model: nn.Module, config: InferenceConfig) -> None:
        super().__init__()
        self.inference_config, self._quant = config, _quant(config)
        self._check(model)
        self.module = model
        checkpoint = config.checkpoint or config.checkpoint_config.checkpoint_dir
        if checkpoint is not None:
            _load_into(model, checkpoint, config.base_dir or config.checkpoint_config.base_dir or "")
        if config.dtype is torch.int8:  # floats stay as they are: linears become codes in the paged engine
            pass
        elif config.dtype is not torch.float32 or any(p.dtype != torch.float32 for p in model.parameters()):
            model.to(config.dtype)
        if not config.keep_module_on_host and torch.cuda.is_available():
            model.to(torch.device("cuda", torch.cuda.current_device()))
        model.eval()
        self._cut: TensorParallelModel | None = None
        if self._ranks is not None and not self._injected:
            self._cut = parallelize_model(
                model, make_tensor_plan(facts_of(model), _options(config, self._ranks.size)), self._ranks
            )
        self._times: list[float] | None = None
        self._generator: LLMEngine | None = None
        self._recorded = (
            CudaGraphRunner(model, cuda_graph(next(model.parameters()).device)) if config.enable_cuda_graph else None
        )
        self.is_compiled = False

    def _check(self, model: nn.Module) -> None:
        config = self.inference_config
        parallel = config.tensor_parallel
        self._ranks = ranks_of(parallel.tp_size if parallel.enabled else 1, parallel.tp_group)
        if config.enable_cuda_graph and self._ranks is not None:
            raise UnsupportedError(
                "enable_cuda_graph with a model on several ranks",
                code="inference-cuda-graph",
                fix="Leave it out, or use one rank.",
            )
        if config.enable_cuda_graph and not torch.cuda.is_available():
            raise UnsupportedError(
                "enable_cuda_graph is true, and this host has no CUDA device",
                code="inference-cuda-graph",
                fix="Leave it out on a CPU.",
            )
        if _quantize(self._quant, 8) is not None and not config.replace_with_kernel_inject:
            raise UnsupportedError(
                f"quant.weight.num_bits = {self._quant.weight.num_bits} (dtype {config.dtype}) for a module that runs its own forward",
                code="inference-quantize",
                fix="Set replace_with_kernel_inject, or leave quant out and give a dtype of floats.",
            )
        self._injected, obstacle = config.replace_with_kernel_inject, ""
        if not self._injected:
            return
        try:
            self._spec = _spec_of(model)
            return
        except UnsupportedError as error:
            self._injected, obstacle = False, error.message
        if _quantize(self._quant, 8) is not None:
            raise UnsupportedError(
                f"quant.weight.num_bits = {self._quant.weight.num_bits} for a {type(model).__name__}: {obstacle}; "
                f"declared are {', '.join(sorted(FAMILIES))}",
                code="inference-family",
                fix="Leave quant out: the module then runs its own forward.",
            )
        warnings.warn(
            f"replace_with_kernel_inject: {_layers(model)} of a {type(model).__name__} are not replaced: {obstacle}; the module "
            "runs its own forward",
            stacklevel=4,
        )

    @property
    def _config(self) -> InferenceConfig:
        """`inference_config` by its older name, which programs read."""
        return self.inference_config

    @property
    def config(self) -> Any:
        """The module's own configuration, as a transformers model has one: pipelines read it. None: it has none."""
        return getattr(self.module, "config", None)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or not hasattr(module, name):
                raise
            return getattr(module, name)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Run the module's forward without gradients.

        With enable_cuda_graph the call replays a CUDA graph, captured at the first call of its shapes, where it neither reads nor returns
        a KV cache (`use_cache=False`); calls with a cache run the module.
        """
        begin = time.perf_counter()
        with torch.inference_mode():
            call = self._recorded if self._recorded is not None and self._replayable(inputs, keywords) else self.module
            out = call(*inputs, **keywords)
        if self._times is not None:
            self._wait()
            self._times.append((time.perf_counter() - begin) * 1e3)
        return out

    def _replayable(self, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> bool:
        """Whether a call neither reads nor returns a KV cache.

        A capture runs the forward several times, each of which would add to the cache, and a cache that a graph returns is overwritten by
        the next replay.
        """
        values = [*inputs, *keywords.values()]
        if not all(value is None or isinstance(value, Tensor | bool | int | float | str) for value in values):
            return False
        config = getattr(self.module, "config", None)
        use_cache = keywords.get("use_cache")
        return not (getattr(config, "use_cache", False) if use_cache is None else use_cache)

    def generate(self, *inputs: Any, **keywords: Any) -> Any:
        """As the module's `generate`; prompts may have at most `max_out_tokens` tokens.

        With kernel injection: greedy or sampled (`do_sample`, `temperature`, `top_k`, `top_p`, `min_p`, `repetition_penalty`,
        `num_return_sequences`; every row has a stream of its own), prompts padded on either side by `attention_mask`. The result is [rows, tokens], the prompts as
        they came, padded behind with `pad_token_id`. A call that asks for more runs the module's own `generate`, with a warning; one of
        quantised weights is refused.
        """
        ids = keywords.get("input_ids", keywords.get("inputs", inputs[0] if inputs else None))
        if isinstance(ids, Tensor) and ids.shape[-1] > self.inference_config.max_out_tokens:
            raise PlanError(
                f"a prompt of {ids.shape[-1]} tokens; max_out_tokens is {self.inference_config.max_out_tokens}",
                code="inference-too-long",
                fix="Raise max_out_tokens, or shorten the prompt.",
            )
        if self._injected and isinstance(ids, Tensor) and not inputs[1:]:
            request = self._request(ids.shape[1], keywords)
            if not request.foreign:
                return self._paged(ids, keywords.get("attention_mask"), request)
            self._runs_its_own(request.foreign)
        with torch.inference_mode(), self._drawing_alike():
            return self.module.generate(*inputs, **keywords)  # type: ignore[operator]

    def _runs_its_own(self, foreign: Sequence[str]) -> None:
        said = f"generate with {', '.join(foreign)} through injected kernels"
        if _quantize(self._quant, 8) is not None:
            raise UnsupportedError(
                f"{said}, whose weights are quantised",
                code="inference-generate",
                fix="Leave these out, or leave quant out: the module's own generate takes everything.",
            )
        warnings.warn(f"{said} is not done: the module's own generate runs, slower", stacklevel=3)

    @contextmanager
    def _drawing_alike(self) -> Iterator[None]:
        """Ranks that hold parts of one module draw the same tokens meanwhile, whatever their own generators would have drawn."""
        if self._ranks is None:
            yield
            return
        seed = ds_comm.broadcast_json(int(torch.randint(1 << 62, (), device="cpu")), self._ranks, unit="seed")
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            yield

    def _paged(self, ids: Tensor, mask: Tensor | None, request: _GenerateCall) -> Tensor:
        if mask is None:  # as transformers does
            mask = torch.ones_like(ids) if request.padding is None else ids.ne(request.padding)
        prompts = [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]
        how = request.how
        if (
            not how.greedy
        ):  # from torch's generator, as the module's own `generate` draws: `torch.manual_seed` makes a call repeat
            seed = int(torch.randint(1 << 62, (), device="cpu"))
            how = replace(
                how, seed=seed if self._ranks is None else ds_comm.broadcast_json(seed, self._ranks, unit="seed")
            )
        if self._generator is None:
            self._generator = load(
                self.module,
                cache_tokens=max(8192, 4 * self.inference_config.max_out_tokens),
                budget=SchedulerConfig(max_model_len=self.inference_config.max_out_tokens + 1),
                native=self._ranks is None,
                group=self._ranks,
                cuda_graphs=self.inference_config.enable_cuda_graph or None,
                quantize=_quantize(self._quant, cast(Any, self.module).config.hidden_size),
            )
        answers = self._generator.generate(prompts, how)
        longest = max(len(answer.tokens) for answer in answers)
        rows = ids.repeat_interleave(how.n, 0)
        out = torch.full((len(answers), ids.shape[1] + longest), request.pad, dtype=ids.dtype, device=ids.device)
        out[:, : ids.shape[1]] = rows
        for row, answer in zip(out, answers, strict=True):
            row[ids.shape[1] : ids.shape[1] + len(answer.tokens)] = torch.tensor(
                answer.tokens, dtype=ids.dtype, device="cpu"
            )
        return out

    def _request(self, prompt: int, keywords: Mapping[str, Any]) -> _GenerateCall:
        """Read transformers' keywords; the call's generation configuration, and then the module's own, give the defaults."""
        own, given = (
            _said(c) for c in (getattr(self.module, "generation_config", None), keywords.get("generation_config"))
        )
        options = {**own, **given, **keywords}
        for name in ("input_ids", "inputs", "attention_mask", "generation_config", *_NEUTRAL):
            options.pop(name, None)
        end, pad = options.pop("eos_token_id", None), options.pop("pad_token_id", None)
        longest = self._spec.max_seq_len
        count, whole = options.pop("max_new_tokens", None), options.pop("max_length", None)
        if count is None and whole:
            count = whole - prompt
        elif count is None:  # as many as transformers gives then, whatever the prompt has
            count = min(20, longest - prompt)
        count = min(count, max(1, self.inference_config.max_out_tokens - prompt))
        sample, n = options.pop("do_sample", None), options.pop("num_return_sequences", None) or 1
        repetition = options.pop("repetition_penalty", None)
        chosen = {name: options.pop(name, None) for name in ("temperature", "top_k", "top_p", "min_p")}
        defaults = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
        draws: dict[str, Any] = (
            {k: type(v)(v if chosen[k] is None else chosen[k]) for k, v in defaults.items()} if sample else {}
        )
        foreign = sorted(name for name, value in options.items() if _asks(name, value))
        if count < 1 or prompt + count > longest:
            foreign.append(f"{count} tokens after {prompt}")
        if n > 1 and not sample:
            foreign.append(f"num_return_sequences = {n}")
        if foreign:
            return _GenerateCall(SamplingParams(), foreign=foreign)
        ends = () if end is None else tuple(end) if isinstance(end, list | tuple) else (int(end),)
        how = SamplingParams(
            max_new_tokens=count,
            repetition_penalty=1.0 if repetition is None else float(repetition),
            n=n,
            stop_token_ids=tuple(
                t for t in ends if 0 <= t < self._spec.vocab
            ),  # -1, and ends of another tokenizer, never come
            ignore_eos=True,  # what ends an answer is said above
            **draws,
        )
        return _GenerateCall(how, int(pad if pad is not None else ends[0] if ends else 0), None if pad in ends else pad)

    # ---- measuring, compiling, ending

    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """Record the time of every forward from now on, until `model_times`."""
        del use_cuda_events
        self._times = []

    def model_times(self) -> list[float]:
        """Return the milliseconds of every forward since the last call."""
        if self._times is None:
            raise PlanError(
                "model_times() without profile_model_time()",
                code="inference-call-order",
                fix="Call profile_model_time() first.",
            )
        times, self._times = self._times, []
        return times

    def compile(self, backend: str = "inductor", compile_kwargs: Mapping[str, Any] | None = None) -> None:
        """Compile the module's forward."""
        self.module.compile(backend=backend, **(compile_kwargs or {}))
        self.is_compiled = True

    def destroy(self) -> None:
        """Give back the cache and the weights that were copied for it."""
        self._generator = self._recorded = None

    def _wait(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


_NEUTRAL = (
    "bos_token_id",
    "decoder_start_token_id",
    "use_cache",
    "transformers_version",
    "_from_model_config",
    "early_stopping",
    "length_penalty",
    "synced_gpus",
)
"""Options that change no token of an answer without beams."""


def _said(config: Any) -> dict[str, Any]:
    """Return what a generation configuration says, without its defaults."""
    return {} if config is None else {k: v for k, v in config.to_diff_dict().items() if v is not None}


def _asks(name: str, value: object) -> bool:
    """Whether an option asks for something besides what is usual."""
    if value is None or value is False:
        return False
    if not isinstance(value, int | float) or name.endswith("token_id"):
        return True
    return value != (1 if name in ("num_beams", "num_beam_groups", "typical_p") else 0)


def _spec_of(model: nn.Module) -> DecoderSpec:
    """Return what the paged engine computes for a module.

    Raises:
        UnsupportedError: it cannot ("inference-family").
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in FAMILIES:
        raise undeclared(f"model_type {kind!r}")
    return declared(cast(Any, model).config.to_dict(), model.state_dict())[1]


def _layers(model: nn.Module) -> str:
    """Count the kinds of layers in a model's lists, outermost first: "2 BertLayer"; without lists it is the model."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    kinds = Counter(type(layer).__name__ for layers in lists for layer in layers)
    return " and ".join(f"{count} {name}" for name, count in kinds.items()) or "the layers"


def _options(config: InferenceConfig, degree: int) -> TensorOptions:
    """Build the tensor-parallel options of a module that runs its own forward.

    An injection policy names the row-parallel linears; the rest is detected.
    """
    names = [
        n for value in (config.injection_policy or {}).values() for n in ((value,) if isinstance(value, str) else value)
    ]
    names += config.injection_policy_tuple or ()
    specs = tuple(
        LayerSpecConfig(patterns=(rf".*{re.escape(name)}\.weight",), partition_type="row")
        for name in dict.fromkeys(names)
    )
    return TensorOptions(degree=degree, specs=specs)


def _quant(config: InferenceConfig) -> QuantConfig:
    """Return the `quant` section; dtype int8 asks for weights of 8 bits."""
    weight = config.quant.weight
    if config.dtype is not torch.int8 or weight.num_bits:
        return config.quant
    return config.quant.model_copy(
        update={"enabled": True, "weight": weight.model_copy(update={"enabled": True, "num_bits": 8})}
    )


def _quantize(quant: QuantConfig, inputs: int) -> QuantizationOptions | None:
    """Convert the `quant` section to quantization options for matrices of `inputs` inputs; None if disabled."""
    weight, activation = quant.weight, quant.activation
    if not (quant.enabled and weight.enabled and weight.num_bits):
        return None
    group = 0 if weight.q_groups == 1 else max(8, -(-inputs // weight.q_groups) // 8 * 8)
    small = activation.enabled and activation.num_bits == 8
    return QuantizationOptions(
        "int8" if weight.num_bits == 8 else "int4", group, weight.q_type == "symmetric", "int8" if small else "float"
    )


def _load_into(model: nn.Module, checkpoint: str | Mapping[str, Any], base: str) -> None:
    """Load the weights of a folder or of a descriptor's files into the module, also over meta tensors."""
    files = _files(checkpoint, base)
    missing = {name for name, _ in model.named_parameters()}
    for file in files:
        if file.suffix == ".safetensors":
            state = load_file(file)
        else:
            state = torch.load(file, map_location="cpu", weights_only=True)
        missing -= set(state)
        model.load_state_dict(state, strict=False, assign=True)
    if hasattr(model, "tie_weights"):
        cast(Any, model).tie_weights()
    left = sorted(name for name, param in model.named_parameters() if param.is_meta)
    if left:
        raise CheckpointError(
            f"the checkpoint has no values for {', '.join(left[:8])}"
            + (f" and {len(left) - 8} more" if len(left) > 8 else ""),
            code="inference-missing",
            fix="Check that all files are there and that their names are the module's.",
        )


def _files(checkpoint: str | Mapping[str, Any], base: str) -> list[Path]:
    if isinstance(checkpoint, str):
        place = Path(base, checkpoint)
        if place.is_dir():
            files = sorted(place.glob("*.safetensors")) or sorted(place.glob("*.bin"))
            if not files:
                raise CheckpointError(
                    f"{place} has neither *.safetensors nor *.bin", code="inference-folder", fix="Give another folder."
                )
            return files
        descriptor: Mapping[str, Any] = read_json(
            place,
            partial(CheckpointError, code="inference-folder", fix="Give a folder of weights, or a descriptor of them."),
        )
        base = base or str(place.parent)
    else:
        descriptor = checkpoint
    kinds, names = descriptor.get("type"), descriptor.get("checkpoints", ())
    if not isinstance(names, list | tuple) or descriptor.get("parallelization", "pp") != "pp":
        raise UnsupportedError(
            f"a descriptor of type {kinds!r} with files cut over ranks",
            code="inference-descriptor",
            fix="Give files that hold whole tensors (parallelization pp, checkpoints a list).",
        )
    return [Path(descriptor.get("base_dir", base) or base, name) for name in names]
