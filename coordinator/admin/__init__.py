"""The admin service: what operators see and steer.

Imported by `http` and the servicer; imports `requests` and below.
"""
