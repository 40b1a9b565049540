"""Decoded camera frames: the cache on disk, the pool in memory, and resizing."""
