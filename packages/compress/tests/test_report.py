"""The report's numbers are those of the files."""

from __future__ import annotations

import argparse
import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ds_compress import QuantScheme, export_compressed_tensors, export_gptq, round_to_nearest
from ds_compress.cli import main, register
from ds_compress.sparsity_report import picture, report_of, total_of
from ds_config.errors import PlanError


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))


@pytest.mark.parametrize("export", [export_compressed_tensors, export_gptq])
def test_packed_layers_count_what_they_stand_for(export, tmp_path):
    model = made()
    export(model, round_to_nearest(model, QuantScheme(4, 32)), tmp_path, config={})
    layers = {layer.name: layer for layer in report_of(tmp_path)}
    assert layers["0"].numel == 64 * 32
    assert layers["0"].zeros is None
    more = {"export_compressed_tensors": 32 * 2 * 4 + 16, "export_gptq": 32 * 2 * 2 + 2 * 32 // 2 + 64 * 4}[
        export.__name__
    ]
    assert layers["0"].bytes == 64 * 32 // 2 + more
    assert layers["0"].speed == pytest.approx(16 / (8 * layers["0"].bytes / 2048))
    assert layers["0.bias"].bits == 32
    assert total_of(list(layers.values())).numel == 64 * 32 + 32 + 32 * 8 + 8


def test_zeros_are_counted_and_the_command_tells(tmp_path, capsys):
    model = made()
    with torch.no_grad():
        model[0].weight[:8] = 0
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert report_of(model)[1].zeros == pytest.approx(0.25)
    parser = argparse.ArgumentParser()
    register(parser)
    assert main(parser.parse_args(["report", str(tmp_path), "--picture", str(tmp_path / "p.svg")])) == 0
    told = capsys.readouterr().out
    assert "25.0%" in told
    assert "0.weight" in told
    assert (tmp_path / "p.svg").read_text().count("0.weight") >= 1
    assert main(parser.parse_args(["report", str(tmp_path), "--json"])) == 0
    assert {row["name"] for row in json.loads(capsys.readouterr().out)} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert main(parser.parse_args(["report", str(tmp_path / "nothing")])) == 1
    assert "neither a safetensors file" in capsys.readouterr().err
    with pytest.raises(PlanError, match="neither"):
        report_of(tmp_path / "p.svg")
    assert picture(report_of(model), tmp_path / "q.png").stat().st_size > 1000
