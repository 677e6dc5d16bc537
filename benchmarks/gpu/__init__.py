"""`make bench-gpu`: one command for whoever has a GPU, and a report to send in.

May import `tandem.engine`, `draft_service` and the rest of `benchmarks`.
"""
