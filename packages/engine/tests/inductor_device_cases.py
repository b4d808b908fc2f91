"""Compiled training whose graphs are compiled for a CUDA device as well, one rank of two, beside the run itself on the CPU.

A process of its own: it reads a request a line (JSON, the fields of `Case`) and answers with a line, the fields of `Answer`. Each graph
that a session captures is captured again with tensors of the device, from dynamo's graph on: split, edited by the session's passes and
compiled up to its source. When the passes change, so is what they make of the same graphs. The run itself goes on operation by operation.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._functorch.config
from torch import Tensor, fx, nn
from torch._guards import TracingContext, tracing
from torch.utils.checkpoint import checkpoint

import ds_engine
from ds_comm.rehearsal.fabric import Fabric, Link
from ds_comm.rehearsal.staging import RehearsalOptions, start_rehearsal
from ds_engine.compiling import _inductor, rewriting
from ds_engine.compiling.captured_graphs import Frame, Lowered
from ds_engine.compiling.graph import Graph
from ds_engine.compiling.ops import OPS
from ds_engine.compiling.session import Session
from ds_testing.inductor_device import generated_code, moved_to_device, put_in_place

CASE_S = 280
"""After so many seconds of one case the process prints where it stands, and ends."""


@dataclass(frozen=True)
class Case:
    """What is asked for.

    Attributes:
        model: A name of `MODELS`.
        stage: Of ZeRO.
        checkpointing: Whether blocks are recomputed.
        passes: From the second step on; empty: the stage's own.
        mode, dynamic: Of `torch.compile`.
        visible: Leave gradients that were handed over among the visible outputs of a graph, as before they were taken out of it.
    """

    model: str
    stage: int
    checkpointing: bool = True
    passes: tuple[str, ...] = ()
    mode: str | None = None
    dynamic: bool | None = None
    visible: bool = False


@dataclass
class Compiled:
    """A graph's code.

    Attributes:
        backward: Whether it makes gradients.
        passes: That edited the graph.
        calls: How often each operation of the session is called in it.
        kernels: Triton kernels in it.
        attention: Attention kernels of torch's that it calls.
        recorded: Whether torch would record it, or parts of it, as CUDA graphs.
    """

    backward: bool
    passes: list[str]
    calls: dict[str, int]
    kernels: int
    attention: list[str]
    recorded: bool


@dataclass
class Answer:
    """What came of it; `refused` is inductor's error, and its traceback follows on stderr."""

    graphs: list[Compiled] = field(default_factory=list)
    refused: str = ""


# ---- models


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(self.norm(x)))


class Plain(nn.Module):
    """Two blocks, and widths that matrix products on a device are padded for. `breaks`: a graph ends behind each block."""

    def __init__(self, recompute: bool, breaks: bool = False) -> None:
        super().__init__()
        self.recompute, self.breaks = recompute, breaks
        self.table = nn.Embedding(16, 20)
        self.blocks = nn.ModuleList(Block(20) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
            if self.breaks:
                torch._dynamo.graph_break()
        return x.float().square().mean()


class Labelled(nn.Module):
    """A transformers model whose result is its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, labels=tokens).loss


def gpt(recompute: bool) -> nn.Module:
    """The quickstart's; its blocks are checkpointed from outside."""
    path = Path(__file__).parents[3] / "docs" / "examples" / "train_gpt" / "model.py"
    spec = spec_from_file_location("quickstart_gpt", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    model = module.GPT(module.GPTConfig(layers=2, heads=2, width=32, context=16))
    if recompute:
        for block in model.blocks:
            block.forward = _recomputed(block.forward)
    return model


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: checkpoint(forward, x, use_reentrant=False)


def of_transformers(kind: str, recompute: bool) -> nn.Module:
    import transformers

    # Without a cache: with one, a line is logged where layers are checkpointed, which ends a graph.
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 256, "use_cache": False}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    if kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    else:
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads, num_local_experts=4))
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return Labelled(model.train())


MODELS: dict[str, Callable[[bool], nn.Module]] = {
    "plain": Plain,
    "breaking": lambda recompute: Plain(recompute, breaks=True),
    "gpt": gpt,
    "llama": lambda recompute: of_transformers("llama", recompute),
    "mixtral": lambda recompute: of_transformers("mixtral", recompute),
}


# ---- the graphs of a session, again for the device


