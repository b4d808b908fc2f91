"""Fill the tables of docs/benchmarks from the records of the benchmarks.

usage: nox -s bench -- tables [--check]

A benchmark calls `fill` at its end. A table stands between `<!-- table -->` and `<!-- end -->`, with words behind `table` where a page has several; a page's
own text is left alone. `--check` only says whether pages are as their records are.
"""

from __future__ import annotations

import re
import statistics
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import records
from bench_page import fenced, markdown_table
from zero_record import floor_mb, rows_of

sys.path.insert(0, str(records.ROOT / "tools"))
from repo import pictures

WORDS: Mapping[str, Mapping[str, str]] = tomllib.loads(Path(__file__).with_name("tables.toml").read_text())
"""How pages call what records name; `heads` are those of tables, separated by bars."""
HEADS = {name: head.split("|") for name, head in WORDS["heads"].items()}
TABLE = fenced(r"table((?: \w+)*)", "end")
Record = Mapping[str, Any]


def _measured(record: Record, others: float | None = None, unknown: str = "; other work ran on the machine") -> str:
    """When, where, and how much of the machine others took meanwhile."""
    beside = unknown if others is None else f"; background load {100 * others:.1f} %"
    return f"Measured on {record.get('date', '2026-11-22')}{beside}: {record['machine']}.\n"


def zero(record: Record, config: str, world: str, transport: str) -> str:
    entry = record["results"].get(f"{config}-{world}")
    if entry is None:
        return "Not measured.\n"
    rows, lines = rows_of(entry), []
    digits = 0 if rows["fwdbwd"]["step_ms"] > 20 else 2
    for engine, row in rows.items():
        if not _chosen(engine, transport):
            continue
        floor = floor_mb(engine, rows, int(world))
        shared = "@" in engine and engine.startswith("ours")
        floors = (floor, floor_mb(engine, rows, int(world), shared=True) if shared else None)
        lines.append([
            _engine(engine), f"{row['step_ms']:.{digits}f}", f"{row['over_ms']:.{digits}f}" if "over_ms" in row else "",
            f"{row['cpu_ms']:.{min(digits, 1)}f}", f"{row['init_ms']:.0f}", f"{row['node_mb']:.0f}",
            *(f"{row['node_mb'] / f:.2f}" if f else "" for f in floors), str(row["turns"]),
        ])  # fmt: skip
    head = ["engine", "step ms", "over f+b", "CPU ms", "setup ms", "node MB", "of floor", "of shared floor", "turns"]
    others = f"; background load {100 * entry['others']:.1f} %" if "others" in entry else ""
    return markdown_table(head, lines) + f"\nMeasured on {entry['date']}{others}.\n"


_ZERO = WORDS["zero"]


def _engine(engine: str) -> str:
    plain, _, via = engine.partition("@")
    if plain.startswith("ours"):
        return f"**ds-zero {plain[4]}**, {via or 'gloo'}"
    if plain.startswith("deepspeed"):
        return f"DeepSpeed {plain[9]}" + (", tuned" if plain.endswith("tuned") else "")
    return _ZERO[plain] + (f", our {via}" if via else "")


def _chosen(engine: str, transport: str) -> bool:
    """Whether a row belongs in a table: `best` gives each its best transport, `gloo` and `shm` that one, `all` every row."""
    ours, via = engine.startswith("ours"), engine.partition("@")[2]
    if transport == "best":
        return via == "shm" if ours else not via
    if transport == "gloo":
        return not via
    if transport == "shm":
        return via == "shm" or engine == "fwdbwd"
    return True


_MOE = WORDS["moe"]


def moe(record: Record) -> str:
    rows = [
        [
            f"{_MOE[line['config']]}: {_MOE[line['ours']]}", str(line["ranks"]), f"{line['ms'][0]:.1f}",
            _MOE[line["peer"]], f"{line['ms'][1]:.1f}",
            f"{line['ratio']:.2f} x its {'tokens/s' if line['aim'].startswith('>=') else 'time'}", line["aim"],
        ]
        for line in record["lines"]
    ]  # fmt: skip
    head = ["one layer, forward and backward", "ranks", "ms", "beside", "ms", "ratio", "aim"]
    return markdown_table(head, rows, "lrrlrrl") + "\n" + _measured(record, record.get("others"))


