"""Turns: what the model drew stays as it was, whatever templates and tokenizers make of its text."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import genrt
from genrt.engines.exact import ExactEngine, NGram
from genrt.errors import ContextTooLong, InvalidRequest, TimedOut
from genrt.generation import Conversation, splice_turn
from genrt.lm import AsyncLM
from genrt.questions.completions import Completion

# -- splicing ---------------------------------------------------------------------------------------

PREFILL = [11, 12, 13, 40, 41]
SPLICED = [11, 12, 13, 40, 41, 220, 17, 2, 21, 22, 40, 41]
SPLICES: list[tuple[str, list[int], list[int], list[int], list[int]]] = [
    (
        "the text is tokenized otherwise",
        [*PREFILL, 220, 17, 2],
        [*PREFILL, 1001, 2],
        [*PREFILL, 1001, 2, 21, 22, 40, 41],
        SPLICED,
    ),
    (
        "the model was cut off",
        [*PREFILL, 220, 17],
        [*PREFILL, 1001, 2],
        [*PREFILL, 1001, 2, 21, 22, 40, 41],
        SPLICED,
    ),
    (
        "the template leaves out reasoning, so that ends are at other positions",
        [*PREFILL, 90, 91, 92, 220, 17, 2],
        [*PREFILL, 90, 91, 92, 1001, 2, 7],
        [*PREFILL, 1001, 2, 7, 21, 22, 40, 41],
        [*PREFILL, 90, 91, 92, 220, 17, 2, 7, 21, 22, 40, 41],
    ),
    (
        "the template ends what users say too",
        [5, 2, 6, 220, 2],
        [5, 2, 6, 221, 2],
        [5, 2, 6, 221, 2, 8, 2, 9],
        [5, 2, 6, 220, 2, 8, 2, 9],
    ),
    ("nothing follows", [5, 220, 2], [5, 221, 2], [5, 221, 2], [5, 220, 2]),
    ("there was no turn", [], [], [5, 2, 6], [5, 2, 6]),
    ("there was no turn of the model's", [], [5, 2], [5, 2, 6], [5, 2, 6]),
]


@pytest.mark.parametrize(
    ("model", "prefix", "template", "expected"),
    [each[1:] for each in SPLICES],
    ids=[s[0] for s in SPLICES],
)
def test_the_models_tokens_stay_and_the_templates_follow(
    model: list[int], prefix: list[int], template: list[int], expected: list[int]
) -> None:
    assert splice_turn(model, prefix, template, 2) == expected
    assert splice_turn(torch.tensor(model), tuple(prefix), template, 2) == expected


def test_what_cannot_be_spliced_is_told() -> None:
    with pytest.raises(InvalidRequest, match="no end token 2 among the 2 tokens"):
        splice_turn([1, 2], [1, 3], [1, 2, 4], 2)
    with pytest.raises(InvalidRequest, match="no end token 2 among the 0 tokens"):
        splice_turn([1, 2], [], [1, 2, 4], 2)
    with pytest.raises(InvalidRequest, match=r"ends 2 turns, and the whole only 1 \(token 2\)"):
        splice_turn([1, 2, 3, 2], [1, 2, 3, 2], [1, 2, 4], 2)


tokens_but_two = st.lists(st.sampled_from([0, 1, 3, 4, 5]), max_size=4)


@settings(deadline=None, max_examples=200)
@given(
    turns=st.lists(
        st.tuples(tokens_but_two, tokens_but_two, tokens_but_two), min_size=1, max_size=5
    ),
    said=tokens_but_two,
    is_cut=st.booleans(),
)
def test_any_number_of_turns_is_kept(
    turns: list[tuple[list[int], list[int], list[int]]], said: list[int], is_cut: bool
) -> None:
    """Turns as the model drew them, as the prefix has them, and as the whole does."""
    model, prefix, whole = (
        list(itertools.chain(*([*turn[way], 2] for turn in turns))) for way in range(3)
    )
    drawn = model[:-1] if is_cut and turns[-1][0] else model
    assert splice_turn(drawn, prefix, [*whole, *said], 2) == [*model, *said]


# -- tokenizers that merge across boundaries ---------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}({{ m.role[0] }}:{{ m.content }}{% if m.role != 'user' %}</s>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}(a:{% endif %}"
)
"""Neither the user's messages nor the beginning of an answer end with a token of their own: with what
follows they may be one."""

STRIPS = TEMPLATE.replace(
    "{{ m.content }}",
    "{% if loop.last or m.role != 'assistant' or '#' not in m.content %}{{ m.content }}{% else %}"
    "{{ m.content.split('#')[-1] }}{% endif %}",
)
"""Leaves out what answers but the last have before a mark, as of reasoning."""

LETTERS = "ab#(:ust </>"


@cache
def tokenizer_of(merges: tuple[tuple[str, str], ...], template: str = TEMPLATE) -> Any:
    """A BPE of these letters and merges, over whole texts: ``<s>`` is 0, ``</s>`` is 1."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    names = ["<s>", "</s>", *LETTERS]
    names += [name for name in dict.fromkeys(map("".join, merges)) if name not in names]
    backend = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, list(merges)))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(each, special=True) for each in ("<s>", "</s>")])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = template
    return made


