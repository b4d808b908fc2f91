"""Transformers' Trainer: auto values, accumulation, clipping, saving, resuming, also (mode `late`) another
run's checkpoint; with PEFT's LoRA in mode `lora`; compiled in mode `compiled`."""

import os

import common
import torch
from accelerate.state import AcceleratorState, PartialState
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

args = common.arguments()
# On a machine without a GPU, Accelerate counts one process unless it is told a backend for CPU tensors.
os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
PartialState(backend="gloo")
config = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": args.stage,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
folder = args.out.parent / f"{args.out.stem}-run"


def settings(steps: int, **changes) -> TrainingArguments:
    AcceleratorState._reset_state()
    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4 // torch.distributed.get_world_size(),
        gradient_accumulation_steps=2,
        max_steps=steps,
        learning_rate=3e-3,
        weight_decay=0.01,
        warmup_steps=4,
        lr_scheduler_type="constant_with_warmup",
        logging_steps=1,
        save_strategy="no",
        bf16=args.dtype == "bf16",
        deepspeed=config,
        report_to=[],
        seed=common.SEED,
        accelerator_config={"use_configured_state": True},
        disable_tqdm=True,
        torch_compile=args.mode == "compiled",
        torch_compile_backend="aot_eager" if args.mode == "compiled" else None,
        **changes,
    )


def made() -> torch.nn.Module:
    model = common.model()
    if args.mode == "lora":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(common.SEED)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    return model


half = args.steps // 2
if args.mode == "late":  # another run's checkpoint, on any number of ranks
    first = settings(args.steps)
    report = common.Report(args)
    late = Trainer(made(), first, train_dataset=common.Tokens(), callbacks=[common.watch(report)])
    late.train(resume_from_checkpoint=str(args.folder / f"checkpoint-{half}"))
    report.write()
    raise SystemExit

first = settings(args.steps)  # process group and stage 3 context before the model, as scripts have it
report = common.Report(args)
watch = common.watch(report, "grad_norm")  # stage 0 has none
trainer = Trainer(made(), first, train_dataset=common.Tokens(), callbacks=[watch])
trainer.train()
trainer.save_model(str(folder / "final"))
straight = list(report.values["losses"])

early = Trainer(made(), settings(half), train_dataset=common.Tokens(), callbacks=[common.watch(None)])
early.args.max_steps = half
early.train()
early._save_checkpoint(early.model, trial=None)
late_report = common.Report(args)
late = Trainer(made(), settings(args.steps), train_dataset=common.Tokens(), callbacks=[common.watch(late_report)])
late.train(resume_from_checkpoint=str(folder / f"checkpoint-{half}"))
resumed = late_report.values["losses"]

loaded = []
if args.mode != "lora" and trainer.is_world_process_zero():
    whole = LlamaForCausalLM.config_class.from_pretrained(str(folder / "final"))
    loaded = [whole.model_type, sorted(path.name for path in (folder / "final").iterdir())]
report.write(norms=watch.seen["grad_norm"], straight=straight[half:], resumed=resumed, loaded=loaded)
