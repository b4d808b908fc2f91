"""docs/reference/checkpoint-format.md is enough to read a checkpoint: its program reads what several ranks wrote."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ds_ckpt

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "checkpoint-format.md"


@pytest.mark.parametrize("style", ["flat", "replica", "mixed"])
@pytest.mark.parametrize("mesh", [(1, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("form", ["whole", "leaves", "blocks"])
def test_the_program_on_the_page_reads_everything(tmp_path, model, mesh, style, form, monkeypatch):
    if not PAGE.exists():
        pytest.skip("the page is in the repository, not in the package")
    scope = {}
    exec(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)[-1], scope)
    data, tensor = mesh
    if form == "leaves":
        monkeypatch.setattr(ds_ckpt.save_planner, "SHARDS_ALONE", 0)

    def save(ranks):
        local = [model.local(s, fill=True) for s in model.layout(ranks.rank, data, tensor, style)]
        recipe = ds_ckpt.SaveOptions(incremental=True) if form == "blocks" else None
        ds_ckpt.save(tmp_path / "a", local, {"x": 1}, group=ranks, aliases={"tied": "param/prime"}, recipe=recipe)

    model.together(data * tensor, save)
    for name in model.SHAPES:
        assert torch.equal(scope["read_tensor"](tmp_path / "a", name), model.reference(name)), name
    assert torch.equal(scope["read_tensor"](tmp_path / "a", "tied"), model.reference("param/prime"))


def test_what_the_page_says_about_files_is_so(tmp_path):
    ds_ckpt.save(tmp_path / "a", ds_ckpt.full_shards({"w": torch.ones(5), "v": torch.ones(3, dtype=torch.int8)}), {})
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    assert list(manifest)[:4] == ["format", "version", "crc32", "sequence"]
    file = manifest["files"][0]
    assert file["header_nbytes"] % 4096 == 0
    assert file["nbytes"] == (tmp_path / "a" / file["name"]).stat().st_size == file["header_nbytes"] + 5 * 4 + 3
    assert {n: t.tolist() for n, t in load_file(tmp_path / "a" / file["name"]).items()} == {"w": [1] * 5, "v": [1] * 3}
