"""Maps token ids to bytes: the bytes that each token adds to a text."""

from __future__ import annotations

import json
import operator
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, SupportsIndex

from genrt.errors import EngineUnsupported, InvalidRequest
from genrt.numbers import check_int

_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")


def byte_vocab(tokenizer: Any, vocab_size: int) -> list[bytes]:
    """Return the bytes that each of the ids ``0 .. vocab_size - 1`` adds to a text.

    It supports BytesTokenizer, and transformers' byte-level BPE and SentencePiece-style tokenizers, which
    it recognizes by their own description. A token may be part of a character, and several tokens may
    have equal bytes. Added and special tokens have their literal text (see ``special_token_ids``). An id
    without a token has ``b""``. Tokens from ``vocab_size`` on are cut.

    The rule, with ``token_ids = tokenizer.encode(text, add_special_tokens=False)``::

        b"".join(byte_vocab[token_id] for token_id in token_ids) == text.encode()

    It holds up to the one space that some tokenizers put in front of a text, as part of the first token,
    and after added tokens. The rule excludes texts with characters that the tokenizer has no tokens for,
    and texts that it changes first (NFC, lower case, spaces beside added tokens, U+2581 where it stands
    for a space).

    Every token is compared with the text that the tokenizer decodes it to. A RuntimeWarning names tokens
    that remain in doubt.

    Raises:
        EngineUnsupported: another kind of tokenizer, with tokens whose bytes could only be guessed.
        InvalidRequest: ``vocab_size`` is not a size.
    """
    vocab_size = check_int("vocab_size", vocab_size, 0)
    vocabulary = all_tokens(tokenizer)
    return vocabulary[:vocab_size] + [b""] * (vocab_size - len(vocabulary))


def all_tokens(tokenizer: Any) -> list[bytes]:
    """Return ``byte_vocab`` up to the largest id that the tokenizer has, which may be more or fewer
    tokens than a model's rows have. Raises EngineUnsupported as ``byte_vocab``."""
    if isinstance(tokenizer, BytesTokenizer):
        return tokenizer.byte_vocab
    return _transformers_bytes(tokenizer)


def str_vocab(tokenizer: Any, vocab_size: int) -> list[str]:
    """Return ``byte_vocab`` decoded for display: incomplete characters become U+FFFD."""
    return [token.decode(errors="replace") for token in byte_vocab(tokenizer, vocab_size)]


def special_token_ids(tokenizer: Any) -> frozenset[int]:
    """Return the tokens that are not text: ends, roles, padding, the unknown token. Constraints keep
    them out of generated text, except the end token where a text may end. Raises EngineUnsupported if
    the tokenizer does not list its special tokens."""
    if isinstance(tokenizer, BytesTokenizer):
        return frozenset(() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,))
    try:
        special = {token_id for token_id in tokenizer.all_special_ids if token_id is not None}
        added = tokenizer.added_tokens_decoder
    except AttributeError as error:
        raise _unknown_kind(tokenizer, "it does not tell its special tokens") from error
    special.update(token_id for token_id, token in added.items() if token.special)
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None:
        specification = _specification(fast)
        model = specification["model"]
        unknown = model.get("unk_id")
        if unknown is None and model.get("unk_token") is not None:
            unknown = fast.token_to_id(model["unk_token"])
        if unknown is not None:
            special.add(unknown)
        if _falls_back_to_bytes(specification):  # trainers mark byte tokens as special
            special -= {i for i, token in added.items() if _BYTE_PIECE.fullmatch(token.content)}
    return frozenset(special)