@st.composite
def merges(draw: st.DrawFn) -> tuple[tuple[str, str], ...]:
    """Merges, of what letters and merges before them make."""
    known, made = [*LETTERS], list[tuple[str, str]]()
    for _ in range(draw(st.integers(0, 12))):
        pair = draw(st.sampled_from(known)), draw(st.sampled_from(known))
        if "".join(pair) not in known:
            made.append(pair)
            known.append("".join(pair))
    return tuple(made)


def opened(tokenizer: Any, **options: Any) -> Any:
    """Open a random model over a tokenizer's vocabulary. It ends a turn now and then."""
    size = len(tokenizer)
    table = torch.randn(size, size, generator=torch.Generator().manual_seed(size))
    table[:, 0] = -torch.inf
    vocabulary = [bytes([i]) for i in range(size)]

    def open_engine() -> ExactEngine:
        engine = ExactEngine(
            NGram(vocabulary, table, eos_token_id=1), **({"max_model_len": 400} | options)
        )
        engine.tokenizer = tokenizer
        return engine

    return open_engine


contents = st.text("ab </s>#", min_size=1, max_size=6)


@settings(deadline=None, max_examples=40)
@given(
    merges=merges(),
    template=st.sampled_from([TEMPLATE, STRIPS]),
    said=st.lists(st.lists(contents, min_size=1, max_size=2), min_size=1, max_size=4),
    most=st.integers(1, 12),
    seed=st.integers(0, 2**40),
)
def test_a_conversation_grows_by_what_was_drawn_and_what_was_said(
    merges: tuple[tuple[str, str], ...],
    template: str,
    said: list[list[str]],
    most: int,
    seed: int,
) -> None:
    tokenizer = tokenizer_of(merges, template)
    with genrt.load(engine=opened(tokenizer)) as lm:
        asyncio.run(talk(lm, tokenizer, said, most, seed))


async def talk(
    lm: AsyncLM, tokenizer: Any, said: Sequence[Sequence[str]], most: int, seed: int
) -> None:
    """Talk with a model, and see that its tokens, mask and log-probabilities are right in every turn."""
    system = {"role": "system", "content": "ab"}
    conversation = Conversation(lm, [system])
    before, drawn = list[int](), list[tuple[int, Completion]]()
    for turn, users in enumerate(said):
        conversation.add(*({"role": "user", "content": each} for each in users))
        prompt = conversation.prompt_ids()
        assert prompt[: len(before)] == before
        completion = await conversation.ask(max_new_tokens=most, seed=seed + turn, temperature=1.5)
        assert list(completion.prompt_token_ids) == prompt
        drawn.append((len(prompt), completion))
        before = [*prompt, *completion.token_ids]
        assert conversation.trajectory().token_ids.tolist() == before
    found = conversation.trajectory()
    expected = torch.zeros(len(before))
    mask = torch.zeros(len(before), dtype=torch.bool)
    for start, completion in drawn:
        end = start + len(completion.token_ids)
        assert before[start:end] == list(completion.token_ids)
        expected[start:end] = torch.tensor(completion.logprobs)
        mask[start:end] = True
    assert torch.equal(found.loss_mask, mask)
    torch.testing.assert_close(found.logprobs, expected)
    scores = await lm.score(before[:1], before[1:])
    torch.testing.assert_close(found.logprobs[mask], scores[mask[1:]], atol=5e-4, rtol=0)
    # As a text it is what was said, with every answer as it was drawn, and an end after each.
    text = "(s:ab</s>"
    for turn, (users, (_, completion)) in enumerate(zip(said, drawn, strict=True)):
        text += "".join(f"(u:{each}" for each in users) + "(a:"
        answer = tokenizer.decode(list(completion.token_ids), skip_special_tokens=False)
        ends = completion.token_ids[-1] == 1 or turn == len(said) - 1
        text += answer if ends else f"{answer}</s>"
    assert tokenizer.decode(before, skip_special_tokens=False) == text


