"""The calling side of gRPC: channels, credentials, addresses, deadlines.

Imported by the coordinator and by the clients; imports no service.
"""
