"""The round loop (read `loop` first) and one completion as it grows.

Imported by `requests`, `failover`, `transport` and `telemetry`; imports only `stats`.
"""
