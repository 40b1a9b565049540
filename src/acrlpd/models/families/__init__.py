"""Policy families, one file each: what a config says about a policy. `create` makes the network."""
