"""Scripted experts, and the demonstrations they give."""
