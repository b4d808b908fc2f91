"""Mesh, collectives, placement vocabulary, and the recorder that ends silent hangs."""
