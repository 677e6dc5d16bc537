"""Other ways to complete the same prompts, each in a process of its own.

A peer is told what to load by the first line on its stdin, a JSON object, and answers `{"ready": ...}`; each further
line is a `Workload`, answered by an `Outcome` or by `{"error": ...}`.
"""
