"""Token ids and their bytes: what each token adds to a text, and the trie of all of them."""

from __future__ import annotations

import json
import operator
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch import Tensor

from genrt.errors import EngineUnsupported, InvalidRequest

__all__ = [
    "ByteTrie",
    "BytesTokenizer",
    "byte_vocab",
    "decode",
    "encode",
    "special_token_ids",
    "str_vocab",
]

_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")

# How many numbers a sum over rows works on at once: what stays in a CPU's caches, and elsewhere what
# keeps launches few (256 MiB of float32).
_CPU_CHUNK = 1 << 21
_DEVICE_CHUNK = 1 << 26


def encode(tokenizer: Any, text: str) -> list[int]:
    """The token ids of a text, with nothing put around it.

    Special tokens that the text spells become their ids, except with BytesTokenizer.

    Raises:
        InvalidRequest: the text has lone surrogates, or a BytesTokenizer cannot spell it.
    """
    if isinstance(tokenizer, BytesTokenizer):
        return tokenizer.encode(text)
    _utf8(text)
    return list(tokenizer.encode(text, add_special_tokens=False))


def decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The text of token ids as the tokenizer has it, special tokens included and spaces left alone.

    The space that a tokenizer puts in front of every text is taken away again, and what is not UTF-8
    becomes U+FFFD; for the exact bytes join those of ``byte_vocab``.
    """
    if isinstance(tokenizer, BytesTokenizer):
        return tokenizer.decode(token_ids)
    text: str = tokenizer.decode(
        list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return text


def byte_vocab(tokenizer: Any, vocab_size: int) -> list[bytes]:
    """The bytes that each of the ids ``0 .. vocab_size - 1`` adds to a text.

    Known are BytesTokenizer and, of transformers' tokenizers, byte-level BPE and SentencePiece-style
    ones, told apart by what the tokenizer says of itself, not by its name. A token may be part of a
    character, and several may have equal bytes. Added tokens are their literal text, and so are
    special ones: a text that spells one encodes to it, though a model does not mean text by it (see
    ``special_token_ids``). An id without a token, as in the rows beyond the tokenizer's end, has
    ``b""``; tokens from ``vocab_size`` on are cut.

    The law, with ``token_ids = tokenizer.encode(text, add_special_tokens=False)``::

        b"".join(byte_vocab[token_id] for token_id in token_ids) == text.encode()

    It holds up to the one space that some tokenizers put in front of a text (some of them also after
    each added token in it): the bytes of the first token include that space. Outside the law are
    texts that a tokenizer changes before it looks at them (NFC, lower case, added tokens that swallow
    the spaces beside them, U+2581 where it stands for a space) or that hold characters it has no
    tokens for.

    Raises:
        EngineUnsupported: a tokenizer of another kind, whose tokens' bytes could only be guessed.
        InvalidRequest: ``vocab_size`` is not a size.
    """
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < 0:
        raise InvalidRequest(f"vocab_size is {vocab_size!r}; give the length of the model's rows")
    if isinstance(tokenizer, BytesTokenizer):
        vocabulary = tokenizer.byte_vocab
    else:
        vocabulary = _transformers_bytes(tokenizer)
    return vocabulary[:vocab_size] + [b""] * (vocab_size - len(vocabulary))


def str_vocab(tokenizer: Any, vocab_size: int) -> list[str]:
    """``byte_vocab`` decoded for reading: bytes that are no whole character become U+FFFD."""
    return [token.decode(errors="replace") for token in byte_vocab(tokenizer, vocab_size)]


def special_token_ids(tokenizer: Any) -> frozenset[int]:
    """The tokens that mark something instead of standing for text: ends, roles, padding, the unknown.

    Constraints keep them out of generated text, all but the end token where a text may end.

    Raises:
        EngineUnsupported: a tokenizer that does not tell them.
    """
    if isinstance(tokenizer, BytesTokenizer):
        return frozenset(() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,))
    try:
        special = {token_id for token_id in tokenizer.all_special_ids if token_id is not None}
        added = tokenizer.added_tokens_decoder
    except AttributeError as error:
        raise _unknown_kind(tokenizer, "it does not tell its special tokens") from error
    special.update(token_id for token_id, token in added.items() if token.special)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        model = json.loads(backend.to_str())["model"]
        unknown = model.get("unk_id")
        if unknown is None and model.get("unk_token") is not None:
            unknown = backend.token_to_id(model["unk_token"])
        if unknown is not None:
            special.add(unknown)
    return frozenset(special)


class BytesTokenizer:
    """The simplest tokenizer: a list of byte strings, where the index is the token id.

    Any bytes may be a token, also pieces of a UTF-8 character, the same bytes twice, or none.
    The end-of-sequence token never stands for text, whatever its bytes are.
    """

    def __init__(self, vocabulary: Sequence[bytes], *, eos_token_id: int | None = None) -> None:
        """Raises InvalidRequest for an entry that is not bytes or an end token out of range."""
        self._vocabulary = _checked_vocabulary(vocabulary)
        self._eos_token_id = None if eos_token_id is None else self._checked(eos_token_id)
        self._ids: dict[bytes, int] = {}
        for token_id, token in enumerate(self._vocabulary):
            if token and token_id != self._eos_token_id:
                self._ids.setdefault(token, token_id)
        self._lengths = sorted({len(token) for token in self._ids}, reverse=True)

    @property
    def byte_vocab(self) -> list[bytes]:
        """The vocabulary as it was given, in a list of the caller's own."""
        return list(self._vocabulary)

    @property
    def eos_token_id(self) -> int | None:
        return self._eos_token_id

    def __len__(self) -> int:
        return len(self._vocabulary)

    def __repr__(self) -> str:
        return f"BytesTokenizer({len(self)} tokens, eos_token_id={self._eos_token_id})"

    def encode(self, text: str) -> list[int]:
        """The longest match, from the left, among those that let the rest of the text be covered.

        Of tokens with equal bytes the one with the smallest id is used; the end token never is.

        Raises:
            InvalidRequest: no sequence of tokens spells the text's UTF-8.
        """
        data = _utf8(text)
        # lengths[i]: how long a token to take at byte i so that the rest can be covered; 0 for none.
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
        """The tokens' bytes joined, where what is not UTF-8 becomes U+FFFD; the end token adds nothing.

        Raises:
            InvalidRequest: a token id is not an integer in ``0 .. len(self) - 1``.
        """
        checked = [self._checked(token_id) for token_id in token_ids]
        return b"".join(
            self._vocabulary[token_id] for token_id in checked if token_id != self._eos_token_id
        ).decode(errors="replace")

    def _checked(self, token_id: SupportsIndex) -> int:
        try:
            index = operator.index(token_id)
        except TypeError as error:
            raise InvalidRequest(f"{token_id!r} is not a token id; give an integer") from error
        if not 0 <= index < len(self._vocabulary):
            raise InvalidRequest(f"token id {index} is not in 0 .. {len(self._vocabulary) - 1}")
        return index


