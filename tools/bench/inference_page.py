"""The picture and the table at the head of docs/benchmarks/inference.md, from the data file of the benchmark.

nox -s bench -- inference_page        (needs matplotlib)
"""

from __future__ import annotations

import statistics
from typing import Any

from bench_page import PAGES, filled, record_of

PAGE = PAGES / "inference.md"
PICTURE = PAGE.with_suffix(".svg")
REQUESTS = 32 * 64
NAMES = {
    "ours-bf16": "ours bf16",
    "openvino-fp16": "OpenVINO GenAI fp16",
    "llamacpp-bf16": "llama.cpp bf16",
    "transformers-bf16": "transformers bf16",
    "ours-int8-rounded": "ours int8, inputs rounded",
    "ours-int8": "ours int8",
    "openvino-int8": "OpenVINO GenAI int8",
    "llamacpp-q8_0": "llama.cpp q8_0",
    "ours-int4-rounded": "ours int4, inputs rounded",
    "ours-int4": "ours int4",
    "ours-bf16-avx2": "ours bf16, AVX2 only",
    "ours-int8-avx2": "ours int8, AVX2 only",
}


def figures(entry: dict[str, Any]) -> dict[str, float]:
    times = entry["times_s"]
    found: dict[str, float] = {}
    if times.get("decode"):
        found["decode"] = 1 / statistics.median(times["decode"])
    if times.get("first"):
        found["first"] = statistics.median(times["first"])
    if times.get("batch"):
        found["batch"] = REQUESTS / statistics.median(times["batch"])
    return found


def table(record: dict[str, Any]) -> str:
    rows = [
        "| 2 threads | one request, tokens/s | of what could be read | first token of 512, s | 32 requests, tokens/s | resident MB |"
    ]
    rows.append("|---|---|---|---|---|---|")
    read = statistics.median(
        [e["read_bytes_per_s"] for e in record["engines"].values() if "read_bytes_per_s" in e] or [1.0]
    )
    for name, title in NAMES.items():
        entry = record["engines"].get(name)
        if entry is None:
            continue
        f = figures(entry)
        share = f"{100 * f['decode'] * entry['bytes'] / read:.0f} %" if "decode" in f else "-"
        cells = [f"{f['decode']:.0f}" if "decode" in f else "-", share]
        cells += [f"{f['first']:.2f}" if "first" in f else "-", f"{f['batch']:.0f}" if "batch" in f else "-"]
        rows.append(f"| {title} | {' | '.join(cells)} | {entry['resident_bytes'] / 1e6:.0f} |")
    rows.append("")
    others = max(e["others_share"] for e in record["engines"].values())
    when = sorted(e["when"] for e in record["engines"].values())
    rows.append(
        f"Read bandwidth of two threads {read / 1e9:.0f} GB/s; measured {when[0]} to {when[-1]} on {record['machine']}; while an"
    )
    rows.append(f"engine was measured, background load was at most {100 * others:.1f} %.")
    return "\n".join(rows)


def draw(record: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "inference"
    from matplotlib import pyplot

    found = [(title, figures(record["engines"][name])) for name, title in NAMES.items() if name in record["engines"]]
    titles = {
        "decode": "one request, tokens/s",
        "first": "first token of 512, s (less is better)",
        "batch": "32 requests, tokens/s",
    }
    figure, axes = pyplot.subplots(1, 3, figsize=(11, 0.32 * len(found) + 1), sharey=True)
    for axis, (part, title) in zip(axes, titles.items(), strict=True):
        values = [f.get(part, 0.0) for _, f in found]
        colours = ["#2a6fbb" if name.startswith("ours") else "#b0b0b0" for name, _ in found]
        bars = axis.barh([name for name, _ in found], values, color=colours)
        axis.bar_label(bars, [f"{v:.2f}" if part == "first" else f"{v:.0f}" for v in values], fontsize=8, padding=2)
        axis.set_title(title, fontsize=9)
        axis.set_xlim(0, 1.18 * max(values))
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    record = record_of("inference")
    draw(record)
    shown = f"![Bars of the table below]({PICTURE.name})\n\n{table(record)}\n"
    PAGE.write_text(filled(PAGE.read_text(), "figures", "end of figures", shown))


if __name__ == "__main__":
    main()
