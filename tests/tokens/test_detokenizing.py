"""The text after a prompt is what its tokens' bytes add, wherever the prompt is cut; a character that the
prompt has begun is the prompt's."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genrt.tokens.detokenizing import TextStream, ends_inside_character
from genrt.tokens.encoding import encode
from tests.tokens.test_vocabulary import EXACT, SPACE_IN_FRONT, made

CHARACTERS = "a\u0301é日本語🙂🙃👩\u200d👩\u200d👧 \n<0x41>"

TEXTS = st.lists(
    st.sampled_from([*CHARACTERS, "the", " cat", "naïve", "🌶️", "a red ", "日本語の文章"]),
    min_size=1,
).map("".join)


def bytes_after(tokens: list[bytes], token_ids: list[int], cut: int) -> bytes:
    """What tokens from number ``cut`` on add, less the rest of a character."""
    data = b"".join(tokens[token_id] for token_id in token_ids[cut:])
    while data and 0x80 <= data[0] < 0xC0:
        data = data[1:]
    return data


@pytest.mark.parametrize("name", EXACT | SPACE_IN_FRONT)
@given(text=TEXTS, data=st.data())
@settings(max_examples=50, deadline=None)
def test_the_text_after_a_prompt_is_what_its_tokens_add(name: str, text: str, data: Any) -> None:
    tokenizer, tokens = made(name)
    token_ids = encode(tokenizer, f"{text}.")
    cut = data.draw(st.integers(1, len(token_ids)), label="cut")
    expected = bytes_after(tokens, token_ids, cut)
    stream = TextStream(tokenizer, token_ids[:cut])
    found = [stream.step(token_id) for token_id in token_ids[cut:]]
    assert "".join(found) == expected.decode()
    # What has come is never taken back, and comes at the character's last token.
    for place in range(len(found)):
        rest = bytes_after(tokens, token_ids, cut + place + 1).decode()
        assert expected.decode().startswith("".join(found[: place + 1]))
        assert expected.decode().removesuffix(rest).startswith("".join(found[: place + 1]))


def token_of(name: str, byte: int) -> int:
    """The token of a byte; of a letter, the letter's own."""
    tokenizer, tokens = made(name)
    if name in ("gemma", "llama-2") and byte >= 0x80:
        return int(tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>"))
    return tokens.index(bytes([byte]))


CUT: list[tuple[bytes, bytes, str]] = [
    (b"a red \xf0\x9f\x8c", b"\xb6 b", " b"),
    (b"a red \xf0\x9f\x8c", b"b", "b"),
    (b"a red \xf0", b"\x9f\x8c\xb6\xf0\x9f\x8c\xb7.", "🌷."),
    ("é日本🌶".encode() + b"\xef\xb8", b"\x8f\xc3\xa9.", "é."),
    ("a\ufffd".encode(), b"b", "b"),
    ("a\ufffd".encode(), "\ufffdé.".encode(), "\ufffdé."),
    (b"a", b"\xe2\x82", ""),
]
"""A prompt, what is drawn, and its text."""


@pytest.mark.parametrize(("prompt", "drawn", "text"), CUT)
@pytest.mark.parametrize("name", ["bytes", "byte-level", "gemma", "llama-2"])
def test_a_character_that_the_prompt_has_begun_is_the_prompts(
    name: str, prompt: bytes, drawn: bytes, text: str
) -> None:
    tokenizer, _ = made(name)
    before, after = ([token_of(name, byte) for byte in data] for data in (prompt, drawn))
    stream = TextStream(tokenizer, before)
    assert "".join(map(stream.step, after)) == text
    is_cut = prompt.decode(errors="replace").endswith("\ufffd")
    assert ends_inside_character(tokenizer, before) == is_cut
