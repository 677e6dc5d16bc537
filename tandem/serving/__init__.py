"""Running a gRPC server: its start, its readiness, its end, and the edge where errors become status codes."""
