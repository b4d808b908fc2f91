"""Fill the tables of docs/benchmarks/{moe,pipe,parallel,offload}.md, where a page has a place for one, from the records of the benchmarks of those names.

usage: nox -s bench -- tables [--check]

A table stands between `<!-- table -->` and `<!-- end -->`; a page's own text is left alone. `--check` only says whether pages are as
their records are.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PAGES = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
TABLE = re.compile(r"(<!-- table -->\n).*?(<!-- end -->)", re.DOTALL)
_MOE = {"zipf": "64 experts, Zipf(1.0) routing", "balanced": "8 experts, even routing"}
_ENGINES = {
    "ours": "ds-moe over gloo",
    "ours@shm": "ds-moe",
    "ours_drop@shm": "ds-moe, capacity 1.0",
    "deepspeed": "DeepSpeed",
    "deepspeed_drop": "DeepSpeed, capacity 1.0",
    "loop": "a loop by hand",
    "moving@shm": "dispatch and combine alone",
    "copies@shm": "one copy there and one back",
}
_SHARDS = {
    "exchange": "exchanges of Ulysses alone: 2,048 tokens, 16 heads of 64",
    "ulysses": "Ulysses attention: 1,024 tokens, 16 heads of 64, causal",
    "tensor": "two Llama blocks cut in two: width 1,024, 256 tokens",
    "long": "causal attention of 4,096 tokens, 8 heads of 64",
    "loss": "loss of 8,192 tokens over 32,768 words, one rank",
}
_WAYS = {
    "ours": "ds-parallel, gloo",
    "ours@shm": "ds-parallel, shm",
    "deepspeed": "DeepSpeed",
    "torch": "torch's tensor parallelism",
    "half": "half of the model, no exchange",
    "ring@shm": "ring, shm",
    "zigzag@shm": "zigzag ring, shm",
    "tiled": "tiled loss",
    "whole": "logits as one tensor",
}


def _rows(*rows: str) -> str:
    return "\n".join(rows) + "\n"


def moe(record: Mapping[str, Any]) -> str:
    found = [
        "| one layer, forward and backward | ranks | ms | beside | ms | ratio | aim |",
        "|---|---:|---:|---|---:|---:|---|",
    ]
    for line in record["lines"]:
        what = f"{_MOE[line['config']]}: {_ENGINES[line['ours']]}"
        word = "x its tokens/s" if line["aim"].startswith(">=") else "x its time"
        mine, theirs = line["ms"]
        found.append(f"| {what} | {line['ranks']} | {mine:.1f} | {_ENGINES[line['theirs']]} | {theirs:.1f} | "
                     f"{line['ratio']:.2f} {word} | {line['aim']} |")  # fmt: skip
    return _rows(*found, "", f"Measured alone on {record['date']}: {record['machine']}.")


def pipe(record: Mapping[str, Any]) -> str:
    found = ["| schedule | median step | best step | of the median, computes |", "|---|---:|---:|---:|"]
    for line in record["lines"]:
        who, _, schedule = line["engine"].partition(":")
        found.append(f"| {'ds-pipe' if who == 'ours' else 'torch'}, `{schedule}` | {line['ms']:.1f} ms | "
                     f"{line['best_ms']:.1f} ms | {100 * line['efficiency']:.1f} % |")  # fmt: skip
    return _rows(
        *found, "", f"Running an action costs {record['action_us']:.0f} us. Measured alone: {record['machine']}."
    )


def parallel(record: Mapping[str, Any]) -> str:
    found = ["| forward and backward of | with | ms | MB of a step | beside | ms | MB | of its time | aim |",
             "|---|---|---:|---:|---|---:|---:|---:|---|"]  # fmt: skip
    for line in record["lines"]:
        (mine, theirs), (held, held_there) = line["ms"], line["step_mb"]
        aim = f"<= {line['aim']}" if line["aim"] else ""
        found.append(f"| {_SHARDS[line['config']]} | {_WAYS[line['ours']]} | {mine:.1f} | {held:.0f} | {_WAYS[line['peer']]} | "
                     f"{theirs:.1f} | {held_there:.0f} | **{line['ratio']:.2f}** | {aim} |")  # fmt: skip
    return _rows(*found, "", f"Measured alone on {record['date']}: {record['machine']}.")


def offload(record: Mapping[str, Any]) -> str:
    found = ["| stage | optimizer state | format | all on the device | ds-zero | ds-zero, gloo | DeepSpeed | of its step | MB, ds-zero | MB, DeepSpeed |",
             "|---:|---|---|---:|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    for line in record["lines"]:
        stage, where, kind = line["stage"], line["where"], "-bf16" if line["bf16"] else ""
        engines, mine = line["engines"], f"ours{stage}-{where}{kind}"
        peer, shm = engines.get(f"deepspeed{stage}-{where}{kind}"), engines.get(f"{mine}@shm", {})
        cell = lambda e, key="ms": f"{e[key]:.0f}" if e and e.get(key) is not None else "-"  # noqa: E731
        ratio = f"**{shm['of_deepspeed']:.2f}**" if shm.get("of_deepspeed") else "-"
        found.append(f"| {stage} | {'in a file' if where == 'file' else 'on the host'} | {'bf16' if kind else 'fp32'} | "
                     f"{cell(engines.get(f'ours{stage}-device{kind}@shm'))} | {cell(shm)} | {cell(engines.get(mine))} | {cell(peer)} | "
                     f"{ratio} | {cell(shm, 'mb')} | {cell(peer, 'mb')} |")  # fmt: skip
    rate = record["file"]
    return _rows(
        *found, "",
        f"Milliseconds of a step. The file, GB/s by ds-ops alone: reads {rate['read']:.1f}, writes {rate['write']:.1f}, "
        f"both at once {rate['both']:.1f}. Measured alone on {record['date']}: {record['machine']}.",
    )  # fmt: skip


TABLES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "moe": moe,
    "pipe": pipe,
    "parallel": parallel,
    "offload": offload,
}


def filled(name: str) -> tuple[Path, str]:
    """A page, and its text with the table as the record says."""
    page = PAGES / f"{name}.md"
    if not TABLE.search(page.read_text()):
        return page, page.read_text()
    text = TABLES[name](json.loads((PAGES / "data" / f"{name}.json").read_text()))
    return page, TABLE.sub(lambda m: m[1] + "\n" + text + "\n" + m[2], page.read_text())


def main(asked: list[str]) -> int:
    changed = {page: new for page, new in map(filled, TABLES) if new != page.read_text()}
    if "--check" in asked:
        return int(bool(changed))
    for page, new in changed.items():
        page.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
