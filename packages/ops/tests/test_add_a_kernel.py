"""The how-to for a new CUDA kernel is followed: its two files, and no other, make a kernel that runs."""

from __future__ import annotations

import re
import shutil
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_ops import cuda_launch, kernel_source
from ds_ops.kernel_images import KernelImages

_PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "add-a-kernel.md"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_two_files_make_a_kernel(
    emulated: Any, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not _PAGE.is_file():
        pytest.skip("the page is not installed with the package")
    blocks = dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```', _PAGE.read_text(), re.S | re.M))
    (source,), (chooser,) = ([t for n, t in blocks.items() if n.endswith(kind)] for kind in (".cu", ".py"))
    cuda, include = kernel_source.kernel_folders()
    shutil.copytree(cuda, tmp_path / "cuda")
    (tmp_path / "cuda" / "scale_rows.cu").write_text(source)
    for module in (kernel_source, sys.modules[type(emulated.here.compiler).__module__]):
        monkeypatch.setattr(module, "kernel_folders", lambda: (tmp_path / "cuda", include))
    made = types.ModuleType("cuda_scale_rows")
    exec(compile(chooser, "cuda_scale_rows.py", "exec"), made.__dict__)

    images = KernelImages(tmp_path / "images", emulated.here.images.compiler)
    here = replace(emulated.here, images=images, origins=[], _functions={})
    with cuda_launch.use_runtime(here):
        x = torch.randn(37, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
        factors, out = torch.linspace(0.5, 2.0, 37), torch.empty_like(x)
        made.scale_rows(x, factors, out)
    assert torch.equal(out, (x.float() * factors[:, None]).to(dtype))
    assert emulated.launches()[-1][0].startswith("ds_scale_rows")
