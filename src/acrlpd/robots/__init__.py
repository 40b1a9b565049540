"""Robots: one file each, with everything that the project knows about that robot."""
