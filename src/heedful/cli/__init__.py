"""The command `heedful`: one file per command, and the modules that print its output."""