class OnDevice:
    """Who decides about the graphs of the device: the session, with the passes that are due there.

    Attributes:
        compiled: What became of each graph, in order.
        pieces: The graphs.
    """

    def __init__(self, session: Session, compiled: list[Compiled]) -> None:
        self.session, self.compiled = session, compiled
        self.key, self.measuring = session.key, False
        self.pieces: list[Lowered] = []
        self.passes = session.passes

    def decide(self, piece: Lowered) -> Graph:
        return self.session.decide(piece)

    def edit(self, piece: Lowered, gm: fx.GraphModule) -> fx.GraphModule:
        return self.session.edit(piece, gm)

    def lower(self, piece: Lowered, gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
        with generated_code() as sources:
            code = _inductor.lower(gm, piece.inputs, piece.context.fake, self.session.settings.patches, piece.options)
        source = "\n".join(sources)
        name = OPS.need.default.namespace
        calls = Counter({op: source.count(f"torch.ops.{name}.{op}.default(") for op in _OPERATIONS})
        attention = [op for op in ("flash", "efficient") if f"_scaled_dot_product_{op}_attention" in source]
        recorded = bool(getattr(code, "cudagraph_info", None)) or "partition_0" in source
        kernels = source.count("@triton.jit")
        passes = list(self.session.passes)
        self.compiled.append(Compiled(piece.backward, passes, dict(+calls), kernels, attention, recorded))
        return code

    def add(self, piece: Lowered) -> None:
        self.pieces.append(piece)

    def stepped(self) -> None:
        """Compile every graph again, with other passes, where these changed."""
        if self.session.passes != self.passes:
            self.passes = self.session.passes
            for piece in self.pieces:
                piece.forget()
                piece._lower()


_OPERATIONS = ("need", "spare", "expect", "load", "park", "unpark", "arrived", "free", "store", "fetch")


def run(case: Case) -> Answer:
    """Train two steps of two microbatches."""
    answer = Answer()
    owners: list[OnDevice] = []
    capture = Session._backend

    def captured(session: Session, gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        context = TracingContext.get()
        fake = context.fake_mode
        moved, examples = moved_to_device(gm, inputs, fake)
        running = capture(session, gm, inputs, **options)
        owners.append(OnDevice(session, answer.graphs))
        frame = Frame(owners[-1], moved, session._place)
        eagerly = torch._functorch.config.patch(force_non_lazy_backward_lowering=True)
        again = TracingContext(fake)
        again.tensor_to_context = context.tensor_to_context  # where numbers are from
        with generated_code(), tracing(again), eagerly:
            _inductor.backend(moved, examples, frame.inner, session.settings.patches)
        return running

    torch._dynamo.reset()
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {
            "stage": case.stage, "reduce_bucket_size": 400, "stage3_param_persistence_threshold": 0,
        },
        "compile": {"deepcompile": True, "free_activation_threshold": 0},
    }  # fmt: skip
    if "offload_parameters" in case.passes:
        config["compile"]["offload_parameters"] = True
        config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    with mock.patch.object(Session, "_backend", captured):
        engine, *_ = ds_engine.initialize(model=MODELS[case.model](case.checkpointing), config=config)
        try:
            first = ["reduce", *(["gather"] if case.stage == 3 else [])]
            schedule = {"schedule": [(0, first), (1, list(case.passes))]} if case.passes else {}
            engine.compile(backend="eager", compile_kwargs={"mode": case.mode, "dynamic": case.dynamic}, **schedule)
            for _ in range(2):
                for _ in range(2):
                    engine.backward(engine(torch.randint(16, (2, 17))))
                    engine.step()
                for owner in owners:
                    owner.stepped()
        except Exception as error:
            traceback.print_exc()
            answer.refused = f"{type(error).__name__}: {error}"
        finally:
            engine.close()
    return answer


def main(folder: Path) -> None:
    """Say that the device is in place with an empty line, then answer requests until stdin ends."""
    put_in_place(folder)
    torch.set_num_threads(1)
    link = Link(gbytes_per_s=1e6, latency_us=0.0)
    start_rehearsal(RehearsalOptions(Fabric("two", 2, link, link), world_size=2))
    print(flush=True)
    for line in sys.stdin:
        faulthandler.dump_traceback_later(CASE_S, exit=True)
        case = Case(**json.loads(line))
        visible = {"_VISIBLE": "nobody's"} if case.visible else {}
        with mock.patch.multiple(rewriting, **visible) if visible else mock.patch.dict({}):
            answer = run(case)
        print(json.dumps(asdict(answer)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
