"""`deepspeed.linear`: ds-zero's layer of a frozen, cut, quantized base with a low-rank update, under upstream's names."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepspeed._ours.base.forwarding import calls, reads
from deepspeed._ours.base.raising import also, refused
from ds_comm import world_group
from ds_config.errors import PlanError
from ds_ops.formats import QuantSpec, QuantTensor
from ds_ops.fp_quant import float_format
from ds_ops.quant import dequantize, quantize
from ds_zero.policies.tiled_layers import LoRALinear

_LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclasses.dataclass
class LoRAConfig:
    """The update, and the ranks that the base is cut over.

    Attributes:
        base_weight_sharding: 1, or the number of all ranks.
        offload, offload_ratio: Must be off: a cut base is small, and a quantized one smaller.
        delay_lora_init: Whether the update begins with `init_lora` only.
        target_mods: A layer whose name has none of these parts has no update once a state dict was loaded before the update began.
    """

    lora_r: int = 64
    lora_alpha: float = 16.0
    base_weight_sharding: int = 1
    offload: bool = False
    offload_ratio: float = 0.0
    delay_lora_init: bool = False
    target_mods: list[str] = dataclasses.field(default_factory=lambda: list(_LLAMA))


@dataclasses.dataclass
class QuantizationConfig:
    """The format of a quantized base: so many bits in all and in the significand, in groups of so many elements."""

    q_bits: int = 8
    mantissa_bits: int = 3
    group_size: int = 512
    q_dtype: torch.dtype = torch.uint8


class LoRAOptimizedLinear(LoRALinear):
    """`ds_zero.policies.tiled_layers.LoRALinear`, made of upstream's configuration objects.

    Attributes:
        disabled: Whether it is a frozen linear without an update.
    """

    update: ClassVar[tuple[str, str]] = ("lora_weight_1", "lora_weight_2")

    def __init__(
        self, input_dim: int, output_dim: int, bias: bool = False, lora_config: LoRAConfig | None = None,
        quantization_config: QuantizationConfig | None = None, device: torch.device | str | None = None, dtype:
        torch.dtype = torch.bfloat16, linear_cls: type[nn.Module] = nn.Linear,
    ) -> None:  # fmt: skip
        del linear_cls
        lora = _checked(lora_config, bias)
        quant = quantization_config
        bits = None if quant is None else float_format(quant.q_bits, _mantissa(quant))
        super().__init__(
            input_dim, output_dim, rank=lora.lora_r, alpha=lora.lora_alpha, quantized=bits, dtype=dtype, device=device,
            group=world_group() if lora.base_weight_sharding > 1 else None,
            group_size=512 if quant is None else quant.group_size,
        )  # fmt: skip
        self.input_dim, self.output_dim, self.bias = input_dim, output_dim, bias
        self.lora_config, self.quantization_config = lora, quant
        self.zero_shards = lora.base_weight_sharding
        self.disabled = False
        if not lora.delay_lora_init:
            self.init_lora()

    def draw_base(self) -> None:
        """Initialize the base weight as upstream does, with Glorot's bound for the shard of a rank."""
        bound = math.sqrt(6 / (self.weight.numel() / self.out_features + self.out_features))
        nn.init.uniform_(self.weight, -bound, bound)

    def init_lora(self) -> None:
        """Begin the update, with the base as it is now."""
        if not self.disabled:
            self.start()

    def disable(self) -> None:
        """Have no update: the layer is a frozen linear whose base is whole on every rank, and has no values yet."""
        self.disabled, self.group = True, None
        self.weight = nn.Parameter(torch.empty(self.out_features, self.in_features, **self._factory), False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) if self.disabled else super().forward(x)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # A running update is kept whatever the layer's name, which upstream would drop with no word.
        if not self.started and not any(part in prefix for part in self.lora_config.target_mods):
            self.disable()
        super()._load_from_state_dict(state_dict, prefix, *rest)

    full_weight = calls("base", "Return the full base weight. Collective where the weight is sharded.")

    _initialized = reads("started", "Whether the update has begun.")

    lora_scaling_factor = reads("scale", "alpha / rank.")


