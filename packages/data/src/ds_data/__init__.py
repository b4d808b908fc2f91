"""Token files, and an order of samples that survives any restart; curricula and what they read, batches by length, random-LTD."""

from ds_data.analyzing import DataAnalyzer, DistributedDataAnalyzer, Metrics, map_chunks, reduce_chunks
from ds_data.file_checks import Report, check_tokens
from ds_data.codes import fitting
from ds_data.curriculum import Admission, Curriculum, Metric, make_metrics
from ds_data.token_index import Index, pack_index, parse_index
from ds_data.token_loader import Batches, TokenLoader
from ds_data.mixing import Mixed
from ds_data.sample_order import Lane, Mixture, Rows, Stream, splits
from ds_data.packed_sequences import IGNORED, FillInMiddle, Packed
from ds_data.permutation import Permutation, mix, uniform
from ds_data.token_dropping import (
    RandomLayerTokenDrop,
    Router,
    RouterConfig,
    convert_to_random_ltd,
    remove_random_ltd_state_dict,
    save_without_random_ltd,
    start_routing,
    stop_routing,
)
from ds_data.difficulty_schedules import make_schedule
from ds_data.seqlens import batch_by_seqlens, pack_by_seqlens, scale_lr
from ds_data.tokenizing import Source, Tokenized, open_tokenizer, tokenize
from ds_data.tokens import TokenFile
from ds_data.variable import (
    PackedDataset,
    VariableBatchSizeLR,
    dataloader_for_variable_batch_size,
    get_dataloader_and_lr_scheduler_for_variable_batch_size,
    lr_scheduler_for_variable_batch_size,
    seqlens_of,
)
from ds_data.token_writer import TokenWriter, write_items

__all__ = [
    "IGNORED",
    "Admission",
    "Batches",
    "Curriculum",
    "DataAnalyzer",
    "DistributedDataAnalyzer",
    "FillInMiddle",
    "Index",
    "Lane",
    "Metric",
    "Metrics",
    "Mixed",
    "Mixture",
    "Packed",
    "PackedDataset",
    "Permutation",
    "RandomLayerTokenDrop",
    "Report",
    "Router",
    "RouterConfig",
    "Rows",
    "Source",
    "Stream",
    "TokenFile",
    "TokenLoader",
    "TokenWriter",
    "Tokenized",
    "VariableBatchSizeLR",
    "batch_by_seqlens",
    "check_tokens",
    "convert_to_random_ltd",
    "dataloader_for_variable_batch_size",
    "fitting",
    "get_dataloader_and_lr_scheduler_for_variable_batch_size",
    "lr_scheduler_for_variable_batch_size",
    "make_metrics",
    "make_schedule",
    "map_chunks",
    "mix",
    "open_tokenizer",
    "pack_by_seqlens",
    "pack_index",
    "parse_index",
    "reduce_chunks",
    "remove_random_ltd_state_dict",
    "save_without_random_ltd",
    "scale_lr",
    "seqlens_of",
    "splits",
    "start_routing",
    "stop_routing",
    "tokenize",
    "uniform",
    "write_items",
]
