"""One accelerator interface over torch.accelerator, described by a table of facts per device."""
