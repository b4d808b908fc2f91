"""TRL's GRPOTrainer: completions are sampled from the model that is trained, which stage 3 has cut."""

import os

import common
from accelerate.state import PartialState
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

args = common.arguments()
os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
PartialState(backend="gloo")
config = common.section(args.stage, args.dtype, train_micro_batch_size_per_gpu="auto", gradient_clipping="auto")


class Watch(TrainerCallback):
    """Takes losses and rewards out of the log."""

    rewards: list[float] = []  # noqa: RUF012

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            report.add(logs["loss"])
            self.rewards.append(float(logs["reward"]))


def even(completions, **columns):
    """As many points as the completion has even tokens."""
    return [float(sum(int(word[1:]) % 2 == 0 for word in text.split())) for text in completions]


settings = GRPOConfig(
    output_dir=str(args.out.parent / "grpo"),
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=8,
    max_steps=args.steps,
    learning_rate=3e-3,
    logging_steps=1,
    save_strategy="no",
    deepspeed=config,
    report_to=[],
    accelerator_config={"use_configured_state": True},
    disable_tqdm=True,
    bf16=args.dtype == "bf16",
    seed=common.SEED,
)
report = common.Report(args)
prompts = [" ".join(f"t{int(token)}" for token in row[:4]) for row in common.Tokens().ids]
trainer = GRPOTrainer(
    common.model(),
    even,
    settings,
    train_dataset=Dataset.from_dict({"prompt": prompts}),
    processing_class=common.tokenizer(),
    callbacks=[Watch()],
)
trainer.train()
report.write(rewards=Watch.rewards)
