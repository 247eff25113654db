"""Constraints on generated text: they say which tokens may follow, as token masks and as potentials.

A constraint is a set of texts: the matches of a ``regex``, the instances of a ``json_schema``, the texts
of a ``grammar``, a list of ``strings``, or the texts that a ``predicate`` accepts. ``all_of`` makes the
intersection of several. Your own object with a method ``start`` that returns a state is a constraint too.
``potential`` makes a log-weight from a constraint.

A constraint's states are values: ``advance`` returns a new state and does not change the old one, so
particles fork by sharing a state. A mask holds every token that keeps the *bytes* of the text a prefix of
some text in the set. Tokens may straddle characters, and every tokenization of a text is accepted.

Such a prefix may still have no completion. The vocabulary may lack the tokens, the constraints of a
product may contradict each other, or a grammar's terminals may have taken the longest match. Then a later
mask is empty, which is a dead end and not an error.

The end token is in a mask exactly where the text so far is complete. It ends a text and is not part of
it. Other special tokens, and tokens without bytes, are in no mask.

Where judging every token would take too long, a state is a *checked* one and checks single tokens. The
states of a predicate, and of a product with a predicate, are checked. ``await amasks(states)``, or
``abitmasks``, computes the masks of many states of both kinds off the event loop. ``masks`` and
``bitmasks`` compute the masks of unchecked states in the calling thread.
"""

from __future__ import annotations

from genrt.constraints.grammars import grammar, json_schema, regex, strings
from genrt.constraints.predicates import predicate
from genrt.constraints.products import abitmasks, all_of, amasks, bitmasks, masks, potential
from genrt.constraints.protocols import CheckedState, Constraint, ConstraintState, MaskedConstraint

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
