"""Several coordinator processes on one port: the parent that starts and supervises them, and what it answers for all.

Only `coordinator.__main__` imports it. Requests never pass the parent: the system gives each connection to a worker.
"""
