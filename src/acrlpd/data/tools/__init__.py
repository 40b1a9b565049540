"""What people do with a dataset: look at it, check it, label it, convert it, write a new one."""
