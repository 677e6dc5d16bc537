"""Changes that a request makes to the target's logits."""

from __future__ import annotations

from tandem.errors import InvalidRequestError
from tandem.types import MAX_LOGIT_BIAS, LogitAdjustments
from tandem.v1 import target_pb2


def adjustments_to_proto(adjustments: LogitAdjustments) -> target_pb2.LogitAdjustments | None:
    """Adjustments as a message; None where there are none."""
    if not adjustments:
        return None
    return target_pb2.LogitAdjustments(
        biases=adjustments.biases,
        min_tokens=adjustments.min_tokens,
        suppressed_token_ids=adjustments.suppressed_token_ids,
    )


def adjustments_from_proto(message: target_pb2.LogitAdjustments) -> LogitAdjustments:
    """The adjustments of a message.

    Raises:
        InvalidRequestError: a number is out of its range.
    """
    if message.min_tokens < 0:
        raise InvalidRequestError(f"min_tokens is {message.min_tokens}; it must be at least 0")
    for token_id, bias in message.biases.items():
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            raise InvalidRequestError(
                f"the bias of token {token_id} is {bias:g}; it must be between {-MAX_LOGIT_BIAS:g} and "
                f"{MAX_LOGIT_BIAS:g}"
            )
    return LogitAdjustments(dict(message.biases), message.min_tokens, tuple(message.suppressed_token_ids))
