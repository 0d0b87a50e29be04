"""Ids to text, piece by piece; and text up to a stop string.

Text is held back until no later id can change it.  Invariants: the pieces of a `Stream`, joined, are what `decode`
gives for all ids; no piece ends inside a character.  The pieces of `StopStrings`, joined, are the text before the first
stop string, however the text was cut into pieces.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ggml_sched.llama.text.tokenizer import Tokenizer

__all__ = ["StopStrings", "Stream"]


class Stream:
    """Decodes ids one by one.

    A character whose bytes are in several tokens is returned when it is complete; bytes that no further token can
    complete become U+FFFD at once.  After `flush()` a new text begins.  `continuing`: the first space of the text is
    not removed, because the ids continue an earlier text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, continuing: bool = False) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._strip = self._strips = tokenizer.add_space_prefix and not continuing
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, *ids: int) -> str:
        """The text that becomes certain with these ids; all ids are checked before any is decoded."""
        token_bytes, skip = self._tokenizer.token_bytes, self._skip_special
        pieces = [token_bytes(token, skip) for token in ids]
        if self._strip:
            for i, (token, piece) in enumerate(zip(ids, pieces, strict=True)):
                if piece:
                    # A special token does not count as the first token of a text, even if its own text is returned.
                    if self._tokenizer.is_special(token):
                        continue
                    pieces[i] = piece.removeprefix(b" ")
                    self._strip = False
                    break
        return self._decoder.decode(b"".join(pieces))

    def flush(self) -> str:
        """Return the held-back bytes as U+FFFD, and begin a new text."""
        rest = self._decoder.decode(b"", True)
        self._decoder.reset()
        self._strip = self._strips
        return rest


class StopStrings:
    """Lets text through up to the first of some strings.

        stops = StopStrings(["\\n\\n", "User:"])
        for piece in pieces:
            print(stops.feed(piece), end="")
            if stops.matched is not None:
                break
        print(stops.flush(), end="")

    Text that may be the beginning of a stop string is held back.  `matched` is the stop string that ended the text; of
    several that end at the same character, the longest.  Text fed after a match is dropped.
    """

    def __init__(self, stops: str | Iterable[str] = ()) -> None:
        if not isinstance(stops, Iterable):
            raise TypeError(f"stop strings are a str or a list of them, not {type(stops).__name__}")
        stops = (stops,) if isinstance(stops, str) else tuple(stops)
        for stop in stops:
            if not isinstance(stop, str):
                raise TypeError(f"a stop string is a str, not {type(stop).__name__}")
            if not stop:
                raise ValueError("an empty stop string would end every text before it begins")
        self.stops = stops
        self.matched: str | None = None
        self._held = ""

    def feed(self, text: str) -> str:
        """Add a text; returns what was held back and added, up to where a stop string begins or may begin."""
        if self.matched is not None:
            return ""
        text = self._held + text
        ends = [(at + len(stop), at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if ends:
            _, at, self.matched = min(ends)
            self._held = ""
            return text[:at]
        held = max((self._beginning(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """Return the text that was held back: no more text comes, so it is not the beginning of a stop string."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _beginning(text: str, stop: str) -> int:
        """How many characters at the end of the text are the beginning of the stop string."""
        for n in range(min(len(text), len(stop) - 1), 0, -1):
            if text.endswith(stop[:n]):
                return n
        return 0
