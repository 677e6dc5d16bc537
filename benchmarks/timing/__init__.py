"""Times and bytes of rounds and of their parts, and time to the first token."""
