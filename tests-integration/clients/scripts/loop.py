"""A loop with Accelerate: plugin, configuration file or `accelerate launch`; accumulation, clipping, checkpoints."""

import json

import common
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs, set_seed

args = common.arguments()
config = common.section(args.stage, args.dtype, gradient_accumulation_steps=2)
if args.mode == "file":
    path = args.out.with_suffix(".config.json")
    path.write_text(json.dumps(config | {"train_batch_size": "auto"}))
    plugin = DeepSpeedPlugin(hf_ds_config=str(path))
elif args.mode == "launch":  # `accelerate launch` and its own file say everything
    plugin = None
else:
    plugin = DeepSpeedPlugin(
        zero_stage=args.stage, gradient_accumulation_steps=2, gradient_clipping=1.0, zero3_save_16bit_model=True
    )
accelerator = Accelerator(
    deepspeed_plugin=plugin,
    gradient_accumulation_steps=2,
    mixed_precision="bf16" if args.dtype == "bf16" else "no",
    kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
)
set_seed(common.SEED)
report = common.Report(args)
model = common.model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
loader = torch.utils.data.DataLoader(common.Tokens(), batch_size=4)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
rates, total, done = [], 0.0, 0
while done < args.steps:
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            total += float(loss.detach()) / 2
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            report.add(total)
            rates.append(optimizer.param_groups[0]["lr"])
            total, done = 0.0, done + 1
            if done == args.steps:
                break
folder = args.out.parent / f"{args.out.stem}-state"
accelerator.save_state(str(folder))
before = accelerator.get_state_dict(model)
with torch.no_grad():
    for batch in loader:
        straight = float(model(**batch).loss)
        break
for batch in loader:
    accelerator.backward(model(**batch).loss)
    break
accelerator.load_state(str(folder))
with torch.no_grad():
    for batch in loader:
        again = float(model(**batch).loss)
        break
keys = sorted(before) if before else []
unwrapped = accelerator.unwrap_model(model)
report.write(rates=rates, straight=straight, again=again, keys=keys, kind=type(unwrapped).__name__)
