"""Counts in sentences."""

from __future__ import annotations


def plural(count: int, noun: str) -> str:
    """1 token, 1024 tokens: for error messages, whose numbers are those of the options."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def grouped(count: int, noun: str) -> str:
    """1 token, 1,024 tokens: for people."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
