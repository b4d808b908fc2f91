"""Smaller models: quantisation-aware training, pruning, layer reduction, distillation, post-training quantisation, export."""

from ds_compress.cleaning import redundancy_clean, resize_to_state_dict
from ds_compress.compress import (
    CompressionScheduler,
    compress,
    compressed_layers,
    compression_scheduler,
    decompress,
    init_compression,
    is_compressed,
)
from ds_compress.distillation import Distillation, Distiller, TeacherCache, attention_loss, hidden_loss, logit_loss
from ds_compress.divergence import Divergence, generalized_divergence
from ds_compress.eigenvalues import Curvature, block_eigenvalues, stretch_schedule
from ds_compress.model_export import export_compressed_tensors, export_gguf, export_gptq
from ds_compress.posttraining import QuantizedWeight, QuantScheme, codes_of_training, gptq, round_to_nearest
from ds_compress.smoothing import awq, find_foldable_norms, smoothquant
from ds_compress.students import convert_conv1d_to_linear, student_initialization
from ds_compress.torchao_weights import codes_of_torchao, to_torchao

__all__ = [
    "CompressionScheduler",
    "Curvature",
    "Distillation",
    "Distiller",
    "Divergence",
    "QuantScheme",
    "QuantizedWeight",
    "TeacherCache",
    "attention_loss",
    "awq",
    "block_eigenvalues",
    "codes_of_torchao",
    "codes_of_training",
    "compress",
    "compressed_layers",
    "compression_scheduler",
    "convert_conv1d_to_linear",
    "decompress",
    "export_compressed_tensors",
    "export_gguf",
    "export_gptq",
    "find_foldable_norms",
    "generalized_divergence",
    "gptq",
    "hidden_loss",
    "init_compression",
    "is_compressed",
    "logit_loss",
    "redundancy_clean",
    "resize_to_state_dict",
    "round_to_nearest",
    "smoothquant",
    "stretch_schedule",
    "student_initialization",
    "to_torchao",
]
