"""`deepspeed.comm` and groups."""
