"""The machinery around the agent: trainer, sharding, many hosts, checkpoints.

Nothing is imported here, so that light parts (run directories, metrics) can be used without JAX's start-up.
"""
