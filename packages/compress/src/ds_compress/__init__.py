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
from ds_compress.distillation import Distillation, Distiller, TeacherCache, attention_loss, hidden_loss, logit_loss
from ds_compress.divergence import Divergence, generalized_divergence
from ds_compress.eigenvalues import Curvature, block_eigenvalues, slow_down
from ds_compress.model_export import export_compressed_tensors, export_gguf, export_gptq
from ds_compress.posttraining import Codes, Scheme, codes_of_training, gptq, round_to_nearest
from ds_compress.smoothing import folds_of, scale_salient, smooth
from ds_compress.students import convert_conv1d_to_linear, student_initialization

__all__ = [
    "Codes",
    "CompressionScheduler",
    "Curvature",
    "Distillation",
    "Distiller",
    "Divergence",
    "Scheme",
    "TeacherCache",
    "attention_loss",
    "block_eigenvalues",
    "codes_of_training",
    "compress",
    "compressed_layers",
    "compression_scheduler",
    "convert_conv1d_to_linear",
    "decompress",
    "export_compressed_tensors",
    "export_gguf",
    "export_gptq",
    "fit_to",
    "folds_of",
    "generalized_divergence",
    "gptq",
    "hidden_loss",
    "init_compression",
    "is_compressed",
    "logit_loss",
    "redundancy_clean",
    "round_to_nearest",
    "scale_salient",
    "slow_down",
    "smooth",
    "student_initialization",
]
