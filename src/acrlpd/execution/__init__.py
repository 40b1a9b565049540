"""What a policy answers with, and how its answers become steps: one file per way to execute a chunk. No JAX."""
