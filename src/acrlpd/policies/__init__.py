"""The one acting path: from an observation to an action chunk, and opening every kind of checkpoint."""
