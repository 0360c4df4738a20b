"""What the command line shows: the facts, how they are asked for, and how they are told."""
