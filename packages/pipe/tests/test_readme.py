"""The README's snippet runs, and says what it claims."""

import re
from pathlib import Path


def test_readme_snippet_runs(capsys: object) -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    printed = capsys.readouterr().out  # type: ignore[attr-defined]
    for said in re.findall(r"#\s+(0F0.*)$", blocks[0], re.MULTILINE):
        assert said in printed
