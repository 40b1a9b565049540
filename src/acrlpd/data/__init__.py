"""Episodes in, batches out: sources, frames, the pipeline between them and the agent, and tools for datasets."""
