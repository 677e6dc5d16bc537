"""The round loop (read `loop` first) and one completion as it grows."""
