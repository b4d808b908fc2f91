"""TRL's SFTTrainer on a data set of token ids."""

import common
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

args = common.arguments()
settings = SFTConfig(**common.trl(args), per_device_train_batch_size=2, max_length=common.LENGTH)
report = common.Report(args)
data = Dataset.from_dict({"input_ids": [row.tolist() for row in common.Tokens().ids]})
trainer = SFTTrainer(
    common.model(), settings, train_dataset=data, processing_class=common.tokenizer(), callbacks=[common.watch(report)]
)
trainer.train()
report.write()
