"""Smaller models: quantisation-aware training, pruning, layer reduction, distillation, post-training quantisation, export."""

from ds_compress.cleaning import fit_to, redundancy_clean
from ds_compress.compress import (
    CompressionScheduler,
    compress,
    compressed_layers,
    compression_scheduler,
    decompress,
    init_compression,
    is_compressed,
)
from ds_compress.students import convert_conv1d_to_linear, student_initialization

__all__ = [
    "CompressionScheduler",
    "compress",
    "compressed_layers",
    "compression_scheduler",
    "convert_conv1d_to_linear",
    "decompress",
    "fit_to",
    "init_compression",
    "is_compressed",
    "redundancy_clean",
    "student_initialization",
]
