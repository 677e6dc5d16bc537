"""The replicas of draft and target: the registry, the pools, health, and which models go together.

Imported by `failover` and above; imports `transport`, `speculation` and `settings`.
"""