class BytesTokenizer:
    """The simplest tokenizer: a list of byte strings indexed by token id.

    Any bytes may be a token: parts of a UTF-8 character, repeated bytes, and no bytes at all. The end
    token never stands for text.
    """

    def __init__(self, vocabulary: Sequence[bytes], *, eos_token_id: int | None = None) -> None:
        """Raise InvalidRequest for an entry that is not bytes or an end token out of range."""
        self._vocabulary = checked_vocabulary(vocabulary)
        self._eos_token_id = (
            None if eos_token_id is None else checked_token_id(eos_token_id, len(self))
        )
        self._ids: dict[bytes, int] = {}
        for token_id, token in enumerate(self._vocabulary):
            if token and token_id != self._eos_token_id:
                self._ids.setdefault(token, token_id)
        self._lengths = sorted({len(token) for token in self._ids}, reverse=True)

    @property
    def byte_vocab(self) -> list[bytes]:
        """A copy of the vocabulary."""
        return list(self._vocabulary)

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, if there is one."""
        return self._eos_token_id

    def __len__(self) -> int:
        return len(self._vocabulary)

    def __repr__(self) -> str:
        return f"BytesTokenizer({len(self)} tokens, eos_token_id={self._eos_token_id})"

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text by longest match from the left that leaves a rest which
        tokens can cover. Of tokens with equal bytes, the smallest id is used. Raises
        InvalidRequest if no sequence of tokens spells the text's UTF-8."""
        data = checked_utf8(text)
        # lengths[i]: the token length to take at byte i so that tokens can cover the rest; 0: impossible.
        lengths = [0] * len(data) + [1]
        for start in range(len(data) - 1, -1, -1):
            for length in self._lengths:
                end = start + length
                if end <= len(data) and lengths[end] and data[start:end] in self._ids:
                    lengths[start] = length
                    break
        if not lengths[0]:
            missing = sorted(byte for byte in set(data) if bytes([byte]) not in self._ids)
            raise InvalidRequest(
                f"the vocabulary cannot spell the text; add tokens for its bytes {missing}"
            )
        token_ids = []
        start = 0
        while start < len(data):
            end = start + lengths[start]
            token_ids.append(self._ids[data[start:end]])
            start = end
        return token_ids

    def decode(self, token_ids: Iterable[SupportsIndex]) -> str:
        """Join the tokens' bytes, with U+FFFD for invalid UTF-8; the end token adds no text.
        Raises InvalidRequest if a token id is not an integer in ``0 .. len(self) - 1``."""
        checked = [checked_token_id(token_id, len(self)) for token_id in token_ids]
        return b"".join(
            self._vocabulary[token_id] for token_id in checked if token_id != self._eos_token_id
        ).decode(errors="replace")


@dataclass(frozen=True, slots=True)
class _PieceReading:
    """How the pieces of a tokenizer's model, which are strings, spell bytes: with ``byte_level``, one
    character stands for one byte; with ``byte_fallback``, ``<0x0A>`` stands for a byte."""

    byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False

    def bytes_of(self, piece: str) -> bytes:
        if self.byte_level:
            try:
                return bytes(map(_BYTE_OF_CHARACTER.__getitem__, piece))
            except KeyError:  # a character outside the byte alphabet: the piece is text
                return piece.encode()
        for old, new in self.replacements:
            piece = piece.replace(old, new)
        if self.byte_fallback and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes.fromhex(match[1])
        return piece.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each of GPT-2's printable characters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(printable))
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_level_alphabet()


def _transformers_bytes(tokenizer: Any) -> list[bytes]:
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        raise _unknown_kind(tokenizer, "it has no tokenizers backend")
    reading = _fast_piece_reading(tokenizer, _specification(fast))
    own = fast.get_vocab(with_added_tokens=False)
    added = tokenizer.added_tokens_decoder
    size = 1 + max((*fast.get_vocab(with_added_tokens=True).values(), *added), default=-1)
    pieces = map(fast.id_to_token, range(size))
    vocabulary = [b"" if piece is None else reading.bytes_of(piece) for piece in pieces]
    for token_id, token in added.items():
        # Gemma lists runs of spaces, in its model's spelling, as added tokens too. They are the model's
        # pieces, and no text spells their literal content. Other tokenizers list byte pieces this way.
        is_byte = reading.byte_fallback and _BYTE_PIECE.fullmatch(token.content)
        is_literal = token.special or reading.byte_level or token.content not in own
        vocabulary[token_id] = (
            token.content.encode()
            if is_literal and not is_byte
            else reading.bytes_of(token.content)
        )
    _check_concatenation(tokenizer, vocabulary)
    _reconcile(tokenizer, vocabulary)
    return vocabulary


