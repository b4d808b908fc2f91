"""The loop of three calls, as scripts for DeepSpeed have it. With a folder it saves in the middle of the run (mode `save`), or goes
on from what another run saved there (mode `late`)."""

import common
import deepspeed
import torch

args = common.arguments()
deepspeed.init_distributed()
report = common.Report(args)
config = common.section(
    args.stage,
    args.dtype,
    train_micro_batch_size_per_gpu=2,
    gradient_accumulation_steps=2,
    optimizer={"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.01, "betas": [0.9, 0.95]}},
    scheduler={"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-3, "warmup_num_steps": 5}},
)
model = common.Next() if args.mode == "own" else common.model()
engine, optimizer, _, scheduler = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
data = common.Tokens()
rank, size, micro = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size(), engine.train_micro_batch_size_per_gpu()
position = 0
norms, rates = [], []
if args.mode == "late":
    path, client = engine.load_checkpoint(str(args.folder))
    assert path is not None
    position = client["position"]
while engine.global_steps < args.steps:
    if args.mode == "save" and engine.global_steps == args.steps // 2:
        engine.save_checkpoint(str(args.folder), client_state={"position": position})
    total = 0.0
    for _ in range(engine.gradient_accumulation_steps()):
        start = (position + rank * micro) % len(data)
        position += micro * size
        ids = torch.stack([data[(start + i) % len(data)]["input_ids"] for i in range(micro)]).to(engine.device)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        total += float(loss.detach()) / engine.gradient_accumulation_steps()
    report.add(total)
    norms.append(float(engine.get_global_grad_norm() or 0))
    rates.append(scheduler.get_last_lr()[0])
report.write(norms=norms, rates=rates)
