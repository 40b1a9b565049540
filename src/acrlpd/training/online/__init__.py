"""The online phase: rounds of episodes, the actor process, and their way into the batches."""
