"""Several coordinator processes on one port. Only `coordinator.__main__` imports it."""
