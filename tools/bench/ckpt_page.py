"""The beginning of docs/benchmarks/ckpt.md out of the records of ckpt_scale, ckpt_s3 and control_plane; each of them calls it."""

from __future__ import annotations

from bench_page import PAGES, filled, markdown_table, record_of


def fill() -> None:
    """Write what the records say between the page's marks."""
    page = PAGES / "ckpt.md"
    text = scale() + store() + control()
    page.write_text(filled(page.read_text(), "ckpt_page.py: begin", "ckpt_page.py: end", text))


def table(head: list[str], rows: list[list[str]]) -> str:
    return markdown_table(head, rows, numbers=False) + "\n"


def scale() -> str:
    found = record_of("ckpt_scale")
    if not found:
        return ""
    head = [
        "layout",
        "ranks",
        "plan, s",
        "MB",
        "messages",
        "MB sent",
        "index, MB",
        "plan of a load, s",
        "MB",
        "leaves read",
    ]
    rows = [
        [
            r["layout"], f"{r['world']:,}", f"{r['plan_s']:.2f}", f"{r['plan_mb']:.0f}", str(r["messages"]), f"{r['sent_mb']:.1f}",
            f"{r['index_mb']:.1f}", f"{r['load_s']:.2f}", f"{r['load_mb']:.0f}", f"{r['leaves_same']}, {r['leaves_other']}",
        ]
        for r in found["rows"]
    ]  # fmt: skip
    return f"Measured {found['machine']['date']}, Python {found['machine']['python']}:\n\n" + table(head, rows)


def store() -> str:
    found = record_of("ckpt_s3")
    if not found:
        return ""
    rate, ratio = found["mb_s"], found["ratios"]
    rows = [
        ["save", f"{rate['save']:.0f}", f"{rate['put']:.0f}", f"{ratio['save / put']:.2f}"],
        ["load", f"{rate['load']:.0f}", f"{rate['get']:.0f}", f"{ratio['load / get']:.2f}"],
    ]
    text = f"`ckpt_s3`, {found['nbytes'] / 1e6:.0f} MB, {found['rounds']} rounds, {found['date']}; the aim is a ratio of at least 0.8:\n\n"
    return text + table(["MB/s", "ds-ckpt", "s3fs, plain", "median of ratios"], rows)


def control() -> str:
    found = record_of("control_plane")
    if not found:
        return ""
    names = [name for name in found["rows"][0] if name != "world"]
    head = ["of one rank", *(f"{r['world']:,} ranks" for r in found["rows"])]
    rows = [[name, *(f"{r[name]:,}" for r in found["rows"])] for name in names]
    return f"`control_plane`, {found['date']}:\n\n" + table(head, rows)


if __name__ == "__main__":
    fill()