_STAGES = WORDS["stages"]


def pipe(record: Record) -> str:
    rows = []
    for line in record["lines"]:
        who, _, schedule = line["engine"].partition(":")
        share = f"{100 * line['efficiency']:.1f} %"
        rows.append([f"{_STAGES[who]}, `{schedule}`", f"{line['ms']:.1f} ms", f"{line['best_ms']:.1f} ms", share])
    text = markdown_table(["schedule", "median step", "best step", "of the median, computes"], rows)
    text += f"\nRunning an action costs {record['action_us']:.0f} us.\n\n"
    rows = []
    for config, engines in record.get("stages", {}).items():
        for engine, e in engines.items():
            ratio = f"**{e['of_deepspeed']:.2f}**" if e["of_deepspeed"] and engine.startswith("ours") else ""
            rows.append([_STAGES[config], _stage_engine(engine), f"{e['ms']:.1f}", f"{e['mb']:.0f}", ratio])
    head = ["two real stages", "with", "ms", "MB of both ranks", "of DeepSpeed's step"]
    return text + markdown_table(head, rows, "llrrr") + "\n" + _measured(record, record.get("others"))


def _stage_engine(engine: str) -> str:
    who, _, schedule = engine.partition(":")
    name, _, via = who.partition("@")
    return _STAGES[name] + (f", `{schedule}`" if schedule else "") + (f", {via or 'gloo'}" if name == "ours" else "")


_SHARDS = WORDS["shards"]


def parallel(record: Record) -> str:
    rows = []
    for line in record["lines"]:
        (mine, theirs), (held, held_there) = line["ms"], line["mb"]
        rows.append([_SHARDS[line["config"]], _SHARDS[line["ours"]], f"{mine:.1f}", f"{held:.0f}", _SHARDS[line["peer"]],
                     f"{theirs:.1f}", f"{held_there:.0f}", f"**{line['ratio']:.2f}**", line["aim"]])  # fmt: skip
    head = ["forward and backward of", "with", "ms", "MB of a step", "beside", "ms", "MB", "of its time", "aim"]
    others = max((line["others"] for line in record["lines"] if "others" in line), default=None)
    return markdown_table(head, rows, "llrrlrrrl") + "\n" + _measured(record, others)


def offload(record: Record) -> str:
    rows = []
    for line in record["lines"]:
        stage, where, kind = line["stage"], line["where"], "-bf16" if line["bf16"] else ""
        engines, mine = line["engines"], f"ours{stage}-{where}{kind}"
        peer, shm = engines.get(f"deepspeed{stage}-{where}{kind}"), engines.get(f"{mine}@shm", {})
        cell = lambda e, key="ms": f"{e[key]:.0f}" if e and e.get(key) is not None else "-"  # noqa: E731
        rows.append([
            str(stage), "in a file" if where == "file" else "on the host", "bf16" if kind else "fp32",
            cell(engines.get(f"ours{stage}-device{kind}@shm")), cell(shm), cell(engines.get(f"ours{stage}-early{kind}@shm")),
            cell(engines.get(mine)), cell(peer), f"**{shm['of_deepspeed']:.2f}**" if shm.get("of_deepspeed") else "-",
            cell(shm, "mb"), cell(peer, "mb"),
        ])  # fmt: skip
    head = HEADS["offload"]
    rate = record["file"]
    said = f"reads {rate['read']:.1f}, writes {rate['write']:.1f}, both at once {rate['both']:.1f}. "
    said = "\nMilliseconds of a step. The file, GB/s by ds-ops alone: " + said
    return markdown_table(head, rows, "rll" + 8 * "r") + said + _measured(record, record.get("others"))


def monitor(record: Record) -> str:
    rows = [
        [line["sinks"], f"{line['calls_us']:.0f}", f"{line['threads_us']:.0f}", f"**{100 * line['share']:.2f} %**",
         f"{line['step_ms']:.2f}", f"{line['with_ms']:.2f}"]
        for line in record["lines"]
    ]  # fmt: skip
    head = HEADS["monitor"]
    return markdown_table(head, rows) + "\n" + _measured(record, record["others"])


