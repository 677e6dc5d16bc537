"""Acceptance of the rounds that one message answers."""
