"""The list of DeepSpeed's names: what of a source distribution is a name, and what two releases differ by."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
import upstream

FILES = {
    "version.txt": "1.2.3\n",
    "setup.py": "broken = (",
    "deepspeed/__init__.py": "from .engine import Engine\nfrom .star import *\nimport torch\nfrom torch import nn\n",
    "deepspeed/engine.py": "from deepspeed.star import Star\nLIMIT: int = 3\ndef run(): pass\nclass Engine:\n    inner = 1\n"
    "try:\n    import x\n    THERE = True\nexcept ImportError:\n    THERE = False\n_hidden = 1\n",
    "deepspeed/star.py": "class Star(DeepSpeedConfigModel):\n    key: int = 1\n    other: str = ''\n    def method(self): pass\n",
    "accelerator/real.py": "def get(): pass\n",
    "tests/unit/test_x.py": "def test_x(): pass\n",
}


@pytest.fixture
def sdist(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "deepspeed-1.2.3" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with tarfile.open(tmp_path / "deepspeed-1.2.3.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "deepspeed-1.2.3", "deepspeed-1.2.3")
    return tmp_path / "deepspeed-1.2.3.tar.gz"


def test_names_are_what_a_module_defines_and_what_a_package_takes_from_its_own(sdist):
    listed = upstream.list_names(sdist)
    assert listed == upstream.list_names(sdist.parent / "deepspeed-1.2.3")
    assert listed == {
        "version": "1.2.3",
        "modules": {
            "deepspeed": "Engine Star",
            "deepspeed.accelerator.real": "get",
            "deepspeed.engine": "Engine LIMIT THERE run",
            "deepspeed.star": "Star",
        },
        "fields": {"deepspeed.star.Star": "key other"},
    }


def test_a_release_that_differs_is_named_line_by_line(sdist, tmp_path, monkeypatch, capsys):
    listed = upstream.list_names(sdist)
    monkeypatch.setattr(upstream, "NAMES", tmp_path / "names.json")
    assert upstream.main([str(sdist), "--write"]) == 0
    assert json.loads((tmp_path / "names.json").read_text()) == listed
    assert upstream.main([str(sdist)]) == 0
    listed["modules"] |= {"deepspeed.star": "Sun", "deepspeed.new": "a"}
    del listed["modules"]["deepspeed.accelerator.real"]
    listed["fields"]["deepspeed.star.Star"] = "key"
    (tmp_path / "names.json").write_text(json.dumps(listed))
    capsys.readouterr()
    assert upstream.main([str(sdist)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "1.2.3 -> 1.2.3", "+ deepspeed.accelerator.real", "+ deepspeed.accelerator.real.get", "- deepspeed.new", "- deepspeed.new.a",
        "+ deepspeed.star.Star", "- deepspeed.star.Sun", "+ deepspeed.star.Star.other",
    ]  # fmt: skip
