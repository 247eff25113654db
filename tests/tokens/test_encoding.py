"""encoding.py: what is encoded comes back, or is refused with what is lost; chats by the template."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from genrt.engines.exact import ExactEngine, NGram
from genrt.errors import InvalidRequest
from genrt.tokens.encoding import decode, encode, encode_chat, encode_shared, encode_shared_turns
from tests.tokens.test_vocabulary import (
    CORPUS,
    EXACT,
    SPACE_IN_FRONT,
    WORDS,
    byte_level,
    made,
    wrapped,
)

TEXTS = st.lists(
    st.sampled_from([*WORDS, "<töol>", "<s>", "</s>", "▁", "\0", "\x1d", "e\u0301", "№", "\ufffd"])
    | st.text(max_size=4)
).map("".join)


def without_space_beside(text: str) -> str:
    return re.sub(r"\s*(<töol>|</?s>)\s*", r"\1", text)


@pytest.mark.parametrize("name", [name for name in EXACT | SPACE_IN_FRONT if name != "bytes"])
@given(text=TEXTS)
@settings(max_examples=50, deadline=None)
def test_what_is_encoded_has_the_bytes_of_the_text_or_is_refused(name: str, text: str) -> None:
    tokenizer, tokens = made(name)
    try:
        token_ids = encode(tokenizer, text)
    except InvalidRequest as error:
        message = str(error)
    else:
        message = ""
    if message:
        assert re.search("the tokenizer loses text: .* comes back as|surrogates", message)
        return
    spelled = b"".join(tokens[token_id] for token_id in token_ids).decode()
    wanted, spelled = without_space_beside(text), without_space_beside(spelled)
    assert spelled == wanted or spelled == f" {wanted}" or wanted == f" {spelled}"


# -- tokenizers that lose text ---------------------------------------------------------------------


def with_unknown() -> Any:
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=special, show_progress=False)
    backend.train_from_iterator(CORPUS[:1] * 5, trainer)
    return wrapped(backend)


INCOMPLETE = [
    character
    for character in pre_tokenizers.ByteLevel.alphabet()
    if ord(character) not in (*range(0x101, 0x108), 0x11D, 0xF1)
]
"""The characters of the bytes, without those of the bytes 1 to 7, 1D and F1."""


LOSSY: dict[str, tuple[Callable[[], Any], str, str, str]] = {
    "no token for a byte": (
        lambda: byte_level(alphabet=INCOMPLETE),
        "naïve",
        "a\x1db",
        r"from character 1 on '\\x1db' comes back as 'b'. Leave it out",
    ),
    "composing": (
        lambda: byte_level(normalizer=normalizers.NFC()),
        "é",
        "e\u0301",
        r"from character 0 on 'e\\u0301' comes back as '\\xe9'",
    ),
    "strips": (
        lambda: byte_level(normalizer=normalizers.Strip()),
        "a b",
        "a  ",
        r"from character 1 on '  ' comes back as ''",
    ),
    "unknown to BPE": (
        with_unknown,
        "the cat",
        "the 🙂",
        r"'\\U0001f642' comes back as '<unk>'",
    ),
}


@pytest.mark.parametrize("name", LOSSY)
def test_a_text_that_would_not_come_back_is_refused_with_what_is_lost(name: str) -> None:
    make, kept, lost, message = LOSSY[name]
    tokenizer = make()
    assert encode(tokenizer, kept) == tokenizer.encode(kept, add_special_tokens=False)
    with pytest.raises(InvalidRequest, match=message) as caught:
        encode(tokenizer, lost)
    assert "lm.encode(text, lossy=True)" in str(caught.value)
    taken = encode(tokenizer, lost, lossy=True)
    assert taken == tokenizer.encode(lost, add_special_tokens=False)


def with_swallowing_tokens() -> Any:
    """As Phi-3's: the tokens that end a turn take the white space after them."""
    tokenizer = byte_level(alphabet=INCOMPLETE)
    tokenizer.add_tokens([AddedToken("<|end|>", rstrip=True), AddedToken("<|mask|>", lstrip=True)])
    return tokenizer


def test_white_space_beside_added_tokens_may_be_swallowed_and_nothing_else() -> None:
    tokenizer = with_swallowing_tokens()
    for text in ("a<|end|>\nb", "a <|mask|> b", "<|end|>  <|mask|>", "<|end|>"):
        token_ids = encode(tokenizer, text)
        assert token_ids == tokenizer.encode(text, add_special_tokens=False)
    for text in ("a<|end|>\n\x1db", "a\x1d <|mask|> b", "<|end|>\x1d<|mask|>"):
        with pytest.raises(InvalidRequest, match="comes back as"):
            encode(tokenizer, text)


