"""One directory per step: what openpi serves, and the complete state of the run."""