def _specification(fast: Any) -> dict[str, Any]:
    """Return the JSON form of a tokenizer of the ``tokenizers`` library: the steps of each component, and
    the model without its vocabulary, which is slow to serialize."""
    specification: dict[str, Any] = {}
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        component = getattr(fast, name)
        specification[name] = _flat_steps(json.loads(component.__getstate__())) if component else []
    model = fast.model
    if type(model).__name__ == "BPE":
        names = ("unk_token", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix")
        specification["model"] = {"type": "BPE", **{name: getattr(model, name) for name in names}}
    else:
        specification["model"] = json.loads(model.__getstate__())
    return specification


def _fast_piece_reading(tokenizer: Any, specification: dict[str, Any]) -> _PieceReading:
    """Return the ``_PieceReading`` of a tokenizer of the ``tokenizers`` library."""
    model = specification["model"]
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise _unknown_kind(tokenizer, f"its {model['type']} model marks the pieces within a word")
    before = specification["normalizer"] + specification["pre_tokenizer"]
    decoders = specification["decoder"]
    if not decoders:
        decoders = [step for step in before if step["type"] in ("ByteLevel", "Metaspace")]
    names = [step["type"] for step in decoders]
    encodes_bytes = any(step["type"] == "ByteLevel" for step in before)
    if encodes_bytes or "ByteLevel" in names:
        if set(names) - {"Fuse"} != {"ByteLevel"}:
            raise _unknown_kind(
                tokenizer, f"it encodes bytes as characters, but decodes by {names}"
            )
        if not encodes_bytes:
            raise _unknown_kind(tokenizer, "it decodes characters to bytes, but does not encode so")
        return _PieceReading(byte_level=True)
    replacements = []
    for index, step in enumerate(decoders):
        match step:
            case {"type": "Metaspace", "replacement": str(old)}:
                replacements.append((old, " "))
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replacements.append((old, new))
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case {"type": "Strip"} if "Fuse" in names[:index]:
                pass  # it strips the space before a whole text; no token's bytes change
            case _:
                raise _unknown_kind(tokenizer, f"its decoder has the step {step['type']}")
    if not decoders:
        raise _unknown_kind(tokenizer, "it has no decoder")
    fallback = _falls_back_to_bytes(specification)
    return _PieceReading(replacements=tuple(replacements), byte_fallback=fallback)


def _falls_back_to_bytes(specification: dict[str, Any]) -> bool:
    """Return whether pieces like ``<0x0A>`` stand for bytes."""
    names = [step["type"] for step in specification["decoder"]]
    return "ByteFallback" in names or (
        bool(specification["model"].get("byte_fallback")) and "ByteLevel" not in names
    )


def _flat_steps(component: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the steps of a tokenizer's component in order, with sequences flattened."""
    if component["type"] != "Sequence":
        return [component]
    sequences = (value for value in component.values() if isinstance(value, list))
    return [flat for steps in sequences for step in steps for flat in _flat_steps(step)]


def _check_concatenation(tokenizer: Any, vocabulary: list[bytes]) -> None:
    """Refuse a tokenizer that breaks ``byte_vocab``'s rule on a text that normalizers do not change."""
    text = b"a b"
    if not {b"a", b" ", b"b"} <= set(vocabulary):
        return
    token_ids = tokenizer.encode(text.decode(), add_special_tokens=False)
    joined = b"".join(vocabulary[token_id] for token_id in token_ids)
    if joined.removeprefix(b" ") != text:
        raise _unknown_kind(tokenizer, f"its tokens for {text!r} seem to spell {joined!r}")


def _reconcile(tokenizer: Any, vocabulary: list[bytes]) -> None:
    """Compare each token's bytes with the text that the tokenizer decodes it to, between two letters.
    Where they differ, use the reading that encodes to the token, or warn. Raises EngineUnsupported if
    so many differ that the tokenizer must be of another kind."""
    doubtful = _contradicted(tokenizer, vocabulary)
    if 10 * len(doubtful) > len(vocabulary):
        token_id, decoded = next(iter(doubtful.items()))
        reason = (
            f"its token {token_id} seems to be {vocabulary[token_id]!r}, and decodes to {decoded!r}"
        )
        raise _unknown_kind(tokenizer, reason)
    for token_id, decoded in list(doubtful.items()):
        for text in (decoded, vocabulary[token_id].decode(errors="replace")):
            spelled = (text, f"a{text}a") if text and "\ufffd" not in text else ()
            if any(
                token_id in tokenizer.encode(each, add_special_tokens=False) for each in spelled
            ):
                vocabulary[token_id] = text.encode()
                del doubtful[token_id]
                break
    if doubtful:
        named = [
            f"token {token_id} is {vocabulary[token_id]!r} here and decodes to {decoded!r}"
            for token_id, decoded in list(doubtful.items())[:5]
        ]
        warnings.warn(
            f"the bytes of some tokens ({len(doubtful)}) are in doubt, and so are constraints and texts "
            f"that hold them: {', '.join(named)}{', …' if len(doubtful) > 5 else ''}. Rows are right",
            RuntimeWarning,
            stacklevel=2,
        )


def _contradicted(tokenizer: Any, vocabulary: list[bytes]) -> dict[int, str]:
    """Return the tokens that the tokenizer decodes to other characters, with these characters. Runs of
    U+FFFD compare equal, because decoders emit one or several for incomplete characters."""
    fast = tokenizer.backend_tokenizer
    if fast.decoder is None:
        return {}
    spell = partial(fast.decode, skip_special_tokens=False)  # decode_batch would start threads
    known = ((letter, fast.token_to_id(letter)) for letter in "aeionrst")
    anchors = [(x, i) for x, i in known if i is not None and spell([i, i]) == 2 * x]
    if not anchors:
        return {}
    (letter, anchor), broken = anchors[0], re.compile("\ufffd+")
    contradicted = {}
    for token_id, token in enumerate(vocabulary):
        wanted = f"{letter}{token.decode(errors='replace')}{letter}"
        decoded = spell([anchor, token_id, anchor]) if token else wanted
        if decoded != wanted and broken.sub("?", decoded) != broken.sub("?", wanted):
            contradicted[token_id] = decoded.removeprefix(letter).removesuffix(letter)
    return contradicted


def _unknown_kind(tokenizer: Any, reason: str) -> EngineUnsupported:
    return EngineUnsupported(
        f"the bytes of {type(tokenizer).__name__}'s tokens are not known: {reason}. Use a model with a "
        "byte-level BPE or SentencePiece-style tokenizer of transformers, or a BytesTokenizer"
    )


def checked_token_id(token_id: SupportsIndex, vocab_size: int) -> int:
    """Return the id as an int. Raises InvalidRequest if it is not an integer or is out of range."""
    try:
        index = operator.index(token_id)
    except TypeError as error:
        raise InvalidRequest(f"{token_id!r} is not a token id: give an integer") from error
    if not 0 <= index < vocab_size:
        raise InvalidRequest(f"token id {index} is not in 0 .. {vocab_size - 1}")
    return index


def checked_utf8(text: str) -> bytes:
    """Return the text in UTF-8. Raises InvalidRequest for lone surrogates."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text has no UTF-8 form ({error}); remove its lone surrogates"
        ) from error


def checked_vocabulary(vocabulary: Sequence[bytes]) -> tuple[bytes, ...]:
    """Return the tokens as a tuple. Raises InvalidRequest if an entry is not bytes."""
    tokens = tuple(vocabulary)
    for token_id, token in enumerate(tokens):
        if not isinstance(token, bytes):
            raise InvalidRequest(f"vocabulary[{token_id}] is {token!r}; give every token as bytes")
    return tokens
