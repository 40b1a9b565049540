"""Architectures of the critics: one file each."""
