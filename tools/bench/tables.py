"""Fill the tables of docs/benchmarks/{moe,pipe,parallel,offload,monitor}.md, where a page has a place for one, from the records of the benchmarks of those names.

usage: nox -s bench -- tables [--check]

A benchmark of those names calls `fill` at its end. A table stands between `<!-- table -->` and `<!-- end -->`; a page's own text is left alone. `--check` only says whether pages are as
their records are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench_page import PAGES, fenced

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from repo import pictures

TABLE = fenced("table", "end")
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
    "least@shm": "the same, rows known before",
}
_SHARDS = {
    "exchange": "exchanges of Ulysses alone: 2,048 tokens, 16 heads of 64",
    "ulysses": "Ulysses attention: 1,024 tokens, 16 heads of 64, causal",
    "tensor": "two Llama blocks cut in two: width 1,024, 256 tokens",
    "long": "causal attention of 4,096 tokens, 8 heads of 64",
    "loss": "loss of 8,192 tokens over 32,768 words, one rank",
}
_MODELS = {"gpt": "a GPT of 17 million parameters, 1 x 32 tokens", "small": "24 layers of 64 x 64"}
_STAGES = {
    "ours": "ds-pipe",
    "torch": "torch",
    "deepspeed": "DeepSpeed",
    "alone": "what each rank computes, waiting for nobody",
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


def _measured(record: Mapping[str, Any], others: float | None) -> str:
    """When, where, and how much of the machine others took meanwhile."""
    beside = "; other work ran on the machine" if others is None else f"; background load {100 * others:.1f} %"
    return f"Measured on {record.get('date', '2026-11-22')}{beside}: {record['machine']}."


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
    return _rows(*found, "", _measured(record, record.get("others")))


def pipe(record: Mapping[str, Any]) -> str:
    found = ["| schedule | median step | best step | of the median, computes |", "|---|---:|---:|---:|"]
    for line in record["lines"]:
        who, _, schedule = line["engine"].partition(":")
        found.append(f"| {'ds-pipe' if who == 'ours' else 'torch'}, `{schedule}` | {line['ms']:.1f} ms | "
                     f"{line['best_ms']:.1f} ms | {100 * line['efficiency']:.1f} % |")  # fmt: skip
    found += ["", f"Running an action costs {record['action_us']:.0f} us."]
    stages = record.get("stages", {})
    if stages:
        found += [
            "",
            "| two real stages | with | ms | MB of both ranks | of DeepSpeed's step |",
            "|---|---|---:|---:|---:|",
        ]
    for config, engines in stages.items():
        for engine, e in engines.items():
            ratio = f"**{e['of_deepspeed']:.2f}**" if e["of_deepspeed"] and engine.startswith("ours") else ""
            found.append(f"| {_MODELS[config]} | {_stage_engine(engine)} | {e['ms']:.1f} | {e['mb']:.0f} | {ratio} |")
    return _rows(*found, "", _measured(record, record.get("others")))


def _stage_engine(engine: str) -> str:
    who, _, schedule = engine.partition(":")
    name, _, via = who.partition("@")
    return _STAGES[name] + (f", `{schedule}`" if schedule else "") + (f", {via or 'gloo'}" if name == "ours" else "")


def parallel(record: Mapping[str, Any]) -> str:
    found = ["| forward and backward of | with | ms | MB of a step | beside | ms | MB | of its time | aim |",
             "|---|---|---:|---:|---|---:|---:|---:|---|"]  # fmt: skip
    for line in record["lines"]:
        (mine, theirs), (held, held_there) = line["ms"], line["step_mb"]
        aim = f"<= {line['aim']}" if line["aim"] else ""
        found.append(f"| {_SHARDS[line['config']]} | {_WAYS[line['ours']]} | {mine:.1f} | {held:.0f} | {_WAYS[line['peer']]} | "
                     f"{theirs:.1f} | {held_there:.0f} | **{line['ratio']:.2f}** | {aim} |")  # fmt: skip
    others = [line["others"] for line in record["lines"] if "others" in line]
    return _rows(*found, "", _measured(record, max(others, default=None)))


def offload(record: Mapping[str, Any]) -> str:
    early = any(f"ours{line['stage']}-early@shm" in line["engines"] for line in record["lines"])
    more, rule = (" early |", "---:|") if early else ("", "")
    found = [f"| stage | optimizer state | format | all on the device | ds-zero |{more} ds-zero, gloo | DeepSpeed | of its step | MB, ds-zero | MB, DeepSpeed |",
             f"|---:|---|---|---:|---:|{rule}---:|---:|---:|---:|---:|"]  # fmt: skip
    for line in record["lines"]:
        stage, where, kind = line["stage"], line["where"], "-bf16" if line["bf16"] else ""
        engines, mine = line["engines"], f"ours{stage}-{where}{kind}"
        peer, shm = engines.get(f"deepspeed{stage}-{where}{kind}"), engines.get(f"{mine}@shm", {})
        cell = lambda e, key="ms": f"{e[key]:.0f}" if e and e.get(key) is not None else "-"  # noqa: E731
        ratio = f"**{shm['of_deepspeed']:.2f}**" if shm.get("of_deepspeed") else "-"
        begun = f" {cell(engines.get(f'ours{stage}-early{kind}@shm'))} |" if early else ""
        found.append(f"| {stage} | {'in a file' if where == 'file' else 'on the host'} | {'bf16' if kind else 'fp32'} | "
                     f"{cell(engines.get(f'ours{stage}-device{kind}@shm'))} | {cell(shm)} |{begun} {cell(engines.get(mine))} | {cell(peer)} | "
                     f"{ratio} | {cell(shm, 'mb')} | {cell(peer, 'mb')} |")  # fmt: skip
    rate = record["file"]
    return _rows(
        *found, "",
        f"Milliseconds of a step. The file, GB/s by ds-ops alone: reads {rate['read']:.1f}, writes {rate['write']:.1f}, "
        f"both at once {rate['both']:.1f}. {_measured(record, record.get('others'))}",
    )  # fmt: skip


def monitor(record: Mapping[str, Any]) -> str:
    found = ["| sinks | µs of the step's thread | µs of the sinks' threads | of a step of 20 ms | ms without | ms with |",
             "|---|---:|---:|---:|---:|---:|"]  # fmt: skip
    for line in record["lines"]:
        found.append(f"| {line['sinks']} | {line['calls_us']:.0f} | {line['threads_us']:.0f} | **{100 * line['share']:.2f} %** | "
                     f"{line['step_ms']:.2f} | {line['with_ms']:.2f} |")  # fmt: skip
    return _rows(*found, "", _measured(record, record["others"]))


def comm(record: Mapping[str, Any]) -> str:
    found = ["| operation | message | gloo | shm | against gloo, in turns | in a row | against a memcpy | others |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    short = ["| operation | message | gloo | shm, in turns | in a row | against gloo, in turns | in a row | others |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for row in record["collectives"]["rows"]:
        gloo, shm, limit, nbytes = row["gloo"], row["shm"], row.get("memcpy"), row["nbytes"]
        ratios = f"{gloo['median_s'] / shm['median_s']:.1f}x | {gloo['row_s'] / shm['row_s']:.1f}x"
        others = f"{100 * row['others']:.0f} %"
        if nbytes >= 1 << 20 and limit:
            found.append(f"| {row['op']} | {nbytes >> 20} MiB | {nbytes / gloo['median_s'] / 1e9:.1f} GB/s | {nbytes / shm['median_s'] / 1e9:.1f} GB/s | "
                         f"{ratios} | {limit['median_s'] / shm['median_s']:.2f} | {others} |")  # fmt: skip
        else:
            short.append(f"| {row['op']} | {nbytes >> 10} KiB | {gloo['median_s'] * 1e6:.0f} us | {shm['median_s'] * 1e6:.0f} us | "
                         f"{shm['row_s'] * 1e6:.0f} us | {ratios} | {others} |")  # fmt: skip
    arena = ["| shared arena | message | gloo | arena | against gloo, in turns | in a row | against the passes alone |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for row in record["arena"]["rows"]:
        way = "arena" if "arena" in row else "arena copy-out"
        gloo, ours, limit, nbytes = row["gloo"], row[way], row.get("limit"), row["nbytes"]
        if nbytes < 1 << 20 or limit is None:
            continue
        arena.append(f"| {row['op']} | {nbytes >> 20} MiB | {nbytes / gloo['median_s'] / 1e9:.1f} GB/s | {nbytes / ours['median_s'] / 1e9:.1f} GB/s | "
                     f"{gloo['median_s'] / ours['median_s']:.1f}x | {gloo['row_s'] / ours['row_s']:.1f}x | "
                     f"{limit['median_s'] / ours['median_s']:.2f} |")  # fmt: skip
    ddp = ["| DDP adds to a step | on gloo | on shm | of it |", "|---|---|---|---|"]
    for batch, row in record["ddp"]["rows"].items():
        gloo, shm = row["gloo"]["over_s"], row["shm"]["over_s"]
        ddp.append(
            f"| {batch}, {row['alone']['row_s'] * 1e3:.0f} ms | {gloo * 1e3:.1f} ms | {shm * 1e3:.1f} ms | {shm / gloo:.2f} |"
        )
    calls = record["recorder"]["100 operations"]
    each = (calls["on"]["median_s"] - calls["off"]["median_s"]) / 100
    kept = f"The recorder takes {each * 1e6:.1f} us of an operation, and {record['recorder']['recorder_bytes'] >> 10} KiB of a rank."
    losses = {name: f"{record[name]['loss']:.4f}" for name in ("adam", "onebit", "forgetful")}
    trained = (f"Nats a byte after {record['adam']['steps']} steps of the quickstart's model: Adam {losses['adam']}, 1-bit Adam {losses['onebit']}, "
               f"without error feedback {losses['forgetful']}.")  # fmt: skip
    return _rows(
        *found, "", *short, "", *arena, "", *ddp, "", kept, "", trained, "", _measured(record, None).replace("; other work ran on the machine", "")
    )  # fmt: skip


TABLES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "comm": comm,
    "moe": moe,
    "pipe": pipe,
    "parallel": parallel,
    "offload": offload,
    "monitor": monitor,
}


def filled(name: str) -> tuple[Path, str]:
    """A page, and its text with the table as the record says; unchanged where there is no place for one, or no record yet."""
    page, record = PAGES / f"{name}.md", PAGES / "data" / f"{name}.json"
    if not TABLE.search(page.read_text()) or not record.exists():
        return page, page.read_text()
    text = TABLES[name](json.loads(record.read_text()))
    return page, TABLE.sub(lambda m: m[1] + "\n" + text + "\n" + m[2], page.read_text())


def fill(*names: str) -> None:
    """Write the tables and the pictures of these pages."""
    for name in names:
        page, text = filled(name)
        page.write_text(text)
        pictures.file_of(name).write_text(pictures.text_of(name))


def main(asked: list[str]) -> int:
    if "--check" in asked:
        return int(any(new != page.read_text() for page, new in map(filled, TABLES)))
    fill(*TABLES)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
