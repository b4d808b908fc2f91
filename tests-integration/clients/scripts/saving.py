"""What clients save, on every rank as they do: Trainer with PEFT's modules_to_save (mode `peft`) or with layers cut over the ranks (mode
`tensor`), or Accelerate, `save_pretrained` and an average of the weights beside a model that trains. Files are compared with one process's."""

import copy
import os

import common
import deepspeed
import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs

args = common.arguments()
folder = args.out.parent / f"{args.out.stem}-files"
ranks = int(os.environ["WORLD_SIZE"]) if args.mode != "tensor" else 1  # of those that have samples of their own
config = common.section(args.stage, args.dtype, train_micro_batch_size_per_gpu=4 // ranks)
config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
if args.mode == "tensor":
    config["train_batch_size"] = "auto"
    config["tensor_parallel"] = {"autotp_size": int(os.environ["WORLD_SIZE"])}


def with_trainer() -> None:
    from transformers import Trainer, TrainingArguments

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    settings = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4 // ranks,
        max_steps=args.steps,
        learning_rate=3e-2,
        adam_epsilon=1e-3,  # the first steps of Adam make noise of small gradients large
        lr_scheduler_type="constant",
        save_strategy="no",
        deepspeed=config,
        report_to=[],
        seed=common.SEED,
        accelerator_config={"use_configured_state": True},
        disable_tqdm=True,
    )
    model = common.model()
    if args.mode == "peft":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(common.SEED)
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
    trainer = Trainer(model, settings, train_dataset=common.Tokens())
    trainer.train()
    trainer.save_model(str(folder / "trainer"))
    trainer.model.save_pretrained(str(folder / "direct"))


def with_accelerate() -> None:
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    model = common.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2, eps=1e-3)
    loader = torch.utils.data.DataLoader(common.Tokens(), batch_size=4 // ranks)
    engine, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model = accelerator.unwrap_model(engine)
    average = copy.deepcopy(model)
    for batch, _ in zip(loader, range(args.steps), strict=False):
        accelerator.backward(engine(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        pairs = list(zip(average.parameters(), model.parameters(), strict=True))
        cut = [
            p
            for pair in pairs
            for p in pair
            if getattr(p, "ds_status", None) == deepspeed.zero.ZeroParamStatus.NOT_AVAILABLE
        ]
        with torch.no_grad(), deepspeed.zero.GatheredParameters(cut, modifier_rank=0, enabled=bool(cut)):
            for mine, other in pairs:
                mine.lerp_(other.detach(), 0.5)
    accelerator.save_model(engine, str(folder / "save_model"))
    model.save_pretrained(str(folder / "direct"))
    told = {"is_main_process": accelerator.is_main_process, "save_function": accelerator.save}
    model.save_pretrained(str(folder / "given"), **told, state_dict=accelerator.get_state_dict(engine))
    with deepspeed.zero.GatheredParameters(list(average.parameters()), enabled=args.stage == 3):
        if accelerator.is_main_process:
            average.save_pretrained(str(folder / "average"))
    torch.save(model.state_dict(), args.out.parent / f"looked-at-{accelerator.process_index}.pt")


(with_accelerate if args.mode == "loop" else with_trainer)()
torch.distributed.barrier()
files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*.safetensors"))
common.Report(args).write(files=files, folder=str(folder))
