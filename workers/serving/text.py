"""`TextWriter`: an answer's tokens as text, cut at a stop string, never half a character and never half a stop."""

from __future__ import annotations

from collections.abc import Sequence

from workers.engines.tokenizer import Detokenizer, Tokenizer


class TextWriter:
    """`push` tokens, then `flush` once. Text that might be the beginning of a stop string is held back meanwhile."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]):
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = stops
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """The text that may be told now. `stopped` turns true when a stop string is complete."""
        return self._tell(self._detokenizer.push(token_id))

    def flush(self) -> str:
        """What is left at the end; nothing after a stop string."""
        if self.stopped:
            return ""
        told = self._tell(self._detokenizer.flush())
        rest, self._held = ("" if self.stopped else self._held), ""
        return told + rest

    def _tell(self, text: str) -> str:
        text = self._held + text
        at = min((i for i in (text.find(stop) for stop in self._stops) if i >= 0), default=None)
        if at is not None:
            self.stopped, self._held = True, ""
            return text[:at]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        told, self._held = text[: len(text) - keep], text[len(text) - keep :]
        return told


def _overlap(text: str, stop: str) -> int:
    """How long a beginning of `stop` the text ends with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
