"""Policy families as plain data, one file each. Importing a family imports no network."""
