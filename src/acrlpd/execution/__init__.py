"""Chunk policies, and the ways to execute their chunks: one file each. Nothing here imports JAX."""