@dataclass(frozen=True, slots=True)
class _Reading:
    """How the pieces of a tokenizer's model, which are strings, spell bytes.

    Either ``byte_level``, one character for one byte, or text in which the ``replacements`` have been
    made and where, with ``byte_fallback``, a piece like ``<0x0A>`` is that byte.
    """

    byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False

    def bytes_of(self, piece: str) -> bytes:
        if self.byte_level:
            try:
                return bytes(map(_BYTE_OF_CHARACTER.__getitem__, piece))
            except KeyError:  # such a piece is never the result of mapping bytes: it is text
                return piece.encode()
        for old, new in self.replacements:
            piece = piece.replace(old, new)
        if self.byte_fallback and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes.fromhex(match[1])
        return piece.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte: Latin-1's own where printable, or from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(printable))
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_level_alphabet()


def _transformers_bytes(tokenizer: Any) -> list[bytes]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    sentencepiece = getattr(tokenizer, "sp_model", None)
    pieces: dict[int, str]
    if backend is not None:
        reading = _backend_reading(tokenizer, json.loads(backend.to_str()))
        own = backend.get_vocab(with_added_tokens=False)
        size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        pieces = {i: piece for i in range(size) if (piece := backend.id_to_token(i)) is not None}
    elif sentencepiece is not None:
        numbers = range(sentencepiece.get_piece_size())
        own = {sentencepiece.id_to_piece(number) for number in numbers}
        reading = _Reading(
            replacements=(("\u2581", " "),),
            byte_fallback=any(sentencepiece.is_byte(number) for number in numbers),
        )
        pieces = {token_id: piece for piece, token_id in tokenizer.get_vocab().items()}
    else:
        raise _unknown_kind(
            tokenizer, "it has neither a tokenizers backend nor a SentencePiece model"
        )
    added = tokenizer.added_tokens_decoder
    vocabulary = [b""] * (1 + max((*pieces, *added), default=-1))
    for token_id, piece in pieces.items():
        vocabulary[token_id] = reading.bytes_of(piece)
    for token_id, token in added.items():
        # Gemma lists runs of spaces, written as its model writes them, as added tokens too: these are the
        # model's pieces, and no text spells their literal content.
        if token.special or reading.byte_level or token.content not in own:
            vocabulary[token_id] = token.content.encode()
    _check_law(tokenizer, vocabulary)
    return vocabulary