def comm(record: Record) -> str:
    long, short, arena = [], [], []
    for row in record["collectives"]["rows"]:
        gloo, shm, limit, nbytes = row["gloo"], row["shm"], row.get("memcpy"), row["nbytes"]
        ratios = [f"{gloo[how] / shm[how]:.1f}x" for how in ("median_s", "row_s")]
        others = f"{100 * row['others']:.0f} %"
        if nbytes >= 1 << 20 and limit:
            of = f"{limit['median_s'] / shm['median_s']:.2f}"
            long.append(
                [row["op"], f"{nbytes >> 20} MiB", *(_rate(nbytes, one) for one in (gloo, shm)), *ratios, of, others]
            )
        else:
            us = [f"{s * 1e6:.0f} us" for s in (gloo["median_s"], shm["median_s"], shm["row_s"])]
            short.append([row["op"], f"{nbytes >> 10} KiB", *us, *ratios, others])
    for row in record["arena"]["rows"]:
        gloo, ours, limit, nbytes = (
            row["gloo"],
            row.get("arena") or row["arena copy-out"],
            row.get("limit"),
            row["nbytes"],
        )
        if nbytes >= 1 << 20 and limit:
            ratios = [f"{gloo[how] / ours[how]:.1f}x" for how in ("median_s", "row_s")]
            of = f"{limit['median_s'] / ours['median_s']:.2f}"
            arena.append([row["op"], f"{nbytes >> 20} MiB", *(_rate(nbytes, one) for one in (gloo, ours)), *ratios, of])
    ddp = []
    for batch, row in record["ddp"]["rows"].items():
        gloo, shm = row["gloo"]["over_s"], row["shm"]["over_s"]
        ms = [f"{s * 1e3:.1f} ms" for s in (gloo, shm)]
        ddp.append([f"{batch}, {row['alone']['row_s'] * 1e3:.0f} ms", *ms, f"{shm / gloo:.2f}"])
    against = ["against gloo, in turns", "in a row"]
    tables = [
        (["operation", "message", "gloo", "shm", *against, "against a memcpy", "others"], long),
        (["operation", "message", "gloo", "shm, in turns", "in a row", *against, "others"], short),
        (["shared arena", "message", "gloo", "arena", *against, "against the passes alone"], arena),
        (["DDP adds to a step", "on gloo", "on shm", "of it"], ddp),
    ]
    calls = record["recorder"]["100 operations"]
    each = (calls["on"]["median_s"] - calls["off"]["median_s"]) / 100
    kept = f"The recorder takes {each * 1e6:.1f} us of an operation, and {record['recorder']['recorder_bytes'] >> 10} KiB of a rank.\n"
    return "\n".join([*(markdown_table(head, rows, "l") for head, rows in tables), kept, _measured(record, unknown="")])


def _rate(nbytes: int, row: Record) -> str:
    return f"{nbytes / row['median_s'] / 1e9:.1f} GB/s"


def ckpt_s3(record: Record) -> str:
    rate, ratio = record["mb_s"], record["ratios"]
    rows = [[what, f"{rate[what]:.0f}", f"{rate[plain]:.0f}", f"{ratio[f'{what} / {plain}']:.2f}"]
            for what, plain in (("save", "put"), ("load", "get"))]  # fmt: skip
    text = f"`ckpt_s3`, {record['nbytes'] / 1e6:.0f} MB, {record['rounds']} rounds, {record['date']}; the aim is a ratio of at least 0.8:\n\n"
    return text + markdown_table(["MB/s", "ds-ckpt", "s3fs, plain", "median of ratios"], rows, "l")


_COMPILED = WORDS["compiled"]


def compiled(record: Record) -> str:
    parts = []
    for name, engines in record["meetings"].items():
        (first, least), *_ = engines.items()
        rows = []
        for engine, row in engines.items():
            plain, _, via = engine.partition("@")
            passing = f"{row['passing'] / 2**20:.1f} MiB"
            if engine.startswith("eager"):
                passing += f" (compiled: **{least['passing'] / row['passing']:.2f}** of it, aim 1.0)"
            of = "" if engine == first else f"**{row['of']:.3f}** of it (aim 0.95)"
            rows.append(
                [f"{_COMPILED[plain]}, {via or 'gloo'}", f"{row['ms']:.1f} ms", of, passing, f"{row['loss']:.6f}"]
            )
        head = [words.format(name) for words in HEADS["compile"]]
        took = [["with an empty cache", f"{least['compile_s']:.1f} s ({least['graphs']} graphs, two ranks)"],
                ["the same run again, from torch's cache on disk", f"{least['warm_compile_s']:.1f} s"]]  # fmt: skip
        parts += [
            markdown_table(head, rows, "l"),
            markdown_table(["to compile", ""], took, "l").replace("|  |", "| |", 1),
        ]
    said = f"Measured {record['date']} on {record['machine']}; `alone` in the record says what others took meanwhile.\n"
    return "\n".join([*parts, said])


