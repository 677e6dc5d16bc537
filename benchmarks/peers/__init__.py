"""Other ways to complete the same prompts, each in a process of its own.

The first line on a peer's stdin, a JSON object, says what to load, and the peer answers `{"ready": ...}`. Each further
line is a `Workload`, answered by an `Outcome` or by `{"error": ...}`.
"""
