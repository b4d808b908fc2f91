"""docs/reference/configuration.md: every key with its meaning, default, version, DeepSpeed's name and an example.

Read from the models of the configuration and from docs/reference/keys.toml. Words: the *path* of a key is dotted, with `*` for any name
of an object and `0` for any position of a list; it is the key's anchor on the page.
"""

from __future__ import annotations

import fnmatch
import inspect
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from repo import ROOT

__all__ = ["Row", "page", "rows", "sections"]

NOTES = ROOT / "docs" / "reference" / "keys.toml"

_HEAD = """# Configuration keys

<!-- Made by `python tools/pages.py configuration` from the models and docs/reference/keys.toml. -->

Every key that a configuration may have. Names are DeepSpeed's; a key marked *own* exists only here. All exist since version
0.1 unless the row names another. `*` stands for any name in an object, `0` for any position in a list. Below each key are the values that it
accepts, then its default. `ds config key zero_optimization.stage` prints one row in a terminal; messages about keys end with that command.

A key that is not here is an error with the nearest known name. A key marked *not built* is an error unless it is off; one marked
*no effect* is accepted with a line in the log; *deprecated* keys move to their new place. `ds config check FILE --keys` reports on a file of
yours.

```json
{
  "train_batch_size": 256,
  "train_micro_batch_size_per_gpu": 8,
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
  "gradient_clipping": 1.0,
  "bf16": {"enabled": true},
  "zero_optimization": {"stage": 3}
}
```
"""

