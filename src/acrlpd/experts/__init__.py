"""Scripted experts of simulated environments, and the datasets of demonstrations that they make."""
