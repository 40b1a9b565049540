"""The networks and the policy families. Nothing here knows of reinforcement learning or of devices."""
