"""Ways to make the policy better than its data: one file each."""
