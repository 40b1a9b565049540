"""The `acrlpd` command and all of its subcommands, one module each."""
