"""Classes of torch that are treated alike: convolutions of any number of dims, and the batch norms behind them."""

from __future__ import annotations

from torch import nn

__all__ = ["BatchNorms", "Convolutions"]

Convolutions = nn.Conv1d | nn.Conv2d | nn.Conv3d
"""Weights are [out_channels, in_channels / groups, *kernel]. Transposed ones have outputs second, and are not compressed."""

BatchNorms = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
