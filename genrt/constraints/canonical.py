"""The constraint of canonical texts: the tokenizer makes the same tokens of their bytes."""

from __future__ import annotations

import bisect
import codecs
import itertools
import json
import threading
import weakref
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from genrt.constraints.protocols import (
    HasTokens,
    MaskedConstraint,
    PackedState,
    kept_for,
    lm_of,
    prompt_tokens,
    tokens_of,
)
from genrt.errors import InvalidConstraint
from genrt.structures.matching import Words, packed, set_bits
from genrt.tokens.merges import Merges

LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 splits texts into words."""

NEXT = ("", *"asel1!' \n\t")
"""Continuations of a text that decide where its last words end, of every kind that ``LLAMA`` and the
byte-level expression of GPT-2 distinguish."""

PLAIN = ("{}", "{0}{0}{0}{0}", "a{}a", "1{}1", "!{}!", " {} ", " {}a", "\n{}\n", "\n{}a", "{}sa")
ELIDED = ("'{}a", "'{}ea", "'{}la", "'r{}a", "'l{}a", "'v{}a")
"""Texts around a character. Characters that the splits treat alike in ``PLAIN`` are alike; after an
apostrophe, ``ELIDED`` counts too."""

HOLE = "\ufffd"
"""Stands for a character of which only the first bytes are known."""

Window: TypeAlias = tuple[str, str]
"""The end of a text, from the last place where a word surely begins: a representative of each character,
and a mark of it."""

FREE, INSIDE, SPLIT = "o", "i", "x"
"""Whether a word may begin at a character: it may, it may not (a token is there), it must (its two tokens
would be merged)."""


def canonical(lm: HasTokens, prompt: str | Sequence[int] = ()) -> MaskedConstraint:
    """Return the constraint of the texts with the tokens that the model's tokenizer makes of the text: of
    all tokenizations of a text, one is in the set.

    A model puts some probability on other tokenizations; under this constraint, a text's probability is
    that of its tokens. With a prompt, the tokens of prompt and text together are canonical. A mask allows
    the tokens after which some text continues; the tokens of that text may not exist, which is a dead
    end. Texts are valid UTF-8, and spell no added token (``<|im_end|>``) by other tokens.

    It takes byte-level BPE tokenizers of transformers that split texts as GPT-2, SmolLM2 or Llama 3 do,
    or not at all, and that change no text first. The first constraint over an ``lm`` reads the
    merges, about 1 s for 50,000 tokens. Masks depend on the last token and on the word that it is in,
    and are cached.

    Args:
        prompt: a text, or token ids.

    Raises:
        InvalidConstraint: the tokenizer is of another kind, which the message names; its tokenizations of
            the prompt are others; or there is no end token.
        InvalidRequest: the prompt is no text, or has a token id out of range.
    """
    rules = _CanonicalRules.of(lm)
    return _Canonical(rules, prompt_tokens(lm, prompt, allow_empty=True))


class _Canonical:
    """The constraint."""

    def __init__(self, rules: _CanonicalRules, prompt: Sequence[int]) -> None:
        self._rules, self._prompt, self.tokens = rules, prompt, rules.tokens
        self._start = rules.state(None, ("", ""), b"", b"")
        for place, token in enumerate(prompt):
            state = rules.after(self._start, token)
            if state is None:
                raise InvalidConstraint(
                    f"the prompt's tokens are not the tokenizer's own from place {place} on "
                    f"({self.tokens.byte_vocab[token]!r}): give lm.encode(text)"
                )
            self._start = state

    def start(self) -> CanonicalState:
        return self._start

    def __reduce__(self) -> tuple[Any, ...]:
        return _Canonical, (self._rules, self._prompt)

    def __repr__(self) -> str:
        return "<constraint: canonical>"


class _Splits:
    """The words into which a tokenizer splits texts before it merges.

    A window is the end of a text, from the last place where a word surely begins: the representatives of
    its characters, and a mark for each.
    """

    def __init__(self, pre_tokenizer: Any) -> None:
        self._pre_tokenizer = pre_tokenizer
        self._like: dict[tuple[frozenset[int], ...], str] = {}
        self.begins = lru_cache(1 << 16)(self._begins)
        self.alike = lru_cache(1 << 16)(self._alike)
        self.after = lru_cache(1 << 18)(self._after)
        for first in (0, len(NEXT)):  # these represent all others
            self.brief("".join(NEXT), first=first)

    def _begins(self, text: str) -> frozenset[int]:
        """Return where words begin, and the end of the text."""
        words = self._pre_tokenizer.pre_tokenize_str(text)
        return frozenset((0, len(text), *(start for _, (start, _) in words)))

    def _alike(self, character: str, elided: bool) -> str:
        texts = PLAIN + ELIDED if elided else PLAIN
        key = tuple(self.begins(text.format(character)) for text in texts)
        return self._like.setdefault(key, character)

    def brief(self, text: str, *, first: int = 0) -> str:
        """Return representatives of the characters; the first ones may come to follow an apostrophe."""
        return "".join(
            self.alike(each, place < first or "'" in text[max(0, place - 2) : place])
            for place, each in enumerate(text)
        )

    def short(self, text: str, marks: str) -> Window:
        """Return a window with at most four equal characters in a row, where these are one word."""
        kept = [*zip(text, marks, strict=True)]
        for place in range(len(kept) - 5, -1, -1):
            if len({*kept[place : place + 5]}) == 1 and len(self.begins(kept[place][0] * 9)) == 2:
                del kept[place + 2]
        return "".join(each for each, _ in kept), "".join(mark for _, mark in kept)

    def _after(self, text: str, marks: str) -> Window | None:
        """Return the window after a text, or ``None`` if no words fit."""
        known = self.brief(text.removesuffix(HOLE))
        texts = [known + each for each in NEXT]
        if text.endswith(HOLE):
            texts = [each + more for each in texts[1:] for more in NEXT]
        begins = [self.begins(each) for each in texts]
        if not any(_agrees(marks, each) for each in begins):
            return None
        certain, possible = frozenset.intersection(*begins), frozenset.union(*begins)
        cut = max(place for place in certain if place <= len(known))
        marks = "".join(
            mark if place in possible - certain else FREE for place, mark in enumerate(marks)
        )
        text = known + text[len(known) :]
        return self.short(text[cut:], marks[cut:])

    def kind(self, text: str, pending: bytes) -> str:
        """Return the part of a token's text on which the words after a window depend."""
        brief = self.brief(text, first=2)
        return self.short(brief, INSIDE * len(brief))[0] + (HOLE if pending else "")

    def grown(self, window: Window, kind: str, mark: str) -> Window | None:
        """Return the window after one more token, or ``None`` if no words fit."""
        text, marks = window
        return self.after(text + kind, marks + mark + INSIDE * (len(kind) - 1))

    def may_end(self, window: Window) -> bool:
        text, marks = window
        return not text.endswith(HOLE) and _agrees(marks, self.begins(text))


