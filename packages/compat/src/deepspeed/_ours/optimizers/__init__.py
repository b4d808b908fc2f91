"""Optimizers and schedules by class."""
