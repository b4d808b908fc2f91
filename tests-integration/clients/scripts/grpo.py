"""TRL's GRPOTrainer: completions are sampled from the model that is trained, which stage 3 has cut."""

import common
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

args = common.arguments()


def even(completions, **columns):
    """As many points as the completion has even tokens."""
    return [float(sum(int(word[1:]) % 2 == 0 for word in text.split())) for text in completions]


settings = GRPOConfig(**common.trl(args), per_device_train_batch_size=4, num_generations=4, max_completion_length=8)
report = common.Report(args)
watch = common.watch(report, "reward")
prompts = [" ".join(f"t{int(token)}" for token in row[:4]) for row in common.Tokens().ids]
trainer = GRPOTrainer(
    common.model(),
    even,
    settings,
    train_dataset=Dataset.from_dict({"prompt": prompts}),
    processing_class=common.tokenizer(),
    callbacks=[watch],
)
trainer.train()
report.write(rewards=watch.seen["reward"])
