"""The token sequences that spell a word: ``bad_words`` rules them out, on every engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

from cachetools import LRUCache

from genrt.errors import EngineUnsupported, InvalidRequest
from genrt.tokens.vocabulary import BytesTokenizer, all_tokens


class Spellings:
    """The spellings of words by one tokenizer; for any thread.

    A word is spelled as it stands, and after one blank unless it begins with white space. Each form has
    the tokens that the tokenizer encodes it to, at the beginning of a text and inside of one, and every
    single token of its bytes.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._known: LRUCache[str, tuple[tuple[int, ...], ...]] = LRUCache(1024)
        self._tokens: list[bytes] | None = None
        self._ids: dict[bytes, list[int]] = {}
        self._lock = threading.Lock()

    def of(self, words: Sequence[str]) -> list[list[int]]:
        """Return the token ids of every spelling of these words. Raises InvalidRequest if the tokenizer
        cannot spell one of them."""
        with self._lock:
            return [list(token_ids) for word in words for token_ids in self._of(word)]

    def _of(self, word: str) -> tuple[tuple[int, ...], ...]:
        found = self._known.get(word)
        if found is None:
            forms = [word] if word[0].isspace() else [word, f" {word}"]
            every = dict.fromkeys(ids for ids in self._found(forms) if ids)
            found = tuple(ids for ids in every if max(ids) < self._vocab_size)
            if not found:
                raise InvalidRequest(
                    f"bad_words: the tokenizer cannot spell {word!r}: leave it out"
                )
            self._known[word] = found
        return found

    def _found(self, forms: Sequence[str]) -> Iterator[tuple[int, ...]]:
        tokens = self._read()
        if not tokens:  # the tokens' bytes are unknown
            yield from (self._encoded(form) for form in forms)
            return
        for form in forms:
            data = form.encode()
            yield from ((token_id,) for token_id in self._ids.get(data, ()))
            # A tokenizer may put a blank before a text, but not after a line feed.
            for before in ("", "\n"):
                yield _last(tokens, self._encoded(before + form), data)
                yield _last(tokens, self._encoded(before + form.removeprefix(" ")), data)

    def _encoded(self, text: str) -> tuple[int, ...]:
        if not isinstance(self._tokenizer, BytesTokenizer):
            return tuple(self._tokenizer.encode(text, add_special_tokens=False))
        try:
            return tuple(self._tokenizer.encode(text))
        except InvalidRequest:  # its vocabulary lacks some of the bytes
            return ()

    def _read(self) -> list[bytes]:
        """Return the tokens' bytes, read once; empty for an unknown kind of tokenizer."""
        if self._tokens is None:
            try:
                self._tokens = all_tokens(self._tokenizer)
            except EngineUnsupported:
                self._tokens = []
            if isinstance(self._tokenizer, BytesTokenizer) and self._tokens:
                end = self._tokenizer.eos_token_id  # it is not text, even if it has bytes
                self._tokens = [b"" if i == end else each for i, each in enumerate(self._tokens)]
            for token_id, data in enumerate(self._tokens):
                self._ids.setdefault(data, []).append(token_id)
        return self._tokens


def _last(tokens: Sequence[bytes], token_ids: Sequence[int], data: bytes) -> tuple[int, ...]:
    """Return the last token ids that spell these bytes; empty if the bytes begin inside a token."""
    start, spelled = len(token_ids), b""
    while start and len(spelled) < len(data):
        start -= 1
        spelled = tokens[token_ids[start]] + spelled
    return tuple(token_ids[start:]) if spelled == data else ()
