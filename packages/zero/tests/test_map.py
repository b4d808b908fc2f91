"""The README's map has every module with its sentence."""

import ast
from pathlib import Path

import ds_zero

PACKAGE = Path(ds_zero.__file__).parent
README = Path(__file__).parents[1] / "README.md"


def sentences() -> dict[str, str]:
    """Module -> the first line of its docstring."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py"), key=lambda p: (len(p.relative_to(PACKAGE).parts) > 1, p)):
        if path.name != "__init__.py":
            text = ast.get_docstring(ast.parse(path.read_text())) or ""
            found[str(path.relative_to(PACKAGE))] = text.splitlines()[0]
    return found


def test_the_map_has_every_module_and_says_what_the_module_says() -> None:
    """In the order of folders; a docstring's first line is one sentence."""
    found = sentences()
    rows = [f"| `{name}` | {sentence} |" for name, sentence in found.items()]
    kept = [line for line in README.read_text().splitlines() if line.startswith("| `")]
    assert kept == rows
    assert all(sentence.endswith(".") for sentence in found.values())
    assert len(set(found.values())) == len(found)
