"""Which surface this facade follows, and its own version as a local label."""

from __future__ import annotations

import torch
from torch.distributed import is_nccl_available

from ds_accel import get_accelerator

version = __version__ = "0.19.8+ds.0.1.0"
__version_major__, __version_minor__, __version_patch__ = 0, 19, 8
git_hash = __git_hash__ = "ds"
git_branch = __git_branch__ = "ds"
accelerator_name = get_accelerator().name
installed_ops: dict[str, bool] = {}  # upstream lists what was compiled ahead; here nothing is compiled at run time
torch_info = {  # of the build of torch; "0.0" for what it has not
    "version": ".".join(torch.__version__.split(".")[:2]),
    "bf16_support": bool(torch.version.cuda),
    "cuda_version": torch.version.cuda or "0.0",
    "nccl_version": ".".join(map(str, torch.cuda.nccl.version()[:2])) if is_nccl_available() else "0.0",
    "hip_version": torch.version.hip or "0.0",
}
HAS_TRITON = bool(get_accelerator().triton())
