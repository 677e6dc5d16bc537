"""The calling side of gRPC: channels, credentials, addresses, deadlines."""
