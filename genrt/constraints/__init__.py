"""Which tokens may follow: constraints on the generated text, as token masks and as potentials.

A constraint is a set of texts: what a ``regex`` matches, a ``json_schema`` validates, a ``grammar``
derives, a list of ``strings`` holds, a ``predicate`` accepts; ``all_of`` several is their intersection.
Any object of yours with such a ``start`` is one too. ``potential`` makes a log-weight of a constraint.

Its states are values: ``advance`` makes a new one and leaves the old one as it was, so particles fork by
sharing a state. A mask holds every token that keeps the *bytes* of the text a prefix of some text of the
set; tokens may straddle characters, and any tokenization of a text is as good as any other. Such a prefix
need not be completable with the tokens there are, nor with those that all constraints of a product allow,
nor where a grammar's terminals took the longest match: then a later mask is empty, which is a dead end
and not an error.

The end token is in a mask exactly where the text so far is complete; it ends a text and is no part of it.
Other special tokens, and tokens without bytes, are in no mask.

Where it would take too long to judge every token, a state is a *checked* one and is asked about single
tokens: a predicate's states, and those of a product with one. ``await amasks(states)``, or ``abitmasks``,
computes the masks of many states of both kinds off the event loop; ``masks`` and ``bitmasks`` those of
states that know theirs, in the calling thread.
"""

from __future__ import annotations

from genrt.constraints.grammars import grammar, json_schema, regex
from genrt.constraints.masking import abitmasks, amasks, bitmasks, masks
from genrt.constraints.potentials import potential
from genrt.constraints.predicates import predicate
from genrt.constraints.products import all_of
from genrt.constraints.protocols import CheckedState, Constraint, ConstraintState, MaskedConstraint
from genrt.constraints.string_sets import strings

__all__ = [
    "CheckedState",
    "Constraint",
    "ConstraintState",
    "MaskedConstraint",
    "abitmasks",
    "all_of",
    "amasks",
    "bitmasks",
    "grammar",
    "json_schema",
    "masks",
    "potential",
    "predicate",
    "regex",
    "strings",
]