MERGED = tokenizer_of(((":", "a"), ("b", "("), ("a", "b"), ("ab", "ab"), (" ", "a")))


@pytest.fixture
def lm() -> Iterator[AsyncLM]:
    with genrt.load(engine=opened(MERGED)) as made:
        yield made


ROOT = Path(__file__).resolve().parents[2]
USER = {"role": "user", "content": "ab"}


def a_completion(lm: AsyncLM, conversation: Conversation, text: str, *ends: int) -> Completion:
    """What the model might have drawn: a text, letter by letter, and an end."""
    prompt = conversation.prompt_ids()
    ids = (*(lm.tokenizer.convert_tokens_to_ids(each) for each in text), *ends)
    reason: Any = "stop" if ends else "length"
    own = tuple(-float(place + 1) for place in range(len(ids)))
    return Completion(text, ids, tuple(prompt), own, (), reason, None, 0.0, 0.0)


@pytest.mark.parametrize("template", [TEMPLATE, STRIPS])
def test_an_answer_that_spells_the_end_token_ends_no_turn(template: str) -> None:
    with genrt.load(engine=opened(tokenizer_of((("<", "/"),), template))) as lm:
        conversation = Conversation(lm, [USER])
        spelt = a_completion(lm, conversation, "a</s>b#a</</s>s>", 1)
        assert spelt.token_ids.count(1) == 1
        conversation.answer(spelt)
        prompt = conversation.trajectory().token_ids.tolist()
        conversation.add({"role": "user", "content": "bb"})
        after = conversation.prompt_ids()
        assert after[: len(prompt)] == prompt
        assert lm.decode(after[len(prompt) :]) == "(u:bb(a:"


def test_messages_of_tools_stand_between_answers(lm: AsyncLM) -> None:
    def message_of(completion: Completion) -> dict[str, Any]:
        called = [{"function": {"name": "s", "arguments": {"of": completion.text + "</s>"}}}]
        return {"role": "assistant", "content": completion.text, "tool_calls": called}

    conversation = Conversation(lm, [USER], message_of=message_of)
    conversation.answer(a_completion(lm, conversation, "ab", 1))
    before = conversation.trajectory().token_ids.tolist()
    conversation.add({"role": "tool", "content": "b b"}, USER)
    prompt = conversation.prompt_ids()
    assert prompt[: len(before)] == before
    assert lm.decode(prompt[len(before) :]) == "(t:b b</s>(u:ab(a:"
    conversation.answer(a_completion(lm, conversation, "a", 1))
    found = conversation.trajectory()
    assert int(found.loss_mask.sum()) == 5
    assert not found.loss_mask[len(before) : len(prompt)].any()
    assert [each["role"] for each in conversation.messages] == [
        *("user", "assistant", "tool", "user", "assistant")
    ]
    assert "tool_calls" in conversation.messages[1]
    assert (
        repr(conversation)
        == f"Conversation(5 messages, {len(found.token_ids)} tokens, 5 of them drawn)"
    )