def _backend_reading(tokenizer: Any, specification: dict[str, Any]) -> _Reading:
    """From the JSON form of a tokenizer of the ``tokenizers`` library."""
    model = specification["model"]
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise _unknown_kind(tokenizer, f"its {model['type']} model marks the pieces within a word")
    before = _flat(specification["normalizer"]) + _flat(specification["pre_tokenizer"])
    decoders = _flat(specification["decoder"])
    if not decoders:
        decoders = [step for step in before if step["type"] in ("ByteLevel", "Metaspace")]
    names = [step["type"] for step in decoders]
    if "ByteLevel" in names or any(step["type"] == "ByteLevel" for step in before):
        if set(names) - {"Fuse"} != {"ByteLevel"}:
            raise _unknown_kind(
                tokenizer, f"it encodes bytes as characters, but decodes by {names}"
            )
        if not any(step["type"] == "ByteLevel" for step in before):
            raise _unknown_kind(tokenizer, "it decodes characters to bytes, but does not encode so")
        return _Reading(byte_level=True)
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
                pass  # takes the space before a whole text away again; no token's bytes change
            case _:
                raise _unknown_kind(tokenizer, f"its decoder has the step {step['type']}")
    if not decoders:
        raise _unknown_kind(tokenizer, "it has no decoder")
    fallback = bool(model.get("byte_fallback")) or "ByteFallback" in names
    return _Reading(replacements=tuple(replacements), byte_fallback=fallback)


