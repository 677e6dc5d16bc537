"""The config of each kind of drafting head. Needs no torch."""
