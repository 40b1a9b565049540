"""Policy families as plain data: one file each. Nothing here imports a network until one is made."""
