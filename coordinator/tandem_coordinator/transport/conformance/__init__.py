"""Plays the protocol of draft and target services (docs/protocol.md) against one, and says where it differs."""
