"""Several plugins in one script: a student that is trained at one stage, a teacher that only answers at stage 3."""

import common
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs, set_seed

args = common.arguments()
plugins = {
    "student": DeepSpeedPlugin(hf_ds_config=common.section(args.stage, args.dtype)),
    "teacher": DeepSpeedPlugin(hf_ds_config=common.section(3, args.dtype)),
}
accelerator = Accelerator(deepspeed_plugins=plugins, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
set_seed(common.SEED)
report = common.Report(args)
student, loader = common.model(), torch.utils.data.DataLoader(common.Tokens(), batch_size=4)
optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
student, optimizer, loader = accelerator.prepare(student, optimizer, loader)
first = accelerator.state.deepspeed_plugin is plugins["student"]
accelerator.state.select_deepspeed_plugin("teacher")
teacher = accelerator.prepare(common.model(seed=common.SEED + 1))
teacher.eval()
done = 0
while done < args.steps:
    for batch in loader:
        with torch.no_grad():
            wanted = teacher(input_ids=batch["input_ids"]).logits.softmax(-1)
        answer = student(**batch)
        loss = answer.loss - (wanted * answer.logits.log_softmax(-1)).sum(-1).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        report.add(loss.detach())
        done += 1
        if done == args.steps:
            break
report.write(first=first, stages=[student.zero_optimization_stage(), teacher.zero_optimization_stage()])
