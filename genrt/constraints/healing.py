"""Prompts that end inside a token: cut back, and the constraint to begin with the bytes cut off."""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
from typing import NamedTuple

from genrt.constraints.grammars import regex
from genrt.constraints.protocols import HasTokens, MaskedConstraint, prompt_tokens, tokens_of
from genrt.errors import InvalidConstraint

ANY_TEXT = r"[\s\S]*"


class Healed(NamedTuple):
    """A prompt without its last tokens.

    Attributes:
        token_ids: the shorter prompt.
        text: the end that is cut off, with which the text after ``token_ids`` begins.
        constraint: the texts that begin with it.
    """

    token_ids: list[int]
    text: str
    constraint: MaskedConstraint


def heal(lm: HasTokens, prompt: str | Sequence[int]) -> Healed:
    r"""Cut a prompt back to where its last token may be another one, and constrain the text after it to
    begin with the bytes that are cut off.

    A prompt such as ``"http:"`` ends with the token ``:``, but texts that go on with ``//`` have the
    token ``://``, so after ``:`` the model hardly writes ``//``. The cut is before the first of the last
    tokens from which on one token of the vocabulary spells the rest of the prompt and more; special
    tokens stay. If no token does, the prompt stays as it is.

    Under the constraint, the text's law is the model's after the shorter prompt, conditioned on bytes
    that begin with the part that is cut off, in any tokenization. It composes with others by ``all_of``;
    texts are valid UTF-8. For ``lm.generate``, give ``regex=re.escape(text) + r"[\s\S]*"``.

    Args:
        prompt: a text, tokenized as by ``lm.generate``, or token ids.

    Raises:
        InvalidConstraint: the prompt's end is not UTF-8, or there is no end token.
        InvalidRequest: the prompt is neither, or has token ids out of range.
    """
    tokens, ids = tokens_of(lm), [*prompt_tokens(lm, prompt, allow_empty=True)]
    spelled = sorted({*tokens.byte_vocab} - {tokens.byte_vocab[each] for each in tokens.special})
    cut, rest = len(ids), b""
    for place in range(len(ids) - 1, -1, -1):
        rest = tokens.byte_vocab[ids[place]] + rest
        if ids[place] in tokens.special or len(rest) >= max(map(len, spelled)):
            break
        after = bisect.bisect_right(spelled, rest)
        if after < len(spelled) and spelled[after].startswith(rest):
            cut = place
    while True:
        try:
            text = b"".join(tokens.byte_vocab[each] for each in ids[cut:]).decode()
        except UnicodeDecodeError as error:
            if not cut:
                raise InvalidConstraint(
                    "the prompt ends inside a character: give the text up to a whole one"
                ) from error
            cut -= 1
        else:
            return Healed(ids[:cut], text, regex(re.escape(text) + ANY_TEXT, lm))
