"""Constraints on generated text: they say which tokens may follow, as token masks and as potentials.

A constraint is a set of texts. Its states are values: ``advance`` returns a new state, so particles fork
by sharing a state. A mask holds every token that keeps the *bytes* of the text a prefix of some text in
the set, in any tokenization. Such a prefix may have no completion: the vocabulary may lack the tokens, or
the constraints of a product contradict each other. A later mask is then empty, which is a dead end and
not an error. The end token is in a mask exactly where the text is complete; other special tokens, and
tokens without bytes, are in no mask.

States of a predicate, and of a product with a predicate, are *checked*: they judge single tokens.
``await amasks(states)``, or ``abitmasks``, computes the masks of many states of both kinds off the event
loop; ``masks`` and ``bitmasks`` those of unchecked states in the calling thread. Your own object with a
method ``start`` that returns a state is a constraint too.
"""

from __future__ import annotations

from genrt.constraints.canonical import canonical
from genrt.constraints.grammars import grammar, json_schema, regex, strings
from genrt.constraints.healing import Healed, heal
from genrt.constraints.predicates import predicate
from genrt.constraints.products import abitmasks, all_of, amasks, bitmasks, masks, potential
from genrt.constraints.protocols import CheckedState, Constraint, ConstraintState, MaskedConstraint

__all__ = [
    "CheckedState",
    "Constraint",
    "ConstraintState",
    "Healed",
    "MaskedConstraint",
    "abitmasks",
    "all_of",
    "amasks",
    "bitmasks",
    "canonical",
    "grammar",
    "heal",
    "json_schema",
    "masks",
    "potential",
    "predicate",
    "regex",
    "strings",
]
