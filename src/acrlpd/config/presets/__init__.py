"""One file per preset: `CONFIG`, optional `ALIASES`, and a docstring that says what the preset is for."""