def _agrees(marks: str, begins: frozenset[int]) -> bool:
    return all(
        mark == FREE or (place in begins) == (mark == SPLIT)
        for place, mark in enumerate(marks)
        if place
    )


class _CanonicalRules:
    """What decides the masks over one lm, shared by its constraints."""

    def __init__(self, lm: HasTokens) -> None:
        self.tokens = tokens_of(lm)
        fast = getattr(lm.tokenizer, "backend_tokenizer", None)
        if fast is None:
            raise _undecided("it has no tokenizers backend")
        specification = json.loads(fast.to_str())
        model, added = specification["model"], specification["added_tokens"]
        _check_kind(specification)
        self._merges = Merges(model["vocab"], [_pair(each) for each in model["merges"]])
        self._added = {each["id"]: each["content"].encode() for each in added}
        unmade = set(model["vocab"].values()) - self._merges.whole - self._added.keys()
        if model.get("ignore_merges") and unmade:
            raise _undecided(f"it takes {len(unmade)} words whole that its merges do not make")
        self._splits = _Splits(fast.pre_tokenizer)
        byte_vocab = self.tokens.byte_vocab
        self._sorted = sorted((data, token) for token, data in enumerate(byte_vocab))
        self._kind_of = np.full(len(byte_vocab), -1)
        self._kinds: dict[str, int] = {}
        self._continuing: list[int] = []
        """The tokens that begin inside a character."""
        for token in sorted(self._merges.whole - self._added.keys()):
            data = byte_vocab[token] if token < len(byte_vocab) else b""
            if not data or any(each in data for each in self._added.values()):
                continue
            if 0x80 <= data[0] < 0xC0:
                self._continuing.append(token)
            elif found := _characters(data):
                kind = self._splits.kind(*found)
                self._kind_of[token] = self._kinds.setdefault(kind, len(self._kinds))
        self._lock = threading.Lock()
        self._states: LRUCache[tuple[Any, ...], CanonicalState] = LRUCache(4096)
        self._fitting = lru_cache(256)(self._fitting_kinds)
        self._completing = lru_cache(256)(self._completing_tokens)

    @staticmethod
    def of(lm: HasTokens) -> _CanonicalRules:
        return kept_for(lm, _rules, _CanonicalRules)

    def __reduce__(self) -> tuple[Any, ...]:
        return _CanonicalRules.of, (lm_of(self.tokens),)

    def state(self, *key: Any) -> CanonicalState:
        with self._lock:
            state = self._states.get(key)
            if state is None:
                state = self._states[key] = CanonicalState(self, *key)
            return state

    def may_end(self, window: Window) -> bool:
        return self._splits.may_end(window)

    def mask(self, state: CanonicalState) -> Words:
        """Return the mask of a state."""
        allowed = np.zeros(len(self.tokens), np.bool_)
        apart = np.zeros(0, np.intp) if state.last is None else self._merges.apart(state.last)
        if state.pending:
            allowed[self._completing(state.window, state.pending)] = True
            allowed[apart] = False
        else:
            beside, split = self._fitting(state.window)
            allowed = beside[self._kind_of]
            allowed[apart] = split[self._kind_of[apart]]
        if state.accepting:
            allowed[[token for token in self._added if token < len(allowed)]] = True
        for rest in self._rests(state.begun):
            first = bisect.bisect_left(self._sorted, (rest, -1))
            for data, token in itertools.islice(self._sorted, first, None):
                if not data.startswith(rest):
                    break
                allowed[token] = False
        words = packed(allowed) & self.tokens.open
        set_bits(words, [self.tokens.eos_token_id], state.accepting)
        return words

    def _fitting_kinds(self, window: Window) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return which kinds of tokens fit after a window, beside the last token and split from it."""
        fits = [
            [self._splits.grown(window, kind, mark) is not None for kind in self._kinds]
            for mark in (FREE, SPLIT)
        ]
        beside, split = (np.array([*each, False]) for each in fits)  # the last is of kind -1
        return beside, split

    def _completing_tokens(self, window: Window, pending: bytes) -> list[int]:
        """Return the tokens that fit after the first bytes of a character."""
        return [token for token in self._continuing if self._grown(window, pending, token, True)]

    def _grown(
        self, window: Window, pending: bytes, token: int, beside: bool
    ) -> tuple[Window, bytes] | None:
        """Return the window and the pending bytes after a token, or ``None`` if it does not fit."""
        found = _characters(pending + self.tokens.byte_vocab[token])
        if found is None or (pending and not beside):
            return None
        mark = FREE if beside else SPLIT
        if pending:
            (text, marks), mark = window, window[1][-1]
            window = text[:-1], marks[:-1]
        new = self._splits.grown(window, self._splits.kind(*found), mark)
        return None if new is None else (new, found[1])

    def after(self, state: CanonicalState, token: int) -> CanonicalState | None:
        """Return the state after any token, or ``None`` if the tokens are not canonical."""
        data = self.tokens.byte_vocab[token]
        if any(data.startswith(rest) for rest in self._rests(state.begun)):
            return None
        if token in self._added:
            return self.state(None, ("", ""), b"", b"") if state.accepting else None
        if self._kind_of[token] < 0 and token not in self._continuing:
            return None
        beside = state.last is None or self._merges.side_by_side(state.last, token)
        new = self._grown(state.window, state.pending, token, beside)
        return None if new is None else self.state(token, *new, self._begun(state.begun + data))

    def _begun(self, data: bytes) -> bytes:
        """Return the longest end of some bytes with which an added token's text begins."""
        longest = max(map(len, self._added.values()), default=1)
        ends = (data[-length:] for length in range(min(longest - 1, len(data)), 0, -1))
        return next(
            (end for end in ends if any(each.startswith(end) for each in self._added.values())), b""
        )

    def _rests(self, begun: bytes) -> list[bytes]:
        """Return the bytes that would complete an added token's text."""
        return [
            each[length:]
            for each in self._added.values()
            for length in range(1, min(len(begun) + 1, len(each)))
            if begun.endswith(each[:length])
        ]


