"""From episodes to batches: rewards, windows, transforms, norm statistics, the loader and the replay."""
