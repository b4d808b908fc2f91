"""Optimizers that communicate by themselves: momentum travels as one bit an element once the variance is stable."""

from ds_comm.optim.onebit import OnebitAdam, OnebitLamb, ZeroOneAdam

__all__ = ["OnebitAdam", "OnebitLamb", "ZeroOneAdam"]
