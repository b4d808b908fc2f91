"""`deepspeed.zero`, loss scales, optimizers of sharded models."""
