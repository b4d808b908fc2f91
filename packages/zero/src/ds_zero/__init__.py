"""One core for ZeRO 0, 1, 2 and 3, usable alone in a plain PyTorch loop."""
