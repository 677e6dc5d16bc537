"""Traces and metrics. Importing this costs nothing: OpenTelemetry and prometheus_client are read only when asked for."""
