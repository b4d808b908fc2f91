"""`from_pretrained` and `HfDeepSpeedConfig` under stage 3, `GatheredParameters`, generation as TRL does it, evaluation."""

import common
import deepspeed
import torch
from transformers import LlamaForCausalLM
from transformers.integrations import HfDeepSpeedConfig

args = common.arguments()
deepspeed.init_distributed()
rank = deepspeed.comm.get_rank()
source = args.out.parent / f"{args.out.stem}-model"
if rank == 0:
    common.model().save_pretrained(str(source))
torch.distributed.barrier()
config = common.section(args.stage, args.dtype, optimizer={"type": "AdamW", "params": {"lr": 1e-3}})
kept = HfDeepSpeedConfig(config)
model = LlamaForCausalLM.from_pretrained(str(source))
held = sum(p.untyped_storage().nbytes() for p in model.parameters())
model.resize_token_embeddings(common.VOCAB + 8)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
report = common.Report(args)
ids = torch.stack([common.Tokens()[i + 4 * rank]["input_ids"] for i in range(4)])
for _ in range(args.steps):
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    report.add(loss.detach())
with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=None):
    numel = sum(p.numel() for p in model.parameters())
from accelerate import Accelerator  # noqa: E402
from trl.models.utils import add_hooks, remove_hooks  # noqa: E402

del Accelerator
engine.eval()
with torch.no_grad(), deepspeed.zero.GatheredParameters(model.parameters()):
    if args.stage == 3:
        remove_hooks(engine)
    text = model.generate(ids[:1, :4], max_new_tokens=8, do_sample=False, pad_token_id=0)
    if args.stage == 3:
        add_hooks(engine)
plain = engine.module.generate(ids[:1, :4], max_new_tokens=8, do_sample=False, pad_token_id=0)
engine.train()
loss = engine(input_ids=ids, labels=ids).loss
engine.backward(loss)
engine.step()
tables = sorted({str(buffer.dtype) for buffer in model.buffers()})
report.write(numel=numel, held=held, tables=tables, text=text.tolist(), plain=plain.tolist(), after=float(loss))
