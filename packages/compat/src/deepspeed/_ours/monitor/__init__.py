"""Logging, timers, monitors, profiles."""
