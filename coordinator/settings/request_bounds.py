"""Bounds on the work of one request, and of all requests together."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tandem.config.options import Options

MAX_SPECULATIVE_TOKENS = 32
"""A request may ask for so many tokens per proposal, or for as many as the coordinator's own setting."""
MAX_CHAT_MESSAGES = 2_048
"""Maximum messages of a chat."""


class RequestBounds(Options):
    """Bounds on the coordinator's work."""

    max_concurrent_requests: int = Field(default=256, ge=1)
    """Maximum requests that run at once. A free place goes to the client address that has the fewest, and an eighth
    more are kept for addresses with fewer than four."""
    max_queued_requests: int = Field(default=256, ge=0)
    """Maximum requests that wait for a place; others are refused at once, with the time after which to try again."""
    max_streams_per_peer: int | None = Field(default=None, ge=1)
    """Maximum requests of one client address at once, including those whose client does not read. By default as many
    as may run and wait. Behind a proxy all clients have the proxy's address. An IPv6 /64 counts as one address."""
    stalled_stream_seconds: float = Field(default=1.0, gt=0)
    """How long a stream may wait for its client before it gives up its places in the coordinator, on the draft and on
    the target. It takes them again when its client reads."""
    max_prompt_bytes: int = Field(default=1 << 20, ge=1)
    """Maximum bytes of a prompt's text, in UTF-8."""
    max_stop_strings: int = Field(default=16, ge=0)
    """Maximum stop strings of a request."""
    max_stop_length: int = Field(default=256, ge=1)
    """Maximum characters of a stop string."""
    max_logit_biases: int = Field(default=1024, ge=0)
    """Maximum token ids in a request's logit_bias."""
    max_stop_token_ids: int = Field(default=256, ge=0)
    """Maximum stop token ids of a request."""
    draft_model_penalties: Literal["refuse", "target-only"] = "refuse"
    """Treatment of a request with repetition, frequency or presence penalties where a separate draft model
    proposes: refuse it, as MAX does, or let the target serve it without drafting. Tandem's own."""