def gpu(record: Record) -> str:
    names = {"plain": "a plain loop: autocast, fused AdamW", "FSDP2": "FSDP2"}
    plain_ms = record["training"][0]["ms"]
    steps = [
        [names.get(row["name"], f"**ds-zero {row['name']}**"), f"{row['ms']:.1f}", f"{row['ms'] / plain_ms:.2f}",
         f"{row['peak_gib']:.1f}", f"{row['losses'][7]:.2f}"]
        for row in record["training"]
    ]  # fmt: skip
    # Rows of before 2026-11-26 took their prompt from the cache; they have no time of a first token, and are not shown.
    loads = [
        [f"{row['size']}, {row['rows']} x {row['prompt']}", row["engine"], f"{row['rows'] * row['new'] / row['s']:,.0f}",
         f"{1e3 * row['first_s']:.0f}", f"{row['peak_gib']:.1f}"]
        for row in record["generation"] if "engine" in row
    ]  # fmt: skip
    kernels = [
        [row["name"], f"{row['us']:.0f}", f"{row['gb_s']:.0f}", f"{row['share']:.0%}", f"{row['peer']:.2f}x" if row["peer"] else ""]
        for row in record["kernels"]
    ]  # fmt: skip
    tables = [
        (["a step of the GPT", "ms", "of a plain loop", "peak memory, GiB", "loss after 8 steps"], steps),
        (["generation", "engine", "tokens/s", "first token, ms", "peak memory, GiB"], loads),
        (["kernel", "us", "GB/s", "of a copy", "torch takes"], kernels),
    ]
    said = f"Measured {record['date']} on one {record['machine']}, alone.\n"
    return "\n".join([*(markdown_table(head, rows, "l") for head, rows in tables if rows), said])


def inference(record: Record) -> str:
    every = record["engines"].values()
    engines = {
        title: record["engines"][name] for name, title in pictures.GENERATION.items() if name in record["engines"]
    }
    read = statistics.median([e["read_bytes_per_s"] for e in every if "read_bytes_per_s" in e] or [1.0])
    rows = []
    for title, entry in engines.items():
        f = pictures.generation_rates(entry)
        share = f"{100 * f['decode'] * entry['bytes'] / read:.0f} %" if "decode" in f else "-"
        rates = {
            part: f"{f[part]:.{digits}f}" if part in f else "-"
            for part, digits in (("decode", 0), ("first", 2), ("batch", 0))
        }
        rows.append(
            [title, rates["decode"], share, rates["first"], rates["batch"], f"{entry['resident_bytes'] / 1e6:.0f}"]
        )
    head = HEADS["inference"]
    others, when = max(e["others_share"] for e in every), sorted(e["when"] for e in every)
    said = f"Read bandwidth of two threads {read / 1e9:.0f} GB/s; measured {when[0]} to {when[-1]} on {record['machine']}; while an\n"
    said += f"engine was measured, background load was at most {100 * others:.1f} %.\n"
    return markdown_table(head, rows, "l") + "\n" + said


def launch(record: Record, what: str = "") -> str:
    if what == "said":
        beside = "**Other work ran on the machine.** " if record["beside_others"] else ""
        said = f"Alternating, medians of {record['repeats']}, one OpenMP thread a rank. {record['machine']}, {record['date']}. {beside}"
        return f"`nox -s bench -- launch`; record `data/launch.json`. {said}\n"
    rows = []
    for script, launchers in record["rows"].items():
        peer = launchers["DeepSpeed"]
        for name, row in launchers.items():
            cells = [
                f"{row[key] / of[key]:.2f}" for of in ({"wall_s": 1, "cpu_s": 1}, peer) for key in ("wall_s", "cpu_s")
            ]
            rows.append([script, f"`{name}`", *cells])
    head = ["script", "launcher", "wall s", "processor s", "wall, of DeepSpeed's", "processor, of DeepSpeed's"]
    return markdown_table(head, rows, "l")


