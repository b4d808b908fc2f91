"""Strict configuration models, JSON/HJSON reading with origins, and the error classes of every ds package."""
