"""A word is ruled out wherever it is spelled, and nothing else is."""

from __future__ import annotations

from itertools import product

import pytest

from genrt.errors import InvalidRequest
from genrt.models import EMBEDDED, resolve
from genrt.tokens.encoding import encode
from genrt.tokens.spellings import Spellings
from genrt.tokens.vocabulary import BytesTokenizer, byte_vocab, special_token_ids
from tests.tokens.test_vocabulary import EXACT, SPACE_IN_FRONT, WORDS, made


def spelled(name: str, *words: str) -> set[bytes]:
    tokenizer, tokens = made(name)
    found = Spellings(tokenizer, len(tokens)).of(words)
    return {b"".join(tokens[token_id] for token_id in ids) for ids in found}


@pytest.mark.parametrize("name", EXACT | SPACE_IN_FRONT)
def test_a_word_is_spelled_as_it_stands_and_after_one_blank(name: str) -> None:
    for word in (*WORDS, "\n-", " the", "  -", "cat sat", "🙃", "-"):
        forms = {word.encode()} if word[0].isspace() else {word.encode(), f" {word}".encode()}
        assert spelled(name, word) == forms


@pytest.mark.parametrize("name", EXACT | SPACE_IN_FRONT)
def test_a_text_that_has_the_word_has_one_of_its_spellings(name: str) -> None:
    tokenizer, tokens = made(name)
    spellings = Spellings(tokenizer, len(tokens))
    for word, before in product(("cat", "naïve", "日本"), ("a ", "\n", ". ", "日本 ")):
        token_ids = encode(tokenizer, f"{before}{word}")
        assert any(token_ids[-len(ids) :] == ids for ids in spellings.of([word]))


@pytest.mark.embedded
def test_every_word_of_the_embedded_model_is_ruled_out_wherever_it_is_spelled() -> None:
    """Compared with the bytes of all tokens: of the word, or of a blank and the word."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve(EMBEDDED, progress=False))
    tokens = byte_vocab(tokenizer, len(tokenizer))
    special = special_token_ids(tokenizer)
    alone: dict[bytes, set[int]] = {}
    for token_id, data in enumerate(tokens):
        alone.setdefault(data, set()).add(token_id)
    words = {
        data.decode().removeprefix(" ")
        for token_id, data in enumerate(tokens)
        if token_id not in special and data[:1] == b" " and data[1:].isalpha()
    }
    assert len(words) > 30_000
    spellings = Spellings(tokenizer, len(tokens))
    for word in sorted(words)[::100]:
        found = spellings.of([word])
        single = {ids[0] for ids in found if len(ids) == 1}
        forms = word.encode(), f" {word}".encode()
        assert single == alone.get(forms[0], set()) | alone.get(forms[1], set())
        assert {b"".join(map(tokens.__getitem__, ids)) for ids in found} == {*forms}


def test_a_word_that_no_tokens_spell_is_refused() -> None:
    spellings = Spellings(BytesTokenizer([b"a", b"b"]), 2)
    assert spellings.of(["ab"]) == [[0, 1]]
    with pytest.raises(InvalidRequest, match="bad_words: the tokenizer cannot spell 'c'"):
        spellings.of(["ab", "c"])
