"""The bytes of tokens spell the texts they encode, and the trie's sums equal enumeration."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from genrt.errors import EngineUnsupported, InvalidRequest
from genrt.tokens.encoding import encode
from genrt.tokens.vocabulary import (
    BytesTokenizer,
    byte_vocab,
    special_token_ids,
    str_vocab,
)

CORPUS = [
    "the cat sat on the mat, and the other cat did not.",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z",
    "  two spaces,   three;\nlines\n\n\tand tabs",
    "naïve café über Straße 12345 67890",
    "def f(x):\n    return x + 1\n",
    "日本語の文章 🙂🙃",
] * 3

# -- tokenizers of every kind, trained on the spot -------------------------------------------------


def wrapped(backend: Tokenizer, *, unknown: str | None = "<unk>") -> Any:
    """One of transformers' tokenizers, with a special token and one that is only added."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token=unknown, bos_token="<s>", eos_token="</s>"
    )
    tokenizer.add_tokens([AddedToken("<töol>", normalized=False)])
    return tokenizer


def byte_level(
    *,
    add_prefix_space: bool = False,
    split: bool = False,
    normalizer: Any = None,
    alphabet: Sequence[str] | None = None,
) -> Any:
    backend = Tokenizer(models.BPE())
    step = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=not split)
    if normalizer is not None:
        backend.normalizer = normalizer
    if split:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, step])
    elif not isinstance(normalizer, normalizers.ByteLevel):
        backend.pre_tokenizer = step
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=alphabet or pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return wrapped(backend, unknown=None)


def with_byte_pieces(backend: Tokenizer) -> Tokenizer:
    """The same tokenizer, where characters without a piece become bytes."""
    specification = json.loads(backend.to_str())
    model = specification["model"]
    model["byte_fallback"] = True
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    if model["type"] == "Unigram":
        model["vocab"] += [[piece, -20.0] for piece in pieces]
    else:
        model["vocab"] |= {piece: len(model["vocab"]) + i for i, piece in enumerate(pieces)}
    return Tokenizer.from_str(json.dumps(specification))


def metaspace(*, unigram: bool, prepend_scheme: str) -> Any:
    backend = Tokenizer(models.Unigram() if unigram else models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=prepend_scheme)]
    )
    return trained_on_characters(backend, unigram=unigram)


