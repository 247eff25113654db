"""The text that drawn tokens add after a prompt, token by token.

Rules:
    The text is a tokenizer's own, after the prompt: a token's text may depend on the tokens before.
    Text that ends inside a character waits for the rest.
    A character that the prompt begins and a drawn token completes belongs to the prompt, not to the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from genrt.tokens.vocabulary import BytesTokenizer

Decode: TypeAlias = Callable[[list[int]], str]

TAIL = 8
"""The least number of earlier tokens to decode a token with: its text may depend on them."""

BROKEN = "\ufffd"


class TextStream:
    """The text after one prompt. A tokenizer of the ``tokenizers`` library decodes by its
    ``DecodeStream``, as in vLLM."""

    def __init__(
        self, tokenizer: Any, prompt: Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        self._skip = skip_special_tokens
        self._decode = _decoder(tokenizer, skip_special_tokens)
        self._ids = _tail(self._decode, prompt)
        self._before = self._decode(self._ids)
        self._whole = self._whole_characters()
        self._stream: Any = None
        if self._fast is not None and not self._before.endswith(BROKEN):
            self._stream = self._begun(prompt)

    def step(self, token_id: int) -> str:
        """Return the text that a token adds; may be empty."""
        if self._stream is not None:
            return self._streamed(token_id)
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text.endswith(BROKEN) or text == self._before:
            return ""
        new = self._added(text)
        if self._fast is not None:
            self._stream = self._begun(self._ids)
        else:
            self._ids = self._ids[-TAIL:]
            self._before = self._decode(self._ids)
            self._whole = len(self._before)
        return new

    def _whole_characters(self) -> int:
        """Return how many characters of the text so far are whole. Some decoders make U+FFFD of whole
        ones beside an incomplete one."""
        for end in range(len(self._ids), 0, -1):
            text = self._decode(self._ids[:end])
            if not text.endswith(BROKEN):
                return len(text)
        return 0

    def _added(self, text: str) -> str:
        """Return the new text, without the rest of a character that the old text began."""
        before = self._before
        if text.startswith(before):
            return text[len(before) :]
        pairs = enumerate(zip(before, text, strict=False))
        differs = next((place for place, (one, other) in pairs if one != other), len(text))
        return text[max(differs, self._whole) + 1 :]

    def _begun(self, token_ids: Sequence[int]) -> Any:
        from tokenizers.decoders import DecodeStream

        return DecodeStream(ids=list(token_ids), skip_special_tokens=self._skip)

    def _streamed(self, token_id: int) -> str:
        try:
            found: str | None = self._stream.step(self._fast, token_id)
        except Exception as error:  # the library has no error type for this
            if "Invalid prefix" not in str(error):
                raise
            # Bytes that are no text have changed the text before them: vLLM begins again here too.
            self._stream = self._begun([])
            found = self._stream.step(self._fast, token_id)
        return found or ""


def ends_inside_character(
    tokenizer: Any, prompt: Sequence[int], *, skip_special_tokens: bool = True
) -> bool:
    """Return whether a prompt's text ends inside a character, or with U+FFFD, which looks the same."""
    decode = _decoder(tokenizer, skip_special_tokens)
    last = decode([prompt[-1]]) if prompt else ""
    if last and not last.endswith(BROKEN):
        return False
    return decode(_tail(decode, prompt)).endswith(BROKEN)


def _decoder(tokenizer: Any, skip_special_tokens: bool) -> Decode:
    if isinstance(tokenizer, BytesTokenizer):
        return tokenizer.decode
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None:
        return lambda ids: str(fast.decode(ids, skip_special_tokens=skip_special_tokens))
    return lambda ids: str(
        tokenizer.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
    )


def _tail(decode: Decode, prompt: Sequence[int]) -> list[int]:
    """Return the prompt's last tokens, from the beginning of a character on: some decoders make U+FFFD of
    every byte beside an incomplete character."""
    start, least = len(prompt), max(0, len(prompt) - 512)
    while start > least and (not (text := decode([prompt[start - 1]])) or BROKEN in text):
        start -= 1
    start = max(0, start - TAIL)
    while start > least and BROKEN in decode([prompt[start]]):
        start -= 1
    return list(prompt[start:])
