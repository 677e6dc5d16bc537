"""Traces and metrics of the coordinator's requests. Importing this package costs nothing."""
