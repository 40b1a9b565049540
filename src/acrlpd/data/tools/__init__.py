"""What people do with a dataset: look at it, check it, convert it, write one."""
