"""Robots: one file each, with everything the project knows about that robot."""
