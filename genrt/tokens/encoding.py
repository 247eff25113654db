"""Converts texts and chats to token ids and back; refuses texts that would not come back unchanged."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from genrt.errors import InvalidRequest
from genrt.numbers import check_bool, named
from genrt.tokens.vocabulary import BytesTokenizer, checked_utf8

WHITE = r"[^\S\x1c-\x1f]*"
"""A regular expression for white space as the tokenizers library defines it."""

FOLLOWING = ("a", "1")
"""Continuations that start with tokens of different kinds, to find the tokens that a prefix shares."""

OURS = frozenset(
    (
        *("conversation", "tools", "add_generation_prompt", "tokenize", "return_dict"),
        *("return_tensors", "padding", "truncation", "max_length"),
    )
)
"""The options of ``apply_chat_template`` that ``encode_chat`` sets itself."""


class ChatOptions(TypedDict, total=False):
    """The options of ``AsyncLM.encode_chat``.

    Attributes:
        add_generation_prompt: whether to start the assistant's turn, so that the answer comes next.
        tools: the tools that the model may call, as in transformers' ``apply_chat_template``.
        chat_template_kwargs: other options of the template, such as ``enable_thinking``.
        lossy: whether the tokenizer may lose or change some of the text.
    """

    add_generation_prompt: bool
    tools: Sequence[Any] | None
    chat_template_kwargs: Mapping[str, Any] | None
    lossy: bool


def encode(tokenizer: Any, text: str, *, lossy: bool = False) -> list[int]:
    """Return the token ids of a text, without added special tokens.

    Special tokens that the text spells become their ids, except with BytesTokenizer. ``lossy`` accepts
    the tokenizer's ids even if some of the text is lost.

    Raises:
        InvalidRequest: the text has lone surrogates, or the tokenizer loses or changes some of it. One
            space in front, and white space next to added tokens, do not count: tokenizers add or remove
            these.
    """
    check_bool("lossy", lossy)
    if not isinstance(text, str):
        raise InvalidRequest(f"encode takes a str, got {type(text).__name__}")
    if isinstance(tokenizer, BytesTokenizer):
        return tokenizer.encode(text)
    checked_utf8(text)
    token_ids = list(tokenizer.encode(text, add_special_tokens=False))
    if not lossy:
        _check_kept(tokenizer, text, token_ids)
    return token_ids


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text with the tokenizer's special tokens around it, such as a
    beginning-of-sequence token. Raises InvalidRequest as ``encode``."""
    if tokenizer is None:
        raise InvalidRequest("this model has no tokenizer: give the prompt as token ids")
    token_ids = encode(tokenizer, text)
    if hasattr(tokenizer, "build_inputs_with_special_tokens"):
        return list(tokenizer.build_inputs_with_special_tokens(token_ids))
    return token_ids


def decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Return the text of token ids, with special tokens and without cleaning up spaces.

    The space that some tokenizers put in front of every text is removed, and invalid UTF-8 becomes
    U+FFFD. For the exact bytes, use ``byte_vocab``.
    """
    if isinstance(tokenizer, BytesTokenizer):
        return tokenizer.decode(token_ids)
    text: str = tokenizer.decode(
        list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return text


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    lossy: bool = False,
) -> list[int]:
    """Return the token ids of a conversation, by the tokenizer's own chat template.

    Contents are texts, or lists of parts like ``{"type": "text", "text": …}``, which are joined by line
    feeds. An assistant's may be ``None``. A template that takes only parts gets parts.

    Raises:
        InvalidRequest: there is no template, the template refuses these messages or options, a content is
            not text, or the tokenizer loses some of the rendered text.
    """
    check_bool("lossy", lossy)
    if not hasattr(tokenizer, "apply_chat_template"):
        raise InvalidRequest(
            f"{type(tokenizer).__name__} has no chat templates: write the conversation as one text, and "
            "give lm.encode(text)"
        )
    check_messages(messages)
    if not isinstance(chat_template_kwargs, Mapping | None):
        raise InvalidRequest(
            f"chat_template_kwargs must be a mapping, got {named(chat_template_kwargs)}"
        )
    options = dict(chat_template_kwargs or {})
    if taken := sorted(map(str, OURS & options.keys())):
        raise InvalidRequest(f"chat_template_kwargs may not have {taken}: encode_chat sets these")
    options |= {"tools": tools, "add_generation_prompt": add_generation_prompt}

    def applied(turns: Sequence[Mapping[str, Any]], **kind: bool) -> Any:
        try:
            return tokenizer.apply_chat_template(list(turns), **options, **kind)
        except Exception as error:  # a template is a program and may raise any exception
            if "chat_template" not in options and not getattr(tokenizer, "chat_template", None):
                raise InvalidRequest(
                    "the model has no chat template, so it was hardly made for chats: write the "
                    "conversation as one text and give lm.encode(text), or "
                    "chat_template_kwargs={'chat_template': …}"
                ) from error
            raise InvalidRequest(
                f"the chat template does not take this: {type(error).__name__}: {error}"
            ) from error

    def write(turns: Sequence[Mapping[str, Any]]) -> str:
        return str(applied(turns, tokenize=False))

    turns = [{**each} for each in messages]
    for place, each in enumerate(turns):
        if "content" in each:
            each["content"] = _text_of(each["content"], each["role"], place)
    turns, text = _written(_with_nones(messages, turns, write), write)
    checked_utf8(text)
    token_ids = list(applied(turns, tokenize=True, return_dict=False))
    if not lossy:
        _check_kept(tokenizer, text, token_ids)
    return token_ids


def _text_of(content: Any, role: Any, place: int) -> Any:
    """Return a content as a text. The template writes a tool's other contents; for other roles, they
    raise InvalidRequest."""
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    wrong = f"a content of type {type(content).__name__}: give a text, or a list of parts like"
    if isinstance(content, list | tuple):
        parts = [
            {"type": "text", "text": each} if isinstance(each, str) else each for each in content
        ]
        if all(isinstance(each, Mapping) and "type" in each for each in parts):
            kinds = [each["type"] for each in parts if not isinstance(each.get("text"), str)]
            kinds += [each["type"] for each in parts if each["type"] != "text"]
            if not kinds:
                return "\n".join(part["text"] for part in parts)
            wrong = f"a part of type {kinds[0]!r}: give only parts like"
    if role in ("tool", "function", "ipython"):
        return content
    raise InvalidRequest(f'messages[{place}] has {wrong} {{"type": "text", "text": "…"}}')


def _written(
    turns: list[dict[str, Any]], write: Callable[[Sequence[Mapping[str, Any]]], str]
) -> tuple[list[dict[str, Any]], str]:
    """Return a conversation as the template takes it, and the rendered text. Contents become lists of
    parts if the template refuses texts, or passes over them in silence."""
    texts = [each.get("content") for each in turns if each["role"] == "user"]
    said = [each.strip() for each in texts if isinstance(each, str)]
    text, failed = "", None
    try:
        text = write(turns)
    except InvalidRequest as error:
        failed = error
    if failed is None and all(each in text for each in said):
        return turns, text
    parts = [
        {**each, "content": [{"type": "text", "text": each["content"]}]}
        if isinstance(each.get("content"), str) and each["role"] != "tool"
        else each
        for each in turns
    ]
    with contextlib.suppress(InvalidRequest):
        other = write(parts)
        if all(each in other for each in said) and "{'type': 'text'" not in other:
            return parts, other
    if failed:
        raise failed
    return turns, text


def _with_nones(
    messages: Sequence[Mapping[str, Any]],
    turns: list[dict[str, Any]],
    write: Callable[[Sequence[Mapping[str, Any]]], str],
) -> list[dict[str, Any]]:
    """Return the turns with ``None`` as the content beside calls, if the template has a branch for it:
    DeepSeek-R1's writes calls only there. Other templates write the word, or fail."""
    alone = [bool(each.get("tool_calls")) and each.get("content", "") is None for each in messages]
    if not any(alone):
        return turns
    pairs = zip(alone, turns, strict=True)
    nones = [{**turn, "content": None} if is_alone else turn for is_alone, turn in pairs]
    texts = set()
    for each in (nones, turns):
        with contextlib.suppress(InvalidRequest):
            texts.add(re.sub(r"None|null|\s+", "", write(each)))
    return nones if len(texts) == 2 else turns


