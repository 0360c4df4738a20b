"""The command `heedful`: one file a command, beside what it prints."""