_rules: weakref.WeakKeyDictionary[HasTokens, _CanonicalRules] = weakref.WeakKeyDictionary()


class CanonicalState(PackedState):
    """What the next tokens depend on; the states of equal ones are one.

    Attributes:
        last: the last token of the text, or ``None`` at the beginning or after an added token.
        window: the end of the text, as words see it.
        pending: the first bytes of its last character, if that is incomplete.
        begun: the longest end of the text with which an added token's text begins.
    """

    __slots__ = ("_rules", "accepting", "begun", "last", "pending", "window")

    def __init__(
        self, rules: _CanonicalRules, last: int | None, window: Window, pending: bytes, begun: bytes
    ) -> None:
        super().__init__(len(rules.tokens))
        self._rules, self.last, self.window, self.pending = rules, last, window, pending
        self.begun, self.accepting = begun, rules.may_end(window)

    def _computed(self) -> Words:
        return self._rules.mask(self)

    def _after(self, token_id: int) -> CanonicalState:
        tokens = self._rules.tokens
        tokens.text(token_id)
        after = self._rules.after(self, token_id) if tokens.is_open(token_id) else None
        if after is None:
            raise tokens.refused(token_id)
        return after


def _characters(data: bytes) -> tuple[str, bytes] | None:
    """Return the characters of bytes and the first bytes of one more; ``None`` if they are not UTF-8."""
    try:
        text, length = codecs.utf_8_decode(data, "strict", False)
    except UnicodeDecodeError:
        return None
    return text, data[length:]


