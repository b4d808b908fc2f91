"""Run by ckpt.py in an environment with transformers: load an export strictly, and look at every element.

usage: ckpt_transformers.py FOLDER; FOLDER/values.json says which number fills which parameter
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

folder = Path(sys.argv[1])
model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
values = json.loads((folder / "values.json").read_text())
wrong = [name for name, p in model.named_parameters() if not (p == values.pop(name)).all()]
lists = {key: sorted(map(str, found)) for key, found in info.items() if found and "keys" in key}
print(json.dumps({"lists": lists, "wrong": wrong, "absent": sorted(values), "parameters": model.num_parameters()}))
