"""What the client scripts share: a tiny model, its data, and how a result is written. Runs with any `deepspeed`."""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

SEED, VOCAB, LENGTH = 7, 96, 24


def arguments() -> argparse.Namespace:
    """The options that every script takes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--mode", default="")
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--local_rank", type=int, default=-1)
    return parser.parse_args()


def model(seed: int = SEED) -> Any:
    """A Llama of about 60,000 parameters; the same values on every rank and in every environment."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, max_position_embeddings=64, **sizes))


class Next(nn.Module):
    """A model of torch's own parts, called as Transformers' are: which token follows which."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.embed, self.inner, self.head = nn.Embedding(VOCAB, 32), nn.Linear(32, 64), nn.Linear(64, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        logits = self.head(torch.tanh(self.inner(self.embed(input_ids[:, :-1]))))
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()))


def tokenizer() -> Any:
    """Words t0, t1, ...; t0 fills up, t1 ends."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1", unk_token="t0")


class Tokens(torch.utils.data.Dataset):
    """Sequences that can be learned: each token follows from the one before."""

    def __init__(self, count: int = 320) -> None:
        generator = torch.Generator().manual_seed(SEED)
        first = torch.randint(0, VOCAB, (count, 1), generator=generator)
        self.ids = (first + 5 * torch.arange(LENGTH)) % VOCAB

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def section(stage: int, dtype: str, **changes: Any) -> dict[str, Any]:
    """A configuration of the usual kind."""
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        **changes,
    }


def _clocks() -> tuple[float, float]:
    """Wall time, and processor time of all threads of this process."""
    return time.perf_counter(), time.process_time()


class Report:
    """Collects what a run tells; rank 0 writes it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.values = args, {"losses": [], "seconds": [], "busy": []}
        self._begun = _clocks()

    def add(self, loss: torch.Tensor | float) -> None:
        """A step ended with this loss, which is averaged over ranks."""
        wall, busy = _clocks()
        self.values["seconds"].append(wall - self._begun[0])
        self.values["busy"].append(busy - self._begun[1])
        value = torch.as_tensor(float(loss))
        torch.distributed.all_reduce(value)
        self.values["losses"].append(float(value) / torch.distributed.get_world_size())
        self._begun = _clocks()

    def write(self, **values: Any) -> None:
        """On rank 0."""
        import deepspeed

        if int(os.environ.get("RANK", "0")) == 0:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            self.args.out.write_text(
                json.dumps({**self.values, "deepspeed": deepspeed.__version__, "peak_bytes": peak, **values})
            )


def watch(report: Report | None, *names: str) -> Any:
    """A callback for Transformers' Trainer: losses go from its log into `report`, what else is named into `seen`."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        seen: dict[str, list[float]] = {name: [] for name in names}  # noqa: RUF012

        def on_log(self, args, state, control, logs=None, **kwargs):
            if report is not None and "loss" in logs:
                report.add(logs["loss"])
                for name, values in self.seen.items():
                    values.append(float(logs.get(name) or 0))

    return Watch()


def trl(args: argparse.Namespace) -> dict[str, Any]:
    """What the settings of TRL's trainers have in common; makes the process group, which they expect to be there."""
    from accelerate.state import PartialState

    # On a machine without a GPU, Accelerate counts one process unless it is told a backend for CPU tensors.
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    return {
        "output_dir": str(args.out.parent / "trl"),
        "max_steps": args.steps,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "deepspeed": section(args.stage, args.dtype, train_micro_batch_size_per_gpu="auto", gradient_clipping="auto"),
        "report_to": [],
        "accelerator_config": {"use_configured_state": True},
        "disable_tqdm": True,
        "bf16": args.dtype == "bf16",
        "seed": SEED,
    }