async def test_a_turn_of_tools_has_the_forms_of_trainers() -> None:
    """Of TRL, verl and OpenRLHF, as the guide makes them. Each has the whole trajectory, and the
    log-probabilities are the model's after all tokens before, the tool's included."""
    async with await genrt.aload(engine=opened(MERGED)) as lm:
        talk = Conversation(lm, [USER])
        begin = len(talk.prompt_ids())
        for seed in (1, 2):
            await talk.ask(max_new_tokens=5, seed=seed)
            talk.add({"role": "tool", "content": "b b"}, USER)
        found, guide = talk.trajectory(), (ROOT / "docs/guide/trainers.md").read_text("utf-8")
        [made] = re.findall(r"^found = talk.trajectory\(\)\n(.*?)^print", guide, re.M | re.S)
        forms: dict[str, Any] = {"found": found, "begin": begin, "torch": torch}
        exec(made, forms)  # noqa: S102 — the guide's own lines
        trl, verl, openrlhf = (forms[f"of_{each}"] for each in ("trl", "verl", "openrlhf"))
        ids, drawn = found.token_ids.tolist(), found.loss_mask.tolist()
        assert trl == {
            name: [verl[other]]
            for name, other in (
                ("prompt_ids", "prompt_ids"),
                ("completion_ids", "response_ids"),
                ("logprobs", "response_logprobs"),
                ("env_mask", "response_mask"),
            )
        }
        assert verl["prompt_ids"] + verl["response_ids"] == openrlhf["observation_tokens"] == ids
        assert [False] * begin + [each == 1 for each in verl["response_mask"]] == drawn
        assert len({len(verl[f"response_{each}"]) for each in ("ids", "mask", "logprobs")}) == 1
        assert len(openrlhf["rollout_log_probs"]) == len(ids)
        assert len(openrlhf["action_ranges"]) == 2
        places = [n for start, end in openrlhf["action_ranges"] for n in range(start, end)]
        assert places == [n for n, each in enumerate(drawn) if each]
        for start, end in openrlhf["action_ranges"]:
            scores = await lm.score(ids[:start], ids[start:end])
            own = openrlhf["rollout_log_probs"][start:end]
            assert own == pytest.approx(scores.tolist(), abs=1e-5)


def test_forks_go_on_by_themselves(lm: AsyncLM) -> None:
    conversation = Conversation(lm, [USER])
    conversation.answer(a_completion(lm, conversation, "ab", 1))
    before = conversation.trajectory()
    other = conversation.fork()
    other.add(USER)
    other.answer(a_completion(lm, other, "b", 1))
    assert torch.equal(conversation.trajectory().token_ids, before.token_ids)
    assert len(conversation.messages) == 2
    conversation.add({"role": "user", "content": "b"})
    conversation.answer(a_completion(lm, conversation, "a", 1))
    one, two = conversation.trajectory().token_ids, other.trajectory().token_ids
    assert not torch.equal(one, two)
    for each in (conversation.trajectory(), other.trajectory()):
        assert len(each.token_ids) == len(each.loss_mask) == len(each.logprobs)
        assert each.logprobs[each.loss_mask].tolist() == [-1.0, -2.0, -3.0, -1.0, -2.0]


# -- errors and cancellation -------------------------------------------------------------------------


async def test_what_fails_or_is_cancelled_changes_nothing(lm: AsyncLM) -> None:
    conversation = Conversation(lm, [USER])
    await conversation.ask(max_new_tokens=3, seed=1)
    conversation.add(USER)
    messages, before = conversation.messages, conversation.trajectory()
    with pytest.raises(TimedOut):
        await conversation.ask(timeout=0)
    with pytest.raises(InvalidRequest, match="temperature"):
        await conversation.ask(temperature=-1)
    with pytest.raises(
        InvalidRequest, match="ask has no option 'max_tokens': did you mean max_new_tokens"
    ):
        await conversation.ask(max_tokens=3)
    task = asyncio.create_task(conversation.ask(ignore_eos=True))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert conversation.messages == messages
    assert torch.equal(conversation.trajectory().token_ids, before.token_ids)
    assert (await conversation.ask(max_new_tokens=2, seed=5)).token_ids


