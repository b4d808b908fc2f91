"""What becomes of each key of a document."""

from __future__ import annotations

from pathlib import Path

from ds_config import StrictModel, classify, dotted


def test_every_key_has_one_fate(train: type[StrictModel], tmp_path: Path) -> None:
    path = tmp_path / "cfg.json"
    path.write_text(
        '{"bfloat16": {"enabled": true},\n'
        '"zero_optimization": {"stage3_prefetch_bucket_size": 3, "cpu_offload": true, "elastic_checkpoint": true,\n'
        '"round_robin_gradients": true, "stge": 1}, "sparse_attention": {"enabled": false, "mode": "fixed"}}'
    )
    found = {dotted(report.path): report for report in classify(train, path)}
    assert {name: report.kind for name, report in found.items()} == {
        "bfloat16.enabled": "used",
        "zero_optimization.stage3_prefetch_bucket_size": "moved",
        "zero_optimization.cpu_offload": "moved",
        "zero_optimization.elastic_checkpoint": "no effect",
        "zero_optimization.round_robin_gradients": "not built",
        "zero_optimization.stge": "unknown",
        "sparse_attention.enabled": "off",
        "sparse_attention.mode": "off",
    }
    assert str(found["zero_optimization.cpu_offload"].origin) == f"{path}:2"
    assert str(found["zero_optimization.cpu_offload"]).endswith("moved (to zero_optimization.offload_optimizer)")
    assert str(found["zero_optimization.stge"]) == "zero_optimization.stge: unknown"