def _pair(merge: str | Sequence[str]) -> tuple[str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _check_kind(specification: dict[str, Any]) -> None:
    """Raise InvalidConstraint, with the reason, for a tokenizer of another kind."""
    model, words = specification["model"], specification["pre_tokenizer"] or {"type": "None"}
    if model["type"] != "BPE":
        raise _undecided(f"its model is {model['type']}")
    options = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    if given := [name for name in options if model.get(name)]:
        raise _undecided(f"its model has {given[0]}")
    if specification["normalizer"]:
        raise _undecided(f"it changes texts first, by {specification['normalizer']['type']}")
    steps = words.get("pretokenizers", [words])
    for step in steps:
        match step:
            case {"type": "ByteLevel", "add_prefix_space": False} if step is steps[-1]:
                pass
            case {"type": "Digits"} if step is not steps[-1]:
                pass
            case {"type": "Split", "pattern": {"Regex": str(pattern)}} if (
                pattern == LLAMA
                and step is not steps[-1]
                and (step["behavior"], step["invert"]) == ("Isolated", False)
            ):
                pass
            case _:
                raise _undecided(f"it splits texts into words by {step}")
    for each in specification["added_tokens"]:
        if any(each[name] for name in ("single_word", "lstrip", "rstrip")):
            raise _undecided(f"its added token {each['content']!r} takes in what is beside it")
    contents = {each["content"] for each in specification["added_tokens"]}
    beginnings = {each[:end] for each in contents for end in range(1, len(each))}
    for each in contents:
        ends = {each[start:] for start in range(len(each))}
        if ends & beginnings or any(each in other for other in contents - {each}):
            raise _undecided(f"its added token {each!r} overlaps with others")


def _undecided(reason: str) -> InvalidConstraint:
    return InvalidConstraint(
        "this tokenizer's canonical tokens are not known, as those of transformers' byte-level BPE are: "
        + reason
    )