async def test_an_answer_to_what_was_before_is_refused(lm: AsyncLM) -> None:
    conversation = Conversation(lm, [USER])
    answers = await asyncio.gather(
        *(conversation.ask(max_new_tokens=4, seed=seed) for seed in range(2)),
        return_exceptions=True,
    )
    [refused] = [each for each in answers if isinstance(each, Exception)]
    assert isinstance(refused, InvalidRequest)
    assert "not to the conversation as it is now" in str(refused)
    assert len(conversation.messages) == 2
    with pytest.raises(InvalidRequest, match="the last message is the assistant's"):
        await conversation.ask()
    conversation.add(USER)
    task = asyncio.create_task(conversation.ask(max_new_tokens=4, ignore_eos=True))
    await asyncio.sleep(0)
    conversation.add(USER)
    with pytest.raises(InvalidRequest, match="not to the conversation as it is now"):
        await task


async def test_an_answer_must_have_log_probabilities_and_be_a_message(lm: AsyncLM) -> None:
    conversation = Conversation(lm, [USER])
    bare = dataclasses.replace(a_completion(lm, conversation, "ab", 1), logprobs=())
    with pytest.raises(InvalidRequest, match="draw it with logprobs=0"):
        conversation.answer(bare)
    with pytest.raises(InvalidRequest, match="completion must be a Completion"):
        conversation.answer("ab")  # type: ignore[arg-type]
    no_message: Any = lambda completion: completion.text
    wrong = Conversation(lm, [USER], message_of=no_message)
    with pytest.raises(InvalidRequest, match="messages must be"):
        wrong.answer(a_completion(lm, wrong, "ab", 1))
    assert len(wrong.messages) == 1
    assert len(wrong.trajectory().token_ids) == 0


async def test_answers_fill_the_context_and_no_more() -> None:
    with genrt.load(engine=opened(MERGED, max_model_len=30)) as lm:
        conversation = Conversation(lm, [USER])
        answer = await conversation.ask(max_new_tokens=100, ignore_eos=True, seed=1)
        assert len(conversation.trajectory().token_ids) == 30
        assert answer.truncated
        conversation.add(USER)
        with pytest.raises(ContextTooLong, match="max_model_len is 30: there is no room"):
            await conversation.ask()


async def test_a_trajectory_tells_with_which_weights_each_token_was_drawn() -> None:
    async with await genrt.aload(engine=opened(MERGED)) as lm:
        conversation = Conversation(lm, [USER])
        first = await conversation.ask(max_new_tokens=4, seed=1)
        size = lm.vocab_size
        await lm.update_weights({"table": torch.zeros(size, size).log_softmax(-1)})
        conversation.add(USER)
        second = await conversation.ask(max_new_tokens=4, seed=1)
        versions = conversation.fork().trajectory().weights_versions
        mask = conversation.trajectory().loss_mask
        assert versions[mask].tolist() == [0] * len(first.token_ids) + [1] * len(second.token_ids)
        assert set(versions[~mask].tolist()) == {-1}


def test_mistakes_are_told(lm: AsyncLM) -> None:
    with pytest.raises(InvalidRequest, match="the tokenizer loses text"):
        Conversation(lm, [{"role": "user", "content": "ä"}])
    conversation = Conversation(lm, [USER], chat_template_kwargs={"tools": []})
    with pytest.raises(InvalidRequest, match="chat_template_kwargs may not have"):
        conversation.prompt_ids()
    for each in ("ab", {"content": "a"}, {"role": "user", "content": "\ud800"}):
        with pytest.raises(InvalidRequest):
            conversation.add(USER, each)  # type: ignore[arg-type]
    assert len(conversation.messages) == 1
    other = Conversation(lm, [USER], end_token_id=3)
    other.answer(a_completion(lm, other, "ab", 1))
    other.add(USER)
    with pytest.raises(InvalidRequest, match="no end token 3"):
        other.prompt_ids()
    with genrt.load(NGram.random(5), engine="exact") as bytes_only:
        with pytest.raises(InvalidRequest, match="end token"):
            Conversation(bytes_only, [USER])
        with pytest.raises(InvalidRequest, match="has no chat templates"):
            Conversation(bytes_only, [USER], end_token_id=1).prompt_ids()
