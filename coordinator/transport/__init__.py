"""One draft or target service as the coordinator sees it: clients and sequence streams.

Imported by `replicas` and `failover`; imports `telemetry.observer` and `decoding`.
"""
