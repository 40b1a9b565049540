"""From training to the robot: export to openpi, and best-of-N behind openpi's own protocol.

Uses agents and checkpoints from outside; training knows nothing of it. The server needs the `serve` extra.
"""
