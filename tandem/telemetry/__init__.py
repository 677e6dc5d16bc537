"""Traces and metrics. Importing this costs nothing: the libraries for them are imported only when asked for."""