def llama_2(*, prefix: bool) -> Any:
    """Spaces are replaced by a normalizer and no pre-tokenizer splits; without prefix, Gemma's way."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    replace = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = replace
    backend.decoder = decoders.Sequence(steps)
    return trained_on_characters(backend, unigram=False)


def trained_on_characters(backend: Tokenizer, *, unigram: bool) -> Any:
    special = ["<unk>", "<s>", "</s>"]
    trainer = (
        trainers.UnigramTrainer(
            vocab_size=200, special_tokens=special, unk_token="<unk>", show_progress=False
        )
        if unigram
        else trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    )
    backend.train_from_iterator(CORPUS, trainer)
    return wrapped(with_byte_pieces(backend))


def table() -> BytesTokenizer:
    """Every byte, some of them twice, longer tokens, an empty one and an end."""
    tokens = [bytes([byte]) for byte in range(256)]
    return BytesTokenizer([b"</s>", *tokens, b"a", b"the ", b"", "é".encode()], eos_token_id=0)


EXACT: dict[str, Callable[[], Any]] = {
    "bytes": table,
    "byte-level": byte_level,
    "byte-level, digits split": functools.partial(byte_level, split=True),
    "byte-level normalizer": lambda: byte_level(normalizer=normalizers.ByteLevel()),
    "bpe, metaspace never": functools.partial(metaspace, unigram=False, prepend_scheme="never"),
    "unigram, metaspace never": functools.partial(metaspace, unigram=True, prepend_scheme="never"),
    "gemma": functools.partial(llama_2, prefix=False),
}
SPACE_IN_FRONT: dict[str, Callable[[], Any]] = {
    "byte-level, prefix space": functools.partial(byte_level, add_prefix_space=True),
    "bpe, metaspace always": functools.partial(metaspace, unigram=False, prepend_scheme="always"),
    "unigram, metaspace first": functools.partial(metaspace, unigram=True, prepend_scheme="first"),
    "llama-2": functools.partial(llama_2, prefix=True),
}


@functools.cache
def made(name: str) -> tuple[Any, list[bytes]]:
    tokenizer = (EXACT | SPACE_IN_FRONT)[name]()
    return tokenizer, byte_vocab(tokenizer, len(tokenizer))


def spelled(name: str, text: str) -> bytes:
    tokenizer, tokens = made(name)
    return b"".join(tokens[token_id] for token_id in encode(tokenizer, text))


WORDS = [
    "the",
    " cat",
    "  ",
    "\n",
    "\t",
    " ",
    "é",
    "naïve",
    "日本",
    "🙂",
    "ÿ",
    "Ġ",
    "<0",
    "12",
    ".",
]
# U+2581 stands for a space where spaces are metaspaces.
PLAIN = st.lists(
    st.sampled_from(WORDS)
    | st.text(st.characters(exclude_characters="▁\0", codec="utf-8"), max_size=4)
).map("".join)
WITH_ADDED = st.lists(st.sampled_from([*WORDS, "<töol>", "<s>"])).map("".join)


@pytest.mark.parametrize("name", EXACT)
@given(text=PLAIN | WITH_ADDED)
@settings(max_examples=40, deadline=None)
def test_the_bytes_of_the_tokens_are_the_text(name: str, text: str) -> None:
    assert spelled(name, text) == text.encode()


@pytest.mark.parametrize("name", SPACE_IN_FRONT)
@given(text=PLAIN)
@settings(max_examples=40, deadline=None)
def test_the_bytes_of_the_tokens_are_the_text_up_to_one_space_in_front(
    name: str, text: str
) -> None:
    assert spelled(name, text) in (text.encode(), b" " + text.encode())


# -- the table itself ------------------------------------------------------------------------------


def test_added_tokens_that_are_pieces_of_the_model_read_as_pieces() -> None:
    tokenizer = llama_2(prefix=False)
    assert encode(tokenizer, "x  y") == tokenizer.convert_tokens_to_ids(["x", "▁▁", "y"])
    tokenizer.add_tokens([AddedToken("▁▁", normalized=False)])
    assert byte_vocab(tokenizer, len(tokenizer))[tokenizer.convert_tokens_to_ids("▁▁")] == b"  "


def with_special_bytes() -> Any:
    """A BPE whose trainer was given the bytes as special tokens, as its users are advised."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return wrapped(backend)


