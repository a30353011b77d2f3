"""How far a response's text is known after each of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class TokenText:
    """Tokens of one response, and its text.

    tokenizer: that decoded the tokens to the text, without special tokens.
    """

    def __init__(self, tokens: Sequence[int], text: str, tokenizer: Any) -> None:
        self.tokens, self.text, self.tokenizer = list(tokens), text, tokenizer
        self._known = {0: 0, len(self.tokens): len(text)}

    def known(self, count: int) -> int:
        """How many characters of the text the first ``count`` tokens spell. A character whose bytes are spread over
        several tokens is known after the last of them; special tokens add nothing.
        """
        if count not in self._known:
            start = self.tokenizer.decode(self.tokens[:count], skip_special_tokens=True)
            # What the end of a start decodes to may still change: half a character is a replacement mark.
            alike = (place for place, (own, whole) in enumerate(zip(start, self.text, strict=False)) if own != whole)
            self._known[count] = len(start) if self.text.startswith(start) else next(alike, len(self.text))
        return self._known[count]

    def spelling(self, start: int, end: int) -> list[tuple[int, int]]:
        """The tokens that spell ``text[start:end]``, which is not empty: each with how far the text is known after it,
        at most to ``end``.
        """
        low, high = 0, len(self.tokens)  # known(low) <= start < known(high)
        while high - low > 1:  # few words are asked for, so that this decodes less than all starts
            middle = (low + high) // 2
            low, high = (middle, high) if self.known(middle) <= start else (low, middle)
        found = []
        for token in range(low, len(self.tokens)):
            found.append((token, min(self.known(token + 1), end)))
            if found[-1][1] == end:
                break
        return found
