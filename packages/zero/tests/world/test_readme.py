"""The README's snippets run with nothing else installed, on one rank and on two."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ds_testing import world

TEXT = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def run(block):
    names = {}
    exec(compile(block, "README.md", "exec"), names)
    return names


@pytest.mark.parametrize("number", range(len(BLOCKS)))
@world(2)
def test_snippet_on_two_ranks(number):
    torch.manual_seed(dist.get_rank())
    names = run(BLOCKS[number])
    if number == 0:
        assert float(names["loss"]) < 10.0
        assert names["optimizer"].last.norm > 0


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_snippet_on_one_rank(number, capsys):
    run(BLOCKS[number])
    printed = capsys.readouterr().out
    assert ("torch.Size([32, 8])" in printed) if number == 0 else ("units on 64 ranks" in printed)
