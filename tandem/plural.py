"""Counts in sentences."""

from __future__ import annotations


def plural(count: int, noun: str) -> str:
    """1 token, 1,024 tokens."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