def tune(record: Record, what: str = "") -> str:
    if what == "said":
        alone, lines = record.get("alone", {}), []
        for part in (key for key in record if key.startswith("grid ") or key == "limits"):
            commands = [command for command in alone if command.startswith(f"tune {part}")]
            line = alone[commands[-1]] if commands else "how alone is not known, so its times say little"
            lines.append(f"- `nox -s bench -- tune {part}`, {record[part]['date']}: {line}.\n")
        return "".join(lines)
    rows = []
    for form in [key for key in ("quickstart", "deep", "wide", "experts") if f"grid {key}" in record]:
        found = record[f"grid {form}"]
        e = tune_errors(found)
        slower = "the same" if found["chosen"] == found["best"] else f"{e['choice']:.1%} slower"
        cells = [f"{e[key]:.1%}" for key in ("memory", "above the process", "time")]
        rows.append([form, str(found["candidates"]), *cells, str(found["trials"]), slower])
    rows.append(["aim", "", "5 %", "", "15 %", "a quarter", "3 %"])
    head = HEADS["tune"]
    text = markdown_table(head, rows, "l").replace("|  |", "| |")
    if (found := record.get("limits")) is not None:
        drawn = len(found["rows"])
        wrong = [row for row in found["rows"] if row["predicted"] != row["fitted"]]
        died = sum(row["predicted"] for row in wrong)
        text += (
            f"\nUnder a limit of memory (`RLIMIT_AS` of each rank), {drawn} drawn configurations of {drawn // 20} drawn models, most limits "
            f"within 10 % of what was predicted: **{len(wrong)} predicted wrong** ({len(wrong) / drawn:.1%}; aim 2 %), {died} of them died though predicted to fit.\n"
        )
    return text


def tune_errors(found: Record) -> dict[str, float]:
    """Medians over what the tuning did not try: of memory whole and beside the bare process, and of time; and how far the choice
    is from the best."""

    def median(kind: str, base: int = 0) -> float:
        rows = [r for r in found["rows"] if not r.get("tried")]
        return statistics.median(
            abs(r[f"predicted_{kind}"] - r[f"measured_{kind}"]) / max(1, r[f"measured_{kind}"] - base) for r in rows
        )

    return {
        "memory": median("bytes"), "above the process": median("bytes", found["base_bytes"]), "time": median("ms"),
        "choice": found["chosen_ms"] / found["best_ms"] - 1,
    }  # fmt: skip


TABLES: Mapping[str, Callable[..., str]] = {
    "zero": zero, "comm": comm, "moe": moe, "pipe": pipe, "parallel": parallel, "offload": offload, "monitor": monitor,
    "ckpt": ckpt_s3, "compile": compiled, "gpu": gpu, "inference": inference, "launch": launch, "tune": tune,
}  # fmt: skip
RECORDS = {"ckpt": "ckpt_s3"}
"""Where a page shows the record of another name."""


def pages_of(name: str) -> list[Path]:
    """A benchmark's page, and its notes where there are some."""
    notes = records.PAGES.parent / "decisions" / "measured" / f"{name}.md"
    return [records.PAGES / f"{name}.md", *([notes] if notes.exists() else [])]


def filled(name: str, page: Path) -> str:
    """A page with its tables as the record says; as it is where there is no record yet."""
    record = records.read(RECORDS.get(name, name))

    def one(match: re.Match[str]) -> str:
        head, words, end = match.groups()
        return f"{head}\n{TABLES[name](record, *words.split())}\n{end}"

    return TABLE.sub(one, page.read_text()) if record else page.read_text()


def fill(*names: str) -> None:
    """Write the tables of these pages and print them; write the pictures."""
    for name in names:
        for page in pages_of(name):
            page.write_text(text := filled(name, page))
            print("".join(match[0] for match in TABLE.finditer(text)), flush=True)
    for picture in pictures.PICTURES:
        pictures.file_of(picture).write_text(pictures.text_of(picture))


def main(asked: list[str]) -> int:
    if "--check" in asked:
        return int(any(filled(name, page) != page.read_text() for name in TABLES for page in pages_of(name)))
    fill(*TABLES)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
