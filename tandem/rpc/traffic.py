"""How many bytes were exchanged for a sequence, and how long its messages waited."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MessageWaits:
    """Receives how long the messages of a shared stream wait in this process, in seconds each."""

    answer: Callable[[float], None]
    """From reading an answer until its sequence goes on."""
    question: Callable[[float], None]
    """From a sequence's question until the message that has it is written."""


@dataclass(slots=True)
class Traffic:
    """Bytes sent and received for one sequence: serialized messages without framing."""

    sent_bytes: int = 0
    received_bytes: int = 0
    sent_messages: int = 0
    received_messages: int = 0
    waits: MessageWaits | None = None
    """None: nobody measures."""