# -- chats -----------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if tools %}{{ tools | length }} tools\n{% endif %}{% if loud %}!{% endif %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "naïve 日本?"}]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one
        b: the other
    """
    return a + b


def chatty() -> Any:
    tokenizer = byte_level(alphabet=INCOMPLETE)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_a_chat_is_what_the_tokenizers_own_template_makes_of_it() -> None:
    tokenizer = chatty()
    text = "<s>system: Be brief.\n<s>user: naïve 日本?\n"
    assert decode(tokenizer, encode_chat(tokenizer, CHAT)) == f"{text}<s>assistant:"
    assert decode(tokenizer, encode_chat(tokenizer, CHAT, add_generation_prompt=False)) == text
    loud = encode_chat(tokenizer, tuple(CHAT), tools=[add], chat_template_kwargs={"loud": True})
    assert decode(tokenizer, loud) == f"{text}1 tools\n!<s>assistant:"
    own = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert encode_chat(tokenizer, CHAT) == own
    assert {type(token_id) for token_id in own} == {int}


LLAMA_3 = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
EITHER = LLAMA_3.replace(
    "{{ m['content'] | trim }}",
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}\n{% endfor %}{% endif %}",
)
PARTS_ALONE = LLAMA_3.replace(
    "{{ m['content'] | trim }}",
    "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}",
)
PARTS_OR_ERROR = PARTS_ALONE.replace("{% if p['type'] == 'text' %}", "{% if p['text'] + '' %}")


@pytest.mark.parametrize("template", [LLAMA_3, EITHER, PARTS_ALONE, PARTS_OR_ERROR], ids=range(4))
@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("Hello!", "Hello!"),
        ([{"type": "text", "text": "Hello!"}], "Hello!"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        (["a", {"type": "text", "text": "b"}], "a\nb"),
        (({"type": "text", "text": "{'type': 1}"},), "{'type': 1}"),
        ([], ""),
    ],
)
def test_contents_of_a_chat_are_texts_or_their_parts_whatever_the_template_takes(
    template: str, content: Any, text: str
) -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = template
    call: Any = {"role": "assistant", "content": None, "tool_calls": []}
    for messages, written in (
        ([{"role": "user", "content": content}], f"<user>{text}<assistant>"),
        (
            [{"role": "user", "content": content}, call, {"role": "tool", "content": "5"}],
            f"<user>{text}<assistant><tool>5<assistant>",
        ),
    ):
        if "p['text']" in template and len(messages) > 1:
            continue  # it takes no tools
        assert decode(tokenizer, encode_chat(tokenizer, messages)) == written


CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": null, "b": "None"}'}}
CALLS_OF_NONE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is none %}"
    "{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
CALLS_AND_TEXT = (
    "{% for m in messages %}{% if m.tool_calls %}<call>"
    "{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments }}{% endfor %}{% endif %}"
    "{% if m.content is not none %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [CALLS_OF_NONE, CALLS_AND_TEXT])
def test_a_call_without_content_is_written_where_the_template_looks_for_none(template: str) -> None:
    """Templates of DeepSeek-R1 write calls, or leave out an empty answer, where the content is none."""
    tokenizer = byte_level()
    tokenizer.chat_template = template
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    messages: list[Any] = [{"role": "user", "content": "1 + 1?"}, call]
    messages.append({"role": "tool", "content": "2"})
    own = tokenizer.apply_chat_template(messages, tokenize=False)
    assert own.count("add") == 1
    assert "<assistant><" not in own
    assert decode(tokenizer, encode_chat(tokenizer, messages)) == own


BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    *(
        ({"messages": messages}, rf"messages must be one conversation, a list like .*, got {kind}")
        for messages, kind in (
            ({"role": "user", "content": "Hello"}, "dict"),
            ([], "none"),
            ([CHAT], "list"),
            (["Hello"], "list"),
            ([{"content": "Hello"}], "list"),
        )
    ),
    *(
        ({"messages": [*CHAT, {"role": role, "content": content}]}, message)
        for role, content, message in (
            ("user", None, r"messages\[2\] has a content of type NoneType: give a text"),
            ("system", 5, r"messages\[2\] has a content of type int"),
            ("assistant", {"a": 1}, r"messages\[2\] has a content of type dict"),
            ("user", [{"type": "image_url", "image_url": "x"}], "a part of type 'image_url'"),
            ("user", [{"type": "text"}], "a part of type 'text': give only parts like"),
            ("user", [["a"]], "has a content of type list"),
        )
    ),
    ({"chat_template_kwargs": {"tokenize": False}}, r"may not have \['tokenize'\]"),
    ({"chat_template_kwargs": {"return_tensors": "pt"}}, r"may not have \['return_tensors'\]"),
    ({"chat_template_kwargs": {"tools": []}}, r"may not have \['tools'\]"),
    ({"chat_template_kwargs": "loud"}, "must be a mapping, got"),
    (
        {"chat_template_kwargs": {"chat_template": "{{ nothing.at.all }}"}},
        "does not take this: Undef",
    ),
    ({"chat_template_kwargs": {"chat_template": "{% if %}"}}, "does not take this: TemplateSyntax"),
    (
        {"chat_template_kwargs": {"chat_template": "{{ raise_exception('no system') }}"}},
        "does not take this: TemplateError: no system",
    ),
    ({"chat_template_kwargs": {"continue_final_message": True}}, "does not take this: ValueError"),
    ({"tools": [3]}, "does not take this: ValueError"),
    ({"messages": [{"role": "user", "content": "a\x1d"}]}, "loses text: from character"),
    ({"messages": [{"role": "user", "content": "a\ud800"}]}, "no UTF-8 form.*surrogates"),
]


@pytest.mark.parametrize(("options", "message"), BAD_CHATS)
def test_a_chat_that_cannot_be_written_is_refused_with_what_is_wrong(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        encode_chat(chatty(), **{"messages": CHAT, **options})


# -- of a runtime ----------------------------------------------------------------------------------


class Engine(ExactEngine):
    """The exact engine with another tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(NGram.random(500, order=0))
        self.tokenizer = tokenizer