def test_bytes_that_are_special_tokens_are_bytes_and_text() -> None:
    """They used to be their literal names, and no constraint allowed them."""
    tokenizer = with_special_bytes()
    tokens = byte_vocab(tokenizer, len(tokenizer))
    assert [tokens[3 + byte] for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert special_token_ids(tokenizer) == {0, 1, 2}
    text = "a\x07🙁"
    assert b"".join(tokens[i] for i in encode(tokenizer, text)) == text.encode()


# -- what the tokenizer itself says ----------------------------------------------------------------


@pytest.mark.parametrize("name", EXACT | SPACE_IN_FRONT)
def test_the_tokenizers_own_decoding_agrees(name: str, recwarn: pytest.WarningsRecorder) -> None:
    tokenizer, tokens = made(name)
    assert byte_vocab(tokenizer, len(tokenizer)) == tokens
    assert not recwarn.list


def test_a_tokenizer_of_an_unknown_kind_is_no_obstacle_to_loading() -> None:
    import genrt
    from tests.tokens.test_encoding import Engine

    for tokenizer in (None, object(), UNKNOWN["word pieces"][0]):
        with genrt.load(engine=functools.partial(Engine, tokenizer)) as lm:
            assert lm.next_token_logprobs_sync([1]).shape == (500,)
            with pytest.raises((EngineUnsupported, InvalidRequest), match=r"tokenizer|not known"):
                _ = lm.byte_vocab


@pytest.mark.parametrize("name", EXACT | SPACE_IN_FRONT)
def test_rows_longer_and_shorter_than_the_tokenizer(name: str) -> None:
    tokenizer, tokens = made(name)
    assert byte_vocab(tokenizer, len(tokenizer) + 3) == [*tokens, b"", b"", b""]
    assert byte_vocab(tokenizer, 7) == tokens[:7]
    assert byte_vocab(tokenizer, 0) == []


def test_str_vocab_shows_parts_of_characters_as_replacement_characters() -> None:
    tokenizer, tokens = made("bytes")
    assert str_vocab(tokenizer, 262) == [t.decode(errors="replace") for t in tokens] + [""]
    assert str_vocab(tokenizer, 262)[1 + 0xC3] == "\ufffd"


def test_special_token_ids() -> None:
    assert special_token_ids(BytesTokenizer([b"a"])) == frozenset()
    assert special_token_ids(table()) == {0}
    for name, special in (
        ("byte-level", ["<s>", "</s>"]),
        ("unigram, metaspace first", ["<unk>", "<s>", "</s>"]),
    ):
        tokenizer, _ = made(name)
        assert special_token_ids(tokenizer) == set(tokenizer.convert_tokens_to_ids(special))


# -- tokenizers whose bytes could only be guessed --------------------------------------------------


def word_piece() -> Tokenizer:
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    return backend


def of_parts(*, pre_tokenizer: Any = None, decoder: Any = None, suffix: str = "") -> Tokenizer:
    vocabulary = {"<unk>": 0, "a": 1, "b": 2, "▁": 3, " ": 4}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", end_of_word_suffix=suffix))
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    if decoder is not None:
        backend.decoder = decoder
    return backend


UNKNOWN: dict[str, tuple[Tokenizer, str]] = {
    "word pieces": (word_piece(), "within a word"),
    "end-of-word suffix": (of_parts(suffix="</w>", decoder=decoders.BPEDecoder()), "within a word"),
    "no decoder": (of_parts(), "no decoder"),
    "unknown decoder": (of_parts(decoder=decoders.CTC()), "step CTC"),
    "text in, bytes out": (of_parts(decoder=decoders.ByteLevel()), "does not encode so"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_tokenizer_of_an_unknown_kind_is_refused(name: str) -> None:
    from transformers import PreTrainedTokenizerFast

    backend, reason = UNKNOWN[name]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    with pytest.raises(EngineUnsupported, match=reason):
        byte_vocab(tokenizer, len(tokenizer))


# -- BytesTokenizer --------------------------------------------------------------------------------


def test_the_longest_match_wins_unless_the_rest_cannot_be_spelled() -> None:
    tokenizer = BytesTokenizer([b"a", b"ab", b"bc", b"abc", b"c", b"abcd"], eos_token_id=5)
    assert tokenizer.encode("abc") == [3]
    assert tokenizer.encode("abbc") == [1, 2]
    assert BytesTokenizer([b"a", b"ab", b"bc"]).encode("abc") == [0, 2]
    with pytest.raises(InvalidRequest, match=r"add tokens for its bytes \[98, 100\]"):
        tokenizer.encode("abcd")


def test_decode_joins_bytes_across_tokens_and_leaves_out_the_end() -> None:
    tokenizer = BytesTokenizer([b"\xc3", b"\xa9", b"."], eos_token_id=2)
    assert tokenizer.decode([0, 1, 2]) == "é"
    assert tokenizer.decode([np.int64(1)]) == "\ufffd"
    assert tokenizer.byte_vocab == [b"\xc3", b"\xa9", b"."]
    assert (len(tokenizer), tokenizer.eos_token_id) == (3, 2)


# -- the embedded model's tokenizer ----------------------------------------------------------------
