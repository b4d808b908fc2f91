"""Token files, and an order of samples that survives any restart; curricula and what they read, batches by length, random-LTD."""

from ds_data.analyzing import DataAnalyzer, DistributedDataAnalyzer, Metrics, map_chunks, reduce_chunks
from ds_data.codes import smallest_int_dtype
from ds_data.curriculum import Curriculum, DifficultyIndex, Metric, make_metrics
from ds_data.difficulty_schedules import make_schedule
from ds_data.file_checks import TokenFileReport, check_tokens
from ds_data.mds_samples import MdsSamples, MdsSequences
from ds_data.megatron_order import MegatronSequences
from ds_data.mixing import BlendedDataset
from ds_data.packed_sequences import IGNORE_INDEX, FillInMiddle, PackedSequences
from ds_data.permutation import KeyedPermutation, mix_keys, uniform
from ds_data.remote_shards import RemoteSequences, RemoteTokenFile
from ds_data.sample_order import BlendOrder, RankBatchSampler, RankSlice, SampleStream, split_ranges
from ds_data.seqlens import batch_by_seqlens, pack_by_seqlens, scale_lr
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
from ds_data.token_index import TokenIndex, pack_index, parse_index
from ds_data.token_loader import Batches, TokenLoader
from ds_data.token_writer import TokenWriter, write_items
from ds_data.tokenizing import DocumentSource, Tokenized, open_tokenizer, tokenize
from ds_data.tokens import TokenFile
from ds_data.variable import (
    PackedDataset,
    VariableBatchSizeLR,
    dataloader_for_variable_batch_size,
    get_dataloader_and_lr_scheduler_for_variable_batch_size,
    lr_scheduler_for_variable_batch_size,
    seqlens_of,
)
from ds_data.whole_documents import LossMaskedSequences, WholeDocuments, pack_first_fit

__all__ = [
    "IGNORE_INDEX",
    "Batches",
    "BlendOrder",
    "BlendedDataset",
    "Curriculum",
    "DataAnalyzer",
    "DifficultyIndex",
    "DistributedDataAnalyzer",
    "DocumentSource",
    "FillInMiddle",
    "KeyedPermutation",
    "LossMaskedSequences",
    "MdsSamples",
    "MdsSequences",
    "MegatronSequences",
    "Metric",
    "Metrics",
    "PackedDataset",
    "PackedSequences",
    "RandomLayerTokenDrop",
    "RankBatchSampler",
    "RankSlice",
    "RemoteSequences",
    "RemoteTokenFile",
    "Router",
    "RouterConfig",
    "SampleStream",
    "TokenFile",
    "TokenFileReport",
    "TokenIndex",
    "TokenLoader",
    "TokenWriter",
    "Tokenized",
    "VariableBatchSizeLR",
    "WholeDocuments",
    "batch_by_seqlens",
    "check_tokens",
    "convert_to_random_ltd",
    "dataloader_for_variable_batch_size",
    "get_dataloader_and_lr_scheduler_for_variable_batch_size",
    "lr_scheduler_for_variable_batch_size",
    "make_metrics",
    "make_schedule",
    "map_chunks",
    "mix_keys",
    "open_tokenizer",
    "pack_by_seqlens",
    "pack_first_fit",
    "pack_index",
    "parse_index",
    "reduce_chunks",
    "remove_random_ltd_state_dict",
    "save_without_random_ltd",
    "scale_lr",
    "seqlens_of",
    "smallest_int_dtype",
    "split_ranges",
    "start_routing",
    "stop_routing",
    "tokenize",
    "uniform",
    "write_items",
]