# -- what prompts and chats share -------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(EXACT | SPACE_IN_FRONT))
@given(words=st.lists(st.sampled_from(WORDS), max_size=3), more=st.sampled_from(["a", "1", ""]))
@settings(max_examples=30, deadline=None)
def test_prompts_that_begin_with_a_text_begin_with_its_shared_tokens(
    name: str, words: list[str], more: str
) -> None:
    tokenizer, _ = made(name)
    text = "".join(["the cat the cat", *words])
    try:
        shared, prompt = encode_shared(tokenizer, text), encode(tokenizer, text + more)
    except InvalidRequest:
        return
    assert prompt[: len(shared)] == shared
    assert len(shared) > 0


def merging(letters: str, *merges: tuple[str, str]) -> Any:
    """A tokenizer of letters that merges these pairs."""
    vocabulary = [*letters, *map("".join, merges)]
    numbered = {token: number for number, token in enumerate(vocabulary)}
    return wrapped(Tokenizer(models.BPE(vocab=numbered, merges=list(merges))), unknown=None)


def test_a_token_that_what_follows_would_change_is_not_shared() -> None:
    tokenizer = merging("hea1b", ("h", "e"), ("h", "a"))
    assert tokenizer.convert_ids_to_tokens(encode_shared(tokenizer, "heh")) == ["he"]
    assert tokenizer.convert_ids_to_tokens(encode_shared(tokenizer, "heb")) == ["he", "b"]
    assert tokenizer.convert_ids_to_tokens(encode_shared(tokenizer, "h")) == [
        "h"
    ]  # rather than none


TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
SYSTEM = [{"role": "system", "content": "Be brief."}]
ASKED = [*SYSTEM, {"role": "user", "content": "Why?"}]


@pytest.mark.parametrize(
    ("template", "messages", "shared"),
    [
        (TURNS, SYSTEM, "<system>Be brief.<user>"),
        (TURNS, ASKED, "<system>Be brief.<user>Why?"),
        (
            TURNS + "{% if add_generation_prompt %}<assistant><think>{% endif %}",
            ASKED,
            "<system>Be brief.<user>Why?<assistant>",
        ),
        ("{{ messages[0].content }}: {{ messages[-1].content }}", SYSTEM, "Be brief.:"),
    ],
)
def test_chats_share_what_the_template_makes_of_any_next_message(
    template: str, messages: list[dict[str, str]], shared: str
) -> None:
    tokenizer, _ = made("byte-level")
    given = {"chat_template": template}
    ids = encode_shared_turns(tokenizer, messages, None, given)
    assert decode(tokenizer, ids) == shared
    for more in ("Hello", "42", "a"):
        role = "assistant" if messages is ASKED else "user"
        turns = [*messages, {"role": role, "content": more}]
        options: Any = {"chat_template_kwargs": given, "add_generation_prompt": role == "user"}
        assert encode_chat(tokenizer, turns, **options)[: len(ids)] == ids


def test_chats_that_share_nothing_and_none_at_all_are_refused() -> None:
    tokenizer, _ = made("byte-level")
    last = {"chat_template": "{{ messages[-1].content }}{{ messages[0].content }}"}
    with pytest.raises(InvalidRequest, match="share no tokens"):
        encode_shared_turns(tokenizer, SYSTEM, None, last)
    with pytest.raises(InvalidRequest, match="got none"):
        encode_shared_turns(tokenizer, [], None, None)
    with pytest.raises(InvalidRequest, match="chat template does not take this"):
        encode_shared_turns(
            tokenizer, SYSTEM, None, {"chat_template": "{{ raise_exception('no') }}"}
        )
    with pytest.raises(InvalidRequest, match="empty"):
        encode_shared(tokenizer, "")
