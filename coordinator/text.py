"""From token ids to text, as they come: no half characters, nothing past a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

# What a decoder writes for bytes that are no character, or not yet one.
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Turns ids into text incrementally. Bytes of an unfinished character wait for the ids that finish it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._waiting: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that this token completes, possibly none."""
        text: str | None = self._stream.step(self._tokenizer, token_id)
        if text is None:
            self._waiting.append(token_id)
            return ""
        self._waiting.clear()
        return text

    def finish(self) -> str:
        """The whole characters among what still waits. Bytes that never became a character are left out."""
        text: str = self._tokenizer.decode(self._waiting)
        self._waiting.clear()
        return text.rstrip(_REPLACEMENT)


class StopStrings:
    """Finds the first stop string in a stream of text, and holds back what may be the beginning of one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._held = ""
        self.met = False

    def push(self, text: str) -> str:
        """The text that is now certain to be part of the completion."""
        text = self._held + text
        starts = [start for string in self._stop if (start := text.find(string)) >= 0]
        if starts:
            self.met = True
            self._held = ""
            return text[: min(starts)]
        held = max((_overlap(text, string) for string in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was held back, now that nothing follows it."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` that begins `string` without being all of it."""
    return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:n])), 0)
