"""The subcommands of `acrlpd`. Each module is imported only when its command runs."""
