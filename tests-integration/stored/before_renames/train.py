"""Write what this folder holds: `TRACE=1 ds run --nproc 2 train.py --deepspeed_config ds.json`, then `ds tune` (see test_stored.py)."""

import argparse
import json
import os
from pathlib import Path

import torch

import ds_engine
import ds_monitor as m

args = ds_engine.add_config_arguments(argparse.ArgumentParser()).parse_args()
trace = "TRACE" in os.environ
rank = os.environ.get("RANK", "0")
if trace:
    m.configure([m.JsonlSink(f"trace/rank{rank}.jsonl")])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
engine, *_ = ds_engine.initialize(args=args, model=model)
torch.manual_seed(1)
while engine.global_steps < (3 if trace else 1000):
    x = torch.randn(engine.plan.batch.micro, 8)
    loss = (engine(x) - x.sum(1, keepdim=True)).square().mean()
    engine.backward(loss)
    engine.step()
if trace:
    engine.save_checkpoint("checkpoint", tag="three")
    out = engine(torch.ones(1, 8)).item()
    if rank == "0":
        Path("expected.json").write_text(json.dumps({"output_of_ones": out}))
    engine.close()
