"""Running a gRPC server: startup, readiness, shutdown, and the error boundary that turns errors into status codes."""
