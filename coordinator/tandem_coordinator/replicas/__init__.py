"""The replicas of draft and target: the registry, the pools, health, and which models go together."""
