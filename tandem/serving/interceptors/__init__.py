"""gRPC server interceptors: authentication, readiness, error boundary, limits for anonymous calls.

Imported by `tandem.serving.server` and by services that add their own.
"""
