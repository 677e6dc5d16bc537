"""The drafter and the verifier of the round loop, on whichever replica is there.

Imported by `requests`; imports `replicas`, `transport`, `decoding` and `speculation`.
"""
