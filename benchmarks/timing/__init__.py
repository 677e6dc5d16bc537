"""Times and bytes of rounds, and time to the first token."""
