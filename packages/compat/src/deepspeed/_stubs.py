"""Stubs of the modules of the table, for editors and type checkers, which cannot run the finder. The wheel's build writes them."""

from __future__ import annotations

from pathlib import Path

from deepspeed._surface import SURFACE, ConstantRow, Missing

__all__ = ["stub", "write"]


def stub(module: str) -> str:
    """Write the text of `module`'s stub: the source of each of its names. Refused names are left out."""
    lines = [f"# {module}, from the table deepspeed._surface."]
    for name, row in sorted(SURFACE[module].items()):
        if isinstance(row, ConstantRow):
            lines.append(f"{name}: {type(row.value).__name__}" if row.value is not None else f"{name}: None")
        elif not isinstance(row, Missing):
            home, _, attribute = row.partition(":")
            from_, what = (home, attribute) if attribute else home.rsplit(".", 1)
            lines.append(f"from {from_} import {what} as {name}")
    return "\n".join(lines) + "\n"


def write(folder: Path) -> list[Path]:
    """Write the stub of every module, as it lies in an installed package `folder`; the paths in it."""
    written = []
    for module in SURFACE:
        parts = module.split(".")[1:]
        package = any(other.startswith(f"{module}.") for other in SURFACE)
        path = Path(*parts, "__init__.pyi") if package else Path(*parts).with_suffix(".pyi")
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(stub(module))
        written.append(path)
    return written