def _mantissa(config: QuantizationConfig) -> int:
    # Upstream's default of three bits is that of eight; six have two of them.
    return {6: 2, 4: 1}.get(config.q_bits, config.mantissa_bits) if config.mantissa_bits == 3 else config.mantissa_bits


def _checked(config: LoRAConfig | None, bias: bool) -> LoRAConfig:
    world = world_group().size
    problem = fix = ""
    if config is None:
        problem, fix = "LoRAOptimizedLinear without a LoRAConfig", "Pass lora_config=."
    elif bias:
        problem, fix = "LoRAOptimizedLinear with a bias", "Leave the bias out, or keep nn.Linear for this layer."
    elif config.offload:
        problem, fix = "LoRAConfig(offload=True)", "Cut the base over more ranks, or quantize it."
    elif config.base_weight_sharding not in (1, world):
        problem = f"base_weight_sharding = {config.base_weight_sharding} on {world} ranks"
        fix = "Use 1, or the number of ranks."
    if config is None or problem:
        raise also(PlanError, AssertionError)(problem, code="zero-lora", fix=fix)
    return config


class WeightCodes:
    """How the codes of one weight are read.

    Attributes:
        quantized_from: What was quantized: format, shape and dtype; None before.
    """

    def __init__(self, config: QuantizationConfig) -> None:
        self.config = config
        self.quantized_from: tuple[QuantSpec, int, tuple[int, ...]] | None = None

    def quantize(self, values: Tensor) -> Tensor:
        """Quantize values [..., n] into codes, uint8."""
        if values.dtype is not torch.bfloat16:
            raise refused("codes-of-bfloat16", values.dtype)
        columns = values.shape[-1]
        spec = QuantSpec(float_format(self.config.q_bits, _mantissa(self.config)), min(self.config.group_size, columns))
        self.quantized_from = (spec, columns, tuple(values.shape))
        return quantize(values.contiguous(), spec, rows=values.numel() // columns).wire

    def read(self, codes: Tensor) -> Tensor:
        """Dequantize codes into values; return a tensor that never was quantized unchanged."""
        if self.quantized_from is None or codes.dtype is not torch.uint8:
            return codes
        spec, columns, shape = self.quantized_from
        return dequantize(QuantTensor(codes, spec, columns, shape, torch.bfloat16))


class QuantizedParameter(nn.Parameter):
    """A frozen weight that becomes codes when it is moved to a device, the one it is on among them.

    Attributes:
        quantization_config: The format.
        quantizer: Reads the codes; copies of a parameter share it.
    Raises:
        ValueError: it is to be trained.
    """

    quantization_config: QuantizationConfig
    quantizer: WeightCodes

    def __new__(
        cls, data: Tensor | None = None, requires_grad: bool = False, quantization_config: QuantizationConfig | None =
        None, quantizer: WeightCodes | None = None,
    ) -> QuantizedParameter:  # fmt: skip
        if requires_grad:
            raise refused("codes-trained")
        values = torch.empty(0, device="cpu") if data is None else data.detach().as_subclass(Tensor)
        parameter: QuantizedParameter = torch.Tensor._make_subclass(cls, values, False)
        parameter.quantization_config = quantization_config or QuantizationConfig()
        parameter.quantizer = quantizer or WeightCodes(parameter.quantization_config)
        return parameter

    def to(self, *args: Any, **options: Any) -> QuantizedParameter:
        """Copy the parameter to the device, as quantized codes."""
        there = self.detach().as_subclass(Tensor).to(*args, **options)
        codes = there if there.dtype is torch.uint8 else self.quantizer.quantize(there)
        return type(self)(codes, False, self.quantization_config, self.quantizer)

    def dequantized(self) -> Tensor:
        """Return the dequantized values of the codes."""
        return self.quantizer.read(self.detach().as_subclass(Tensor))


class QuantizedLinear(nn.Linear):
    """A frozen `nn.Linear` that multiplies with quantized weights."""

    def __init__(
        self, input_dim: int, output_dim: int, bias: bool = False, quantization_config: QuantizationConfig | None =
        None, dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        if dtype is not torch.bfloat16:
            raise refused("quantized-dtype", dtype)
        super().__init__(input_dim, output_dim, bias=bias, dtype=dtype)
        self.weight = QuantizedParameter(self.weight.data, quantization_config=quantization_config)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  nn.Linear's name
        return F.linear(input, self.weight.dequantized(), self.bias)  # type: ignore[attr-defined]


class OptimizedLinear(nn.Module):
    """Makes the layer that the configurations ask for: `nn.Linear`, `QuantizedLinear` or `LoRAOptimizedLinear`."""

    def __new__(  # type: ignore[misc]  # a function in the shape of a class, as callers write it
        cls,
        input_dim: int,
        output_dim: int,
        bias: bool = False,
        lora_config: LoRAConfig | None = None,
        quantization_config: QuantizationConfig | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        linear_cls: type[nn.Module] = nn.Linear,
    ) -> nn.Module:
        for option, wanted in ((lora_config, "LoRAConfig"), (quantization_config, "QuantizationConfig")):
            if option is not None and not dataclasses.is_dataclass(option):
                raise refused("linear-config", wanted, type(option).__name__, wanted)
        if lora_config is not None:
            return LoRAOptimizedLinear(input_dim, output_dim, bias, lora_config, quantization_config, device, dtype)
        if quantization_config is not None:
            return QuantizedLinear(input_dim, output_dim, bias, quantization_config, dtype)
        return linear_cls(input_dim, output_dim, bias=bias, device=device, dtype=dtype)


def init_lora(model: nn.Module) -> None:
    """Freeze a model, and begin the update of each of its `OptimizedLinear` layers."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        if isinstance(module, LoRAOptimizedLinear):
            module.init_lora()


class Init:
    """Layers made inside by `torch.nn.Linear` are `OptimizedLinear`; models that Transformers makes inside begin their updates.

    `torch.nn.Linear` is put back when the block ends.
    """

    def __init__(self, lora_config: LoRAConfig | None = None, quant_config: QuantizationConfig | None = None) -> None:
        self.lora_config, self.quant_config = lora_config, quant_config
        self._open: list[Any] = []

    def __enter__(self) -> Init:
        lora = None if self.lora_config is None else dataclasses.replace(self.lora_config, delay_lora_init=True)
        context = _replaced(lora, self.quant_config)
        context.__enter__()
        self._open.append(context)
        return self

    def __exit__(self, *raised: Any) -> None:
        self._open.pop().__exit__(*raised)


@contextmanager
def _replaced(lora: LoRAConfig | None, quant: QuantizationConfig | None) -> Iterator[None]:
    plain = nn.Linear

    class Making(type(plain)):  # type: ignore[misc]
        def __call__(
            cls, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None
        ) -> Any:
            if cls is not Linear:  # a layer derived inside from nn.Linear is its own
                return super().__call__(in_features, out_features, bias, device, dtype)
            # A bias of the base would be trained beside it upstream; here such a layer has none, as there.
            return OptimizedLinear(
                in_features, out_features, False, lora, quant, device, dtype or torch.bfloat16, linear_cls=plain
            )

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, plain)

    class Linear(plain, metaclass=Making):  # type: ignore[misc,valid-type]
        pass

    torch.nn.Linear = Linear  # type: ignore[misc]
    makers = [(owner, name, vars(owner).get(name), getattr(owner, name)) for owner, name in _makers()]
    for owner, name, _, maker in makers:
        setattr(owner, name, _starting(maker))
    try:
        yield
    finally:
        torch.nn.Linear = plain  # type: ignore[misc]
        for owner, name, attribute, _ in makers:
            delattr(owner, name) if attribute is None else setattr(owner, name, attribute)


def _makers() -> list[tuple[Any, str]]:
    """List the functions with which Transformers builds whole models, as (class, name)."""
    try:
        from transformers import AutoModelForCausalLM as Model
    except ImportError:
        return []
    return [(Model, "from_pretrained"), (Model, "from_config")]


def _starting(maker: Any) -> Any:
    def make(*args: Any, **options: Any) -> Any:
        model = maker(*args, **options)
        init_lora(model)
        return model

    return make