def encode_turn(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> list[int]:
    """Return the token ids of a conversation up to the assistant's next message, or up to the end of an
    assistant's last message, which continues. Raises InvalidRequest as ``encode_chat``."""
    check_messages(messages)
    continues = messages[-1]["role"] == "assistant"
    if continues and isinstance(chat_template_kwargs, Mapping | None):
        chat_template_kwargs = {**(chat_template_kwargs or {}), "continue_final_message": True}
    return encode_chat(
        tokenizer,
        messages,
        add_generation_prompt=not continues,
        tools=tools,
        chat_template_kwargs=chat_template_kwargs,
    )


def encode_shared(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids shared by all prompts that start with a text. Raises InvalidRequest as
    ``encode_prompt``, or if the text is empty."""
    if not text:
        raise InvalidRequest("a prefix must not be empty")
    token_ids = encode_prompt(tokenizer, text)
    longer = []
    for more in FOLLOWING:
        with contextlib.suppress(InvalidRequest):  # a tokenizer may lack these characters
            longer.append(encode_prompt(tokenizer, f"{text}{more}"))
    return token_ids[: shared_length([token_ids, *longer])] or token_ids


def encode_shared_turns(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> list[int]:
    """Return the token ids shared by all chats that start with these messages: up to the assistant's
    answer if the last message is a user's or a tool's, and otherwise up to the user's next message.
    Raises InvalidRequest as ``encode_chat``, if the template accepts no such next message, or if the
    chats share no tokens."""
    check_messages(messages)
    answers = messages[-1]["role"] in ("user", "tool", "function")
    role = "assistant" if answers else "user"
    turns = [[*messages, {"role": role, "content": each}] for each in FOLLOWING]
    turns += [list(messages)] if answers else []  # ends with the start of the answer
    chats = [
        encode_chat(
            tokenizer,
            turn,
            add_generation_prompt=turn[-1]["role"] != "assistant",
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        for turn in turns
    ]
    shared = chats[0][: shared_length(chats)]
    if not shared:
        raise InvalidRequest(
            "chats that begin with these messages share no tokens: the template puts what comes later "
            "in front of them"
        )
    return shared


def shared_length(sequences: Sequence[Sequence[int]]) -> int:
    """Return the number of tokens with which all of these sequences begin."""
    first, *others = sequences
    length = min(map(len, sequences))
    for other in others:
        differ = (n for n in range(length) if first[n] != other[n])
        length = next(differ, length)
    return length


def check_messages(messages: object) -> None:
    """Raise InvalidRequest unless this is a conversation of at least one message."""
    if (
        isinstance(messages, str | bytes)
        or not isinstance(messages, Sequence)
        or not messages
        or not all(isinstance(each, Mapping) and "role" in each for each in messages)
    ):
        raise InvalidRequest(
            "messages must be one conversation, a list like [{'role': 'user', 'content': 'Hello!'}], got "
            f"{'none' if isinstance(messages, Sequence) and not messages else type(messages).__name__}"
        )


def _check_kept(tokenizer: Any, text: str, token_ids: Sequence[int]) -> None:
    """Raise InvalidRequest, with the difference, if the tokenizer loses or changes some of the text."""
    if not _is_kept(tokenizer, text, token_ids):
        came = decode(tokenizer, token_ids)
        came = came if text.startswith(" ") else came.removeprefix(" ")
        pairs = enumerate(zip(text, came, strict=False))
        at = next((i for i, (one, other) in pairs if one != other), min(len(text), len(came)))
        raise InvalidRequest(
            f"the tokenizer loses text: from character {at} on {text[at : at + 10]!a} comes back as "
            f"{came[at : at + 10]!a}. Leave it out, give it as it comes back, or take what the tokenizer "
            "makes of it, lm.encode(text, lossy=True), as lm.encode_chat takes lossy=True"
        )


def _is_kept(tokenizer: Any, text: str, token_ids: Sequence[int]) -> bool:
    """Return whether the text comes back, ignoring the white space that ``encode`` ignores."""
    if _is_same(text, decode(tokenizer, token_ids)):
        return True
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        return False
    if fast.decoder is None:  # without a decoder, a loss cannot be detected
        return True
    known = tokenizer.added_tokens_decoder.items()
    added = {i: token for i, token in known if token.content in text}
    # Decoders garble some added tokens and put spaces after them, so decode each part by itself.
    came = "".join(
        "".join(added[i].content for i in part) if is_added else decode(tokenizer, list(part))
        for is_added, part in itertools.groupby(token_ids, added.__contains__)
    )
    for token in sorted(added.values(), key=lambda token: -len(token.content)):
        before, after = WHITE if token.lstrip else "", WHITE if token.rstrip else " ?"
        beside = re.compile(f"{before}({re.escape(token.content)}){after}")
        text, came = beside.sub(r"\1", text), beside.sub(r"\1", came)
    return _is_same(text, came)


def _is_same(text: str, came: str) -> bool:
    """Return whether two texts are equal up to one space in front."""
    return came == text or came == f" {text}" or text == f" {came}"
