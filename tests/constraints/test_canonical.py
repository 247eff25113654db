"""Canonical texts, against tokenizers themselves: drawn ones by every sequence, and the embedded one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import genrt
from genrt.constraints import all_of, canonical, regex
from genrt.constraints.canonical import LLAMA
from genrt.engines.exact import NGram
from genrt.errors import InvalidConstraint, InvalidRequest
from genrt.inference import SMC, TextModel
from genrt.lm import AsyncLM
from genrt.models import resolve
from genrt.testing import exact_posterior
from genrt.tokens.vocabulary import byte_vocab
from tests.vocabularies import EOS, Sequences, led_to, sequences, spelt


def byte_level(use_regex: bool = True) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


SPLITS: list[Callable[[], Any]] = [
    byte_level,
    lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte_level()]),
    lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(LLAMA), "isolated"), byte_level(False)]
    ),
    lambda: byte_level(False),
]


class Lm:
    """The part of a runtime that constraints read, over a tokenizer of transformers."""

    def __init__(self, backend: Tokenizer, eos_token: str = "<e>") -> None:
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos_token)
        self.vocab_size = len(self.tokenizer)
        self.byte_vocab = byte_vocab(self.tokenizer, self.vocab_size)


def backend_of(
    alphabet: bytes, merges: Sequence[tuple[bytes, bytes]], added: Sequence[str] = ()
) -> Tokenizer:
    """A byte-level BPE whose token 0 is the end token, without a split into words."""
    shown = {
        data: byte_level(False).pre_tokenize_str(chr(data))[0][0] for data in alphabet if data < 128
    }
    shown |= dict(zip("é".encode(), byte_level(False).pre_tokenize_str("é")[0][0], strict=True))
    pairs = [tuple("".join(shown[byte] for byte in part) for part in pair) for pair in merges]
    pieces = dict.fromkeys(["<e>", *(shown[byte] for byte in alphabet), *map("".join, pairs)])
    vocab = {piece: token for token, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab, cast("Any", pairs)))
    backend.pre_tokenizer, backend.decoder = byte_level(False), decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<e>", special=True, normalized=False)])
    backend.add_tokens([AddedToken(each, special=False, normalized=False) for each in added])
    return backend


def drawn(seed: int) -> AsyncLM:
    rng = random.Random(seed)
    alphabet = "é".encode() + bytes(rng.sample(b"asrel'! \n\t1", rng.choice([3, 4, 5])))
    pieces = [bytes([byte]) for byte in alphabet]
    merges: list[tuple[bytes, bytes]] = []
    for _ in range(rng.randint(2, 8)):
        pair = rng.choice(pieces), rng.choice(pieces)
        whole = b"".join(pair)
        if pair not in merges and len(whole) <= 4:
            merges.append(pair)
            pieces += [] if whole in pieces else [whole]
    added = ["1!"] if b"1" in pieces and seed % 2 else []
    backend = backend_of(alphabet, merges, added)
    backend.pre_tokenizer = SPLITS[seed % len(SPLITS)]()
    return cast(AsyncLM, Lm(backend))


def is_canonical(lm: AsyncLM, token_ids: Sequence[int]) -> bool:
    try:
        text = spelt(lm, token_ids).decode()
    except UnicodeDecodeError:
        return False
    return bool(lm.tokenizer.encode(text, add_special_tokens=False) == [*token_ids])


@pytest.mark.parametrize("seed", range(24))
def test_masks_lead_to_the_sequences_that_the_tokenizer_makes_and_to_no_others(seed: int) -> None:
    lm = drawn(seed)
    longest = 4 if lm.vocab_size < 10 else 3
    wanted = {token_ids for token_ids in sequences(lm, longest) if is_canonical(lm, token_ids)}
    prefixes, whole = asyncio.run(led_to(canonical(lm), longest))
    assert whole == wanted
    assert prefixes >= {ids[:length] for ids in wanted for length in range(len(ids) + 1)}


@pytest.mark.parametrize("split", SPLITS)
def test_words_that_end_after_an_apostrophe_are_decided_late(split: Callable[[], Any]) -> None:
    backend = backend_of("'lé".encode(), [(b"l", "é".encode()[:1])])
    backend.pre_tokenizer = split()
    lm = cast(AsyncLM, Lm(backend))
    wanted = {token_ids for token_ids in sequences(lm, 5) if is_canonical(lm, token_ids)}
    assert asyncio.run(led_to(canonical(lm), 5))[1] == wanted


@pytest.mark.parametrize("seed", range(4))
def test_after_a_prompt_the_tokens_of_both_are_canonical(seed: int) -> None:
    lm = drawn(seed)
    for prompt in sequences(lm, 2):
        wanted: Sequences = {ids for ids in sequences(lm, 2) if is_canonical(lm, (*prompt, *ids))}
        try:
            _, whole = asyncio.run(led_to(canonical(lm, prompt), 2))
        except InvalidConstraint:
            assert not wanted
        else:
            assert whole == wanted


WORDS = [
    "the",
    " of",
    "'re",
    "'ll",
    "DON'T",
    "  ",
    "\n\n",
    "100",
    "<|im_end|>",
    " world",
    "http://",
]
WORDS += [
    *"aest lmrvd'''  \n\t\r1239!?.,-—“éñ字日本語😀\u00a0\u2009\u0301\u017fK½²ⅷ٣\u200bAIHSTLM<|>_"
]


@pytest.mark.embedded
def test_the_embedded_tokenizer_agrees_on_drawn_strings_and_sequences() -> None:
    backend = Tokenizer.from_file(f"{resolve(None)}/tokenizer.json")
    lm = cast(AsyncLM, Lm(backend, eos_token="<|im_end|>"))
    constraint, rng, said = canonical(lm), random.Random(1), {True: 0, False: 0}
    for _ in range(400):
        text = "".join(rng.choices(WORDS, k=rng.randint(1, 12)))
        cut = rng.randint(0, len(text))
        plain, *halves = (lm.tokenizer.encode(part) for part in (text, text[:cut], text[cut:]))
        for token_ids in (plain, [*halves[0], *halves[1]]):
            if any(token < 17 for token in token_ids):  # special tokens are no text
                continue
            state, follows = constraint.start(), True
            for token in token_ids:
                follows = bool(state.mask()[token])
                if not follows:
                    break
                state = state.advance(token)
            wanted = is_canonical(lm, token_ids)
            assert (follows and state.accepting) == wanted, (text, token_ids)
            said[wanted] += 1
    assert min(said.values()) > 30


LETTERS = backend_of(b"ab ", [(b"a", b"b"), (b" ", b"a"), (b"a", b"a"), (b" ", b"ab")])


async def test_texts_under_it_have_the_law_of_their_canonical_tokens() -> None:
    over = cast(AsyncLM, Lm(LETTERS))
    model = NGram.random(over.byte_vocab, seed=1, eos_token_id=EOS)
    constraint = all_of(canonical(over), regex("[ab ]{1,3}", over))
    exact = exact_posterior(model, [], max_tokens=4, constraint=constraint)
    free = exact_posterior(model, [], max_tokens=4, constraint=regex("[ab ]{1,3}", over))
    wanted = {ids: p for ids, p in free.token_ids.items() if is_canonical(over, ids)}
    assert 1 < len(wanted) < len(free.token_ids)
    assert len(exact.texts) == len(exact.token_ids)
    total = sum(wanted.values())
    assert exact.token_ids == pytest.approx({ids: p / total for ids, p in wanted.items()})
    async with genrt.load(model, engine="exact") as lm:
        particles = TextModel(lm, [1], max_tokens=4, constraint=constraint)
        result = await SMC(particles, num_particles=2000).run(seed=0)
    exact = exact_posterior(model, [1], max_tokens=4, constraint=constraint)
    found = {text.encode(): p for text, p in result.posterior()}
    assert found.keys() <= exact.texts.keys()
    assert all(abs(found.get(data, 0.0) - p) < 0.05 for data, p in exact.texts.items())


def changed(**parts: Any) -> Lm:
    backend = backend_of(b"ab ", [(b"a", b"b")])
    for name, part in parts.items():
        setattr(backend, name, part)
    return Lm(backend)


@pytest.mark.parametrize(
    ("lm", "reason"),
    [
        (changed(normalizer=normalizers.NFC()), "changes texts first, by NFC"),
        (
            changed(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
            "add_prefix_space",
        ),
        (
            changed(
                pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), byte_level()])
            ),
            "Punctuation",
        ),
        (Lm(backend_of(b"ab ", [], ["ab", "ba"])), "overlaps with others"),
    ],
)
def test_tokenizers_of_other_kinds_are_refused_by_name(lm: Any, reason: str) -> None:
    with pytest.raises(InvalidConstraint, match=reason):
        canonical(lm)


def test_a_runtime_without_such_a_tokenizer_is_refused() -> None:
    model = NGram.random([b"a", b""], eos_token_id=1)
    with (
        genrt.load(model, engine="exact") as lm,
        pytest.raises(InvalidConstraint, match="no tokenizers backend"),
    ):
        canonical(lm)


def test_a_prompt_of_other_tokens_and_tokens_outside_the_mask_are_refused() -> None:
    lm = cast(AsyncLM, Lm(LETTERS))
    with pytest.raises(InvalidConstraint, match="from place 1 on"):
        canonical(lm, [1, 2])
    with pytest.raises(InvalidRequest, match="give a str, or token ids"):
        canonical(lm, cast(Any, 5))
    with pytest.raises(InvalidRequest, match="may not follow"):
        canonical(lm, [1]).start().advance(2)
