"""usage: python data_analyzer.py ours|deepspeed SAMPLES FOLDER: seconds to map and reduce one metric."""

import logging
import sys
import time

import torch
from answering import answering

answer, which, samples, folder = answering(), sys.argv[1], int(sys.argv[2]), sys.argv[3]


class Rows(torch.utils.data.Dataset):
    """Samples of 16 tokens."""

    def __init__(self):
        self.data = torch.randint(0, 1000, (samples, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return samples

    def __getitem__(self, at):
        return self.data[at]


def hardest(batch):
    return batch.max(dim=1).values


told = {
    "num_workers": 1, "num_threads": 1, "batch_size": 1024, "metric_names": ["rarity"], "metric_functions": [hardest],
    "metric_types": ["single_value_per_sample"], "save_path": folder,
}  # fmt: skip
if which == "ours":
    from ds_data import DataAnalyzer
else:
    from deepspeed.runtime.data_pipeline.data_sampling.data_analyzer import DataAnalyzer

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
analyzer = DataAnalyzer(Rows(), metric_dtypes=[torch.int64], **told)
begun = time.perf_counter()
analyzer.run_map()
analyzer.run_reduce()
answer(time.perf_counter() - begun)