def _flat(component: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a component of a tokenizer, in order, those of sequences spread out."""
    if component is None:
        return []
    if component["type"] != "Sequence":
        return [component]
    sequences = (value for value in component.values() if isinstance(value, list))
    return [flat for steps in sequences for step in steps for flat in _flat(step)]


def _check_law(tokenizer: Any, vocabulary: list[bytes]) -> None:
    """Refuse a tokenizer that breaks ``byte_vocab``'s law on a text that no normalizer changes."""
    text = b"a b"
    if not {b"a", b" ", b"b"} <= set(vocabulary):
        return
    token_ids = tokenizer.encode(text.decode(), add_special_tokens=False)
    joined = b"".join(vocabulary[token_id] for token_id in token_ids)
    if joined.removeprefix(b" ") != text:
        raise _unknown_kind(tokenizer, f"its tokens for {text!r} seem to spell {joined!r}")


def _unknown_kind(tokenizer: Any, reason: str) -> EngineUnsupported:
    return EngineUnsupported(
        f"the bytes of {type(tokenizer).__name__}'s tokens are not known: {reason}. Use a model with a "
        "byte-level BPE or SentencePiece-style tokenizer of transformers, or a BytesTokenizer"
    )


class ByteTrie:
    """The trie of the bytes of all tokens, which sums a row over the tokens that share a prefix.

    Node 0 is the root. Nodes are numbered in the lexicographic order of their prefixes, so a node's
    descendants are the numbers that follow it. Tokens with equal bytes share a node; a token without
    bytes has none: give ``b""`` to those that are not text, and no sum counts them.

    Reading it is safe from any thread.
    """

    def __init__(self, vocabulary: Sequence[bytes], *, device: torch.device | str = "cpu") -> None:
        """The trie for rows on ``device``; the first rows on another one copy the sums' index there.

        Raises:
            InvalidRequest: an entry is not bytes.
        """
        tokens = _checked_vocabulary(vocabulary)
        self._vocab_size = len(tokens)
        self._token_ids = sorted((i for i, t in enumerate(tokens) if t), key=tokens.__getitem__)
        self._tokens = [tokens[token_id] for token_id in self._token_ids]
        # Of each node: its depth, where its tokens begin and end in self._tokens, and the first node
        # after its descendants. Of each token: its node.
        self._depths, self._starts, self._stops, self._ends = [0], [0], [0], [0]
        self._token_nodes: list[int] = []
        path = [0]
        previous = b""
        for index, token in enumerate(self._tokens):
            shared = _shared_length(previous, token)
            self._close(path[shared + 1 :], index)
            del path[shared + 1 :]
            for depth in range(shared + 1, len(token) + 1):
                path.append(len(self._depths))
                self._depths.append(depth)
                self._starts.append(index)
                self._stops.append(0)
                self._ends.append(0)
            self._token_nodes.append(path[-1])
            previous = token
        self._close(path, len(self._tokens))

        nodes = np.full(self._vocab_size, -1, dtype=np.int64)
        nodes[self._token_ids] = self._token_nodes
        self.token_node: Tensor = torch.from_numpy(nodes).to(device)
        """``[vocab_size]``, int64: each token's node, -1 for one without bytes. Do not write to it."""
        sums = _RangeSums.of(self._token_ids, self._starts, self._stops)
        self._sums = {self.token_node.device: sums.to(self.token_node.device)}

    def _close(self, nodes: Sequence[int], stop: int) -> None:
        for node in nodes:
            self._stops[node] = stop
            self._ends[node] = len(self._depths)

    @property
    def num_nodes(self) -> int:
        return len(self._depths)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def __repr__(self) -> str:
        return f"ByteTrie({self.vocab_size} tokens, {self.num_nodes} nodes)"

    def node(self, prefix: bytes) -> int | None:
        """The node of a prefix; ``None`` if no token begins with it."""
        if not prefix:
            return 0
        first = bisect_left(self._tokens, prefix)
        if first == len(self._tokens) or not self._tokens[first].startswith(prefix):
            return None
        # The first token with this prefix made its node, and those from there to its own in a row.
        return self._token_nodes[first] - (len(self._tokens[first]) - len(prefix))

    def prefix(self, node: int) -> bytes:
        """The bytes on the way from the root. Raises InvalidRequest for a number that is no node."""
        node = self._checked(node)
        return self._tokens[self._starts[node]][: self._depths[node]] if node else b""

    def children(self, node: int) -> dict[int, int]:
        """The next byte -> the node it leads to, in the order of the bytes. Raises as ``prefix`` does."""
        node = self._checked(node)
        children = {}
        child = node + 1
        while child < self._ends[node]:
            children[self._tokens[self._starts[child]][self._depths[node]]] = child
            child = self._ends[child]
        return children

    def tokens(self, node: int) -> tuple[int, ...]:
        """The ids of the tokens whose bytes are the node's prefix, rising. Raises as ``prefix`` does."""
        prefix = self.prefix(node)
        start = self._starts[node]
        return tuple(self._token_ids[start : bisect_right(self._tokens, prefix, lo=start)])

    def mass(self, rows: Tensor) -> Tensor:
        """The total probability of the tokens that begin with each node's prefix.

        Each is a sum of the tokens' probabilities in pairs of pairs, never a difference, so that its
        relative error stays within a few dozen roundings down to the smallest normal number (1e-38 in
        float32); below that, use ``log_mass``. A row's result does not depend on the rows beside it,
        nor on chance. Gradients do not flow.

        Args:
            rows: log-probabilities ``[vocab_size]`` or ``[n, vocab_size]``, normalised or not, on any
                device; half precision is computed and returned as float32.

        Returns:
            ``[num_nodes]`` or ``[n, num_nodes]`` on the rows' device.

        Raises:
            InvalidRequest: rows of another shape or of integers.
        """
        return self._summed(rows, torch.exp, torch.add, 0.0)

    def log_mass(self, rows: Tensor) -> Tensor:
        """The logarithm of ``mass``, right also where that is too small for its type; -inf for 0."""
        return self._summed(rows, torch.clone, torch.logaddexp, -torch.inf)

    def _checked(self, node: int) -> int:
        if not 0 <= node < self.num_nodes:
            raise InvalidRequest(f"{node} is not a node; they are 0 .. {self.num_nodes - 1}")
        return node

    def _summed(
        self,
        rows: Tensor,
        leaf: Callable[[Tensor], Tensor],
        add: Callable[..., Tensor],
        zero: float,
    ) -> Tensor:
        if rows.dim() not in (1, 2) or rows.shape[-1] != self._vocab_size:
            raise InvalidRequest(
                f"rows have the shape {list(rows.shape)}; give [{self._vocab_size}] or "
                f"[n, {self._vocab_size}] log-probabilities"
            )
        if not rows.is_floating_point():
            raise InvalidRequest(f"rows are {rows.dtype}; give log-probabilities")
        sums = self._sums.get(rows.device)
        if sums is None:
            sums = self._sums[rows.device] = self._sums[self.token_node.device].to(rows.device)
        many = torch.atleast_2d(rows.detach()).to(torch.promote_types(rows.dtype, torch.float32))
        result = many.new_empty(many.shape[0], self.num_nodes)
        numbers = _CPU_CHUNK if rows.device.type == "cpu" else _DEVICE_CHUNK
        chunk = max(1, numbers // (sums.width + self.num_nodes))
        for start in range(0, many.shape[0], chunk):
            part = slice(start, start + chunk)
            sums.sum(many[part], leaf, add, zero, out=result[part])
        return result if rows.dim() == 2 else result[0]


@dataclass(frozen=True, slots=True)
class _RangeSums:
    """Sums of many ranges of columns at once, in about ``2 log2(columns)`` vectorised additions.

    A segment tree: level 0 are the columns, in the given order, and each further level adds the pairs
    of the one below. A range is the union of at most two tree nodes a level. The levels lie side by
    side, followed by a zero. ``rounds[k]`` holds each range's k-th tree node, ranges with most of them
    first, so that later rounds concern a shrinking front part; equal ranges are summed once.
    """

    columns: Tensor  # which column of a row is where at level 0
    levels: tuple[tuple[int, int], ...]  # where each level begins and how many tree nodes it has
    width: int
    rounds: tuple[Tensor, ...]
    ranges: Tensor  # for each asked range, its place in the rounds' order

    @staticmethod
    def of(columns: Sequence[int], starts: Sequence[int], stops: Sequence[int]) -> _RangeSums:
        """Of ranges ``starts[i] .. stops[i] - 1`` of places in ``columns``."""
        sizes = [len(columns)]
        while sizes[-1] > 1:
            sizes.append((sizes[-1] + 1) // 2)
        # One zero after a level of odd size completes its last pair.
        begins = [0, *np.cumsum([size + size % 2 for size in sizes]).tolist()]
        zero = begins.pop()
        asked, ranges = np.unique(np.array([starts, stops]), axis=1, return_inverse=True)
        left, right = asked[0].copy(), asked[1].copy()
        owners, nodes = [], []
        for begin in begins:
            odd = np.flatnonzero((left < right) & (left % 2 == 1))
            owners.append(odd)
            nodes.append(begin + left[odd])
            left[odd] += 1
            odd = np.flatnonzero((left < right) & (right % 2 == 1))
            right[odd] -= 1
            owners.append(odd)
            nodes.append(begin + right[odd])
            left //= 2
            right //= 2
        owner, node = np.concatenate(owners), np.concatenate(nodes)
        by_owner = np.argsort(owner, kind="stable")
        owner, node = owner[by_owner], node[by_owner]
        counts = np.bincount(owner, minlength=asked.shape[1])
        turn = np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]
        most_first = np.argsort(-counts, kind="stable")
        place = np.empty_like(most_first)
        place[most_first] = np.arange(len(place))
        rounds = []
        for number in range(max(1, int(counts.max()))):
            of_range = np.full(int(np.sum(counts > number)) if number else len(place), zero)
            now = turn == number
            of_range[place[owner[now]]] = node[now]
            rounds.append(torch.from_numpy(of_range))
        return _RangeSums(
            columns=torch.tensor(columns, dtype=torch.int64),
            levels=tuple(zip(begins, sizes, strict=True)),
            width=zero + 1,
            rounds=tuple(rounds),
            ranges=torch.from_numpy(place[ranges.reshape(-1)]),
        )

    def to(self, device: torch.device) -> _RangeSums:
        return _RangeSums(
            columns=self.columns.to(device),
            levels=self.levels,
            width=self.width,
            rounds=tuple(nodes.to(device) for nodes in self.rounds),
            ranges=self.ranges.to(device),
        )

    def sum(
        self,
        rows: Tensor,
        leaf: Callable[[Tensor], Tensor],
        add: Callable[..., Tensor],
        zero: float,
        *,
        out: Tensor,
    ) -> None:
        """Fills ``out [n, ranges]``: ``add``-sums of ``leaf(rows)``, neutral element ``zero``."""
        tree = rows.new_full((rows.shape[0], self.width), zero)
        tree[:, : len(self.columns)] = leaf(rows.index_select(1, self.columns))
        for (begin, _), (above, half) in pairwise(self.levels):
            pairs = tree[:, begin : begin + 2 * half]
            add(pairs[:, 0::2], pairs[:, 1::2], out=tree[:, above : above + half])
        totals = tree.index_select(1, self.rounds[0])
        for nodes in self.rounds[1:]:
            front = totals[:, : len(nodes)]
            add(front, tree.index_select(1, nodes), out=front)
        torch.index_select(totals, 1, self.ranges, out=out)


def _shared_length(a: bytes, b: bytes) -> int:
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text has no UTF-8 form ({error}); remove its lone surrogates"
        ) from error


def _checked_vocabulary(vocabulary: Sequence[bytes]) -> tuple[bytes, ...]:
    tokens = tuple(vocabulary)
    for token_id, token in enumerate(tokens):
        if not isinstance(token, bytes):
            raise InvalidRequest(f"vocabulary[{token_id}] is {token!r}; give every token as bytes")
    return tokens
