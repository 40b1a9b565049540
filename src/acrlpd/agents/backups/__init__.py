"""What the critics' targets bootstrap from: one file each."""
