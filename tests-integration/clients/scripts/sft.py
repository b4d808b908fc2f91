"""TRL's SFTTrainer on a data set of token ids."""

import os

import common
from accelerate.state import PartialState
from datasets import Dataset
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

args = common.arguments()
os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
PartialState(backend="gloo")
config = common.section(args.stage, args.dtype, train_micro_batch_size_per_gpu="auto", gradient_clipping="auto")


class Watch(TrainerCallback):
    """Takes the losses out of the log."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            report.add(logs["loss"])


settings = SFTConfig(
    output_dir=str(args.out.parent / "sft"),
    per_device_train_batch_size=2,
    max_steps=args.steps,
    learning_rate=3e-3,
    logging_steps=1,
    save_strategy="no",
    deepspeed=config,
    report_to=[],
    accelerator_config={"use_configured_state": True},
    disable_tqdm=True,
    bf16=args.dtype == "bf16",
    max_length=common.LENGTH,
)
report = common.Report(args)
data = Dataset.from_dict({"input_ids": [row.tolist() for row in common.Tokens().ids]})
trainer = SFTTrainer(
    common.model(), settings, train_dataset=data, processing_class=common.tokenizer(), callbacks=[Watch()]
)
trainer.train()
report.write()