# The page begins with what nearly every file has. Keys of the first group stand alone in one table; a section named here stands in this order,
# all others follow as the models order them.
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_SECTIONS = (
    "optimizer",
    "scheduler",
    "zero_optimization",
    "bf16",
    "fp16",
    "torch_autocast",
    "data_types",
    "activation_checkpointing",
    "checkpoint",
    "aio",
    "tensor_parallel",
    "expert_parallel",
    "pipeline",
    "compile",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One key of one model, as the page shows it."""

    path: str
    accepts: str
    default: str
    meaning: str
    example: str


def rows() -> Iterator[Row]:
    """All keys in the order of the models. A path may come again, with another type of optimizer or schedule."""
    from ds_config import keys
    from ds_config.schema_fields import Unsupported
    from ds_config.shape import describe, of_field, retired
    from ds_engine import Config

    notes = tomllib.loads(NOTES.read_text())
    unbuilt: set[str] = set()  # sections; what stands in them is not built with them
    for key in keys(Config):
        path = ".".join(map(str, key.path))
        field = key.model.model_fields[key.field]
        reason = retired(field)
        if isinstance(reason, Unsupported):
            unbuilt.add(f"{path}.")
        told = field.description or _attribute(key.model, key.field) or _noted(notes["meaning"], path)
        meaning = _said(reason) if reason is not None else told
        if reason is None and str(key.path[-1]) != key.field:
            meaning = f"Another spelling of `{key.field}`."
        if not meaning and path.startswith(tuple(unbuilt)):
            meaning = "*Not built*, as its section."
        if any(path == own or path.startswith(f"{own}.") for own in notes["own"]):
            meaning += " *Own.*"
        if since := notes["since"].get(path):
            meaning += f" Since {since}."
        default = "required" if field.is_required() else _default(field)
        example = "" if reason is not None or path.startswith(tuple(unbuilt)) else _example(key.path, field)
        yield Row(path, describe(of_field(field)), default, meaning, example)


def _attribute(model: type, field: str) -> str:
    """What the section `Attributes:` of the model's docstring says of a field."""
    doc = inspect.getdoc(model) or ""
    found = re.search(rf"^    {field}: (.*(?:\n     +.*)*)", doc.partition("Attributes:")[2], re.MULTILINE)
    return " ".join(found[1].split()) if found else ""


def _noted(meanings: Mapping[str, str], path: str) -> str:
    if path in meanings:
        return meanings[path]
    return next((text for pattern, text in meanings.items() if "*" in pattern and fnmatch.fnmatch(path, pattern)), "")


def _said(reason: object) -> str:
    from ds_config.schema_fields import Deprecated, NoEffect, Unsupported

    if isinstance(reason, Deprecated):
        return f"*Deprecated*: use `{reason.new}`."
    if isinstance(reason, NoEffect):
        return f"*No effect*: {reason.why}."
    return f"*Not built*: {reason.instead}." if isinstance(reason, Unsupported) else ""


def _default(field: Any) -> str:
    value = field.get_default(call_default_factory=True)
    return "{...}" if hasattr(value, "model_dump") else _json(value)


def _json(value: object) -> str:
    try:
        return json.dumps(list(value) if isinstance(value, tuple) else value)
    except TypeError:
        return str(value)


def _example(path: tuple[str | int, ...], field: Any) -> str:
    """The key with a value that is not its default; empty where the type alone cannot tell one."""
    from ds_config.shape import literals, of_field

    found = of_field(field)
    default = field.default
    value: object
    if choices := [choice for choice in literals(found) if choice not in (default, None)]:
        value = choices[-1]
    elif any(option.type is bool for option in found):
        value = default is not True
    else:
        return ""
    return f'"{path[-1]}": {_json(value)}'


def sections() -> dict[str, list[Row]]:
    """Rows by the first part of their path."""
    found: dict[str, list[Row]] = {}
    for row in rows():
        found.setdefault(row.path.split(".")[0], []).append(row)
    return found


def page() -> str:
    """The whole page: batch keys, the sections that nearly every file has, the other sections, the keys that stand alone."""
    grouped = sections()
    alone = [row for name, found in grouped.items() if len(found) == 1 and name not in _BATCH for row in found]
    text = _HEAD + "\n## Batch\n\n" + _table([row for name in _BATCH for row in grouped[name]])
    objects = [name for name, found in grouped.items() if len(found) > 1]
    for name in [*_SECTIONS[:2], "", *_SECTIONS[2:], *(name for name in objects if name not in _SECTIONS)]:
        if name:
            text += f"\n## Section {name}\n\n{grouped[name][0].meaning}\n\n" + _section(name, grouped[name])
        else:
            text += "\n## Other keys at the top level\n\n" + _table(sorted(alone, key=_order_alone))
    return text


def _order_alone(row: Row) -> bool:
    """Keys that do something stand before those that do nothing."""
    return row.meaning.startswith(("*No effect*", "*Not built*", "Another spelling"))


def _section(name: str, found: list[Row]) -> str:
    """The tables of a section: one, or one for each type where keys depend on `type`."""
    variants: list[list[Row]] = [[]]
    for row in found:
        if any(row.path == other.path for other in variants[-1]):
            variants.append([])
        variants[-1].append(row)
    seen: set[str] = set()
    if len(variants) == 1:
        return _table(found, seen)
    text = ""
    for rows_of_type in variants:
        types = next((row.accepts for row in rows_of_type if row.path == f"{name}.type"), "").replace(
            "a text", "another name"
        )
        text += (f"### {name} of type {types}\n\n" if types else "") + _table(rows_of_type, seen) + "\n"
    return text.rstrip("\n") + "\n"


def _table(found: list[Row], seen: set[str] | None = None) -> str:
    lines = ["| key | meaning |", "|---|---|"]
    seen = set() if seen is None else seen
    for row in found:
        anchor = f'<span id="{row.path}"></span>' if row.path not in seen else ""
        seen.add(row.path)
        default = "required" if row.default == "required" else f"default {_code(row.default)}"
        example = f"<br>Example: {_code(row.example)}" if row.example else ""
        cells = (f"{anchor}{_code(row.path)}<br>{row.accepts}; {default}", f"{row.meaning}{example}")
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    return f"`{text}`" if text else ""
