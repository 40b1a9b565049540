"""The machinery around the agent: trainer, sharding, many hosts, checkpoints, the online phase."""
