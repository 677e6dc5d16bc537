"""The prompt of a chat whose last message should be continued, not answered."""

from __future__ import annotations

from tandem.errors import InvalidRequestError


def open_ended(prompt: str, final_text: str) -> str:
    """The prompt up to the end of the final message's text, without the rest of the template's output.

    Meaning and name (`continue_final_message`) are those of transformers' `apply_chat_template`.

    Args:
        prompt: The rendered chat, without a generation prompt.
        final_text: The text of its last message.

    Raises:
        InvalidRequestError: the template changes the message.
    """
    stripped = final_text.strip()
    start = prompt.rfind(stripped)
    if start < 0 or not stripped:
        raise InvalidRequestError(
            "continue_final_message is true and the chat template does not write the last message's text; it must "
            "be false for such a chat"
        )
    # A template may strip the message; where it does not, trailing white space belongs to it.
    written = final_text.lstrip()
    end = start + len(written) if prompt.startswith(written, start) else start + len(stripped)
    return prompt[:end]
