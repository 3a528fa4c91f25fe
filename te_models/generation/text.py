"""From tokens to text while they come: whole characters only, and an end at the first stop string."""

from collections.abc import Callable, Sequence


class TextStream:
    """The text of tokens that are added one by one.

    decode: turns ids into text. stop: texts at the first of which the text ends, without it. ends: tokens that end the
    text; they count as tokens, and are written only with show_ends.

    Example:
        text = TextStream(tokenizer.decode, stop=["\\n\\n"])
        for token in stream(model, input_ids, max_new_tokens=20):
            print(text.add(int(token)), end="")
            if text.finished:
                break
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        stop: Sequence[str] = (),
        ends: Sequence[int] = (),
        show_ends: bool = False,
    ) -> None:
        if "" in stop:
            raise ValueError("a stop string is empty; allowed: text")
        self.tokens: list[int] = []
        self.text = ""
        self.finished = False
        self._decode, self._stop, self._ends, self._show_ends = decode, tuple(stop), frozenset(ends), show_ends
        self._shown = 0

    def add(self, token: int) -> str:
        """Add a token and return what can be shown of the text that has not been: no part of a character, and nothing
        that may become a stop string."""
        self.tokens.append(token)
        self.finished = token in self._ends
        written = self.tokens[:-1] if self.finished and not self._show_ends else self.tokens
        self.text = self._decode(written)
        places = [place for place in map(self.text.find, self._stop) if place >= 0]
        if places:
            self.text, self.finished = self.text[: min(places)], True
        return self._show(self._held_back())

    def rest(self) -> str:
        """Return what has not been shown when no more tokens come."""
        return self._show(0)

    def _show(self, held_back: int) -> str:
        end = max(self._shown, len(self.text) - held_back)
        part, self._shown = self.text[self._shown : end], end
        return part

    def _held_back(self) -> int:
        """Return how many characters at the end wait for the next token."""
        if self.finished:
            return 0
        waiting = len(self.text) - len(self.text.rstrip("\N{REPLACEMENT CHARACTER}"))
        for stop in self._stop:
            longest = next((n for n in range(len(stop) - 1, 0, -1) if self.text.endswith(stop[:n])), 0)
            waiting = max(waiting, longest)
        return waiting
