"""The tokens of a conversation: those that the model drew are kept as they are, whatever a chat
template and a tokenizer would make of their text."""

from __future__ import annotations

from genrt.errors import InvalidRequest
from genrt.numbers import check_int
from genrt.questions.contexts import TokenIds, id_words

__all__ = ["splice_turn"]

MOST_TOKENS = 2**32
"""Token ids are below this, whatever the vocabulary."""


def splice_turn(
    model_ids: TokenIds, template_prefix_ids: TokenIds, template_ids: TokenIds, eos_token_id: int
) -> list[int]:
    """Return the tokens of a conversation's next prompt, of which ``model_ids`` are the beginning.

    A template writes the whole conversation anew, and tokenizes what the model drew in another way
    than the model did. So the model's own tokens are kept up to the end of its last turn, and the
    template's are taken from there on. Turns end with ``eos_token_id``: as many ends as the prefix has
    are counted in ``template_ids``. Their positions may differ, since templates leave out reasoning of
    earlier turns.

    A last turn that was cut off, and has no end token, gets the template's. Without ``model_ids`` there
    was no turn, and the template's tokens stand.

    Args:
        model_ids: the tokens of the conversation up to and with the model's last turn: its last prompt
            and the tokens that were drawn then.
        template_prefix_ids: what the template makes of the messages up to and with that turn.
        template_ids: what it makes of all messages, with those that came after.
        eos_token_id: the token with which the template ends the model's turns.

    Raises:
        InvalidRequest: the prefix has no end token, or the template has fewer than the prefix: it is not
            of the same conversation.
    """
    end = check_int("eos_token_id", eos_token_id, 0, MOST_TOKENS - 1)
    model, prefix, template = (
        list(id_words(each, MOST_TOKENS, allow_empty=True, name=name))
        for name, each in (
            ("model_ids", model_ids),
            ("template_prefix_ids", template_prefix_ids),
            ("template_ids", template_ids),
        )
    )
    if not model:
        return template
    turns = prefix.count(end)
    if turns == 0:
        raise InvalidRequest(
            f"there is no end token {end} among the {len(prefix)} tokens of the template's prefix: give "
            "the token with which the template ends the model's turns, and the prefix with the last one"
        )
    ends = [place for place, token in enumerate(template) if token == end]
    if len(ends) < turns:
        raise InvalidRequest(
            f"the template's prefix ends {turns} turns, and the whole only {len(ends)} (token {end}): "
            "they are not of the same conversation, or the template leaves out earlier turns"
        )
    kept = model[:-1] if model[-1] == end else model
    return kept + template[ends[turns - 1] :]
