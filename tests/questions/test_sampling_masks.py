"""The sets that tokens are drawn from: against filters written out in numpy, on every way to a text."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import genrt
from genrt.engines.exact import ExactEngine, NGram
from genrt.errors import InvalidRequest, TimedOut
from genrt.generation import rollout, rollout_samples
from genrt.lm import AsyncLM
from genrt.questions.completions import Completion, SamplingMask
from genrt.server import serving
from genrt.tokens.sampling import truncate
from genrt.tokens.sets import in_form, packed_sets
from tests.masks import check_places, sets_in, support

MODEL = NGram.random(70, order=1, seed=3, zeros=0.2)


@pytest.fixture(scope="module")
def lm() -> Iterator[AsyncLM]:
    with genrt.load(MODEL, engine="exact", engine_options={"max_model_len": 24}) as opened:
        yield opened


OPTIONS = st.fixed_dictionaries(
    {"sampling_mask": st.sampled_from(["ids", "bits"])},
    optional={
        "temperature": st.sampled_from([0.0, 1e-4, 0.3, 0.7, 1.0, 2.5, 1e9]),
        "top_p": st.floats(0.01, 1.0),
        "top_k": st.integers(0, 71),
        "min_p": st.floats(0.0, 1.0),
        "logprobs_mode": st.sampled_from(["raw_logprobs", "processed_logprobs"]),
    },
)


@settings(deadline=None, max_examples=150)
@given(
    prompt=st.lists(st.integers(0, 69), min_size=1, max_size=4), given=OPTIONS, seed=st.integers(0)
)
def test_the_row_normalized_over_its_set_is_the_reported_log_probability(
    lm: AsyncLM, prompt: list[int], given: dict[str, Any], seed: int
) -> None:
    given = given | {"seed": seed % 2**63, "max_tokens": 5}
    cuts = given.get("top_p", 1.0) < 1.0 or given.get("min_p") or given.get("temperature") == 0.0
    if given["sampling_mask"] == "ids" and not cuts and not 0 < given.get("top_k", 0) < 70:
        with pytest.raises(InvalidRequest, match="whole vocabulary"):
            lm.generate_sync(prompt, **given)
        return
    drawn = lm.generate_sync(prompt, **given)
    check_places(drawn, given, lambda context: MODEL.row(context).numpy(), tolerance=1e-5)
    raw = [
        float(MODEL.row([*prompt, *drawn.token_ids[:n]])[t]) for n, t in enumerate(drawn.token_ids)
    ]
    if given.get("logprobs_mode") != "processed_logprobs":
        assert drawn.logprobs == pytest.approx(raw, abs=1e-5)
    elif drawn.sampling_mask is not None:
        assert drawn.logprobs == pytest.approx(drawn.sampling_mask.logprobs.tolist(), abs=1e-6)


@settings(deadline=None, max_examples=200)
@given(
    rows=st.lists(st.lists(st.integers(-4, 0), min_size=67, max_size=67), min_size=1, max_size=4),
    top_k=st.integers(1, 70),
    min_p=st.sampled_from([0.0, math.exp(-3), math.exp(-1), 1.0]),
)
def test_tokens_tied_at_the_boundary_are_all_in_the_set_or_none_is(
    rows: list[list[int]], top_k: int, min_p: float
) -> None:
    """Whole logits, so that ties are the rule, and numpy decides them as float32 does."""
    logits = torch.tensor(rows, dtype=torch.float32)
    kept = truncate(logits, top_k=top_k, min_p=min_p)
    found = [np.frombuffer(each, np.int32) for each in in_form(packed_sets(kept), "ids")]
    for row, ids in zip(logits.numpy(), found, strict=True):
        must, may = support(row, {"top_k": top_k, "min_p": min_p})
        assert must <= set(ids.tolist()) <= may
        left_out = set(range(67)) - set(ids.tolist())
        assert not {row[each] for each in left_out} & {row[each] for each in ids}
        assert ids.tolist() == sorted(ids.tolist())


@pytest.mark.parametrize("form", ["ids", "bits"])
async def test_streams_and_late_texts_have_the_sets_of_their_tokens(lm: AsyncLM, form: Any) -> None:
    options: dict[str, Any] = {"top_p": 0.8, "seed": 4, "max_tokens": 9, "sampling_mask": form}
    whole = (await lm.generate([1, 2], **options)).sampling_mask
    assert whole is not None
    stream = lm.stream([1, 2], **options)
    parts = [delta.sampling_mask async for delta in stream]
    assert [place for part in parts if part is not None for place in part.places] == [*whole.places]
    assert stream.completion is not None
    assert stream.completion.sampling_mask == whole
    left = lm.stream([1, 2], **options)
    async with left:
        await anext(left)
    partial = left.partial
    assert partial.sampling_mask is not None
    assert partial.sampling_mask.places == whole.places[: len(partial.token_ids)]


@pytest.mark.parametrize("form", ["ids", "bits"])
async def test_a_connected_runtime_has_the_sets_of_the_one_that_is_served(
    lm: AsyncLM, form: Any
) -> None:
    options: dict[str, Any] = {"top_k": 3, "seed": 4, "max_tokens": 6, "sampling_mask": form}
    with serving(lm) as server:
        async with await AsyncLM.connect(str(server.url)) as remote:
            here, there = await asyncio.gather(
                remote.generate([5], **options), lm.generate([5], **options)
            )
    assert here.token_ids == there.token_ids
    check_places(here, options, lambda context: MODEL.row(context).numpy(), tolerance=1e-5)
    assert sets_in(here.sampling_mask) == sets_in(there.sampling_mask)


@pytest.mark.parametrize("form", ["ids", "bits"])
async def test_rollouts_place_the_sets_as_a_trainers_dictionary_wants_them(
    lm: AsyncLM, form: Any
) -> None:
    prompts, lengths = torch.tensor([[1, 2, 0], [3, 0, 0], [4, 5, 6]]), torch.tensor([2, 1, 3])
    options: dict[str, Any] = {"pad_value": 0, "max_new_tokens": 4, "top_k": 5, "seed": 1}
    options |= {"sampling_mask": form, "stop_token_ids": [*range(20)]}
    found = await rollout(lm, prompts, lengths, **options)
    named = found.as_dict()
    assert named.keys() - (await rollout(lm, prompts, lengths, pad_value=0)).as_dict().keys() == {
        "sampling_logprobs",
        "sampling_log_mass",
        *(["sampling_mask_bits"] if form == "bits" else []),
        *(["sampling_mask_token_ids", "sampling_mask_sizes"] if form == "ids" else []),
    }
    batch, width = found.output_ids.shape
    is_drawn = found.logprobs != 0
    assert is_drawn.sum() == found.generation_lengths.sum()
    # As a trainer does it, from raw logits of all positions.
    rows = torch.stack([torch.stack([MODEL.row(row[:n]) if n else torch.zeros(70) for n in range(width)])
                        for row in found.output_ids.tolist()])  # fmt: skip
    if form == "ids":
        ids, sizes = named["sampling_mask_token_ids"], named["sampling_mask_sizes"]
        assert ids.dtype == sizes.dtype == torch.int32
        assert ids.shape == (batch, width, int(sizes.max()))
        assert not sizes[~is_drawn].any()
        allowed = torch.zeros(batch, width, 70, dtype=torch.bool)
        there = torch.arange(ids.shape[2]) < sizes[..., None]
        b, w, _ = there.nonzero().unbind(1)
        allowed[b, w, ids[there].long()] = True
        assert int(allowed.sum()) == int(sizes.sum())
    else:
        bits = named["sampling_mask_bits"]
        assert bits.dtype == torch.int32
        unpacked = np.unpackbits(bits.numpy().view(np.uint8), axis=1, bitorder="little")[:, :70]
        allowed = torch.zeros(batch, width, 70, dtype=torch.bool)
        allowed[is_drawn] = torch.from_numpy(unpacked).bool()
    law = rows.masked_fill(~allowed, -math.inf).log_softmax(-1)
    own = law.gather(-1, found.output_ids[..., None])[..., 0]
    assert torch.allclose(own[is_drawn], named["sampling_logprobs"][is_drawn], atol=1e-5)
    mass = rows.masked_fill(~allowed, -math.inf).logsumexp(-1)
    assert torch.allclose(mass[is_drawn], named["sampling_log_mass"][is_drawn], atol=1e-5)
    async for number, sample in rollout_samples(lm, prompts, lengths, **options):
        assert sample.sampling_mask == found.completions[number].sampling_mask


async def test_greedy_and_empty_rollouts_have_sets_too(lm: AsyncLM) -> None:
    full, lengths = torch.full((1, 24), 3), torch.tensor([24])
    options: dict[str, Any] = {"pad_value": 0, "sampling_mask": "ids", "top_p": 0.5}
    none = (await rollout(lm, full, lengths, **options)).as_dict()
    assert none["sampling_mask_token_ids"].shape == (1, 24, 0)
    assert none["sampling_mask_sizes"].tolist() == [[0] * 24]
    bits = await rollout(lm, full, lengths, pad_value=0, sampling_mask="bits")
    assert bits.as_dict()["sampling_mask_bits"].numel() == 0
    greedy = await lm.generate([1], temperature=0, max_tokens=3, sampling_mask="ids")
    mask = greedy.sampling_mask
    assert mask is not None
    assert mask.token_ids.tolist() == list(greedy.token_ids)
    assert mask.offsets.tolist() == [0, 1, 2, 3]
    assert (mask.logprobs.tolist(), mask.log_mass.tolist()) == ([0.0] * 3, [0.0] * 3)


async def test_a_sample_that_is_late_keeps_the_sets_of_its_tokens() -> None:
    """An engine that gives two tokens, and then waits for the timeout."""

    class Slow(ExactEngine):
        def step(self) -> Any:
            states = [each.state for each in self._in_progress.values()]
            if any(each is not None and len(each.drawn) >= 2 for each in states):
                return []
            return super().step()

    ids, lengths = torch.tensor([[1, 2]]), torch.tensor([2])
    options: dict[str, Any] = {"pad_value": 0, "sampling_mask": "ids", "top_p": 0.7, "seed": 2}
    with genrt.load(engine=lambda: Slow(MODEL, max_model_len=24)) as slow:
        late = await rollout(slow, ids, lengths, timeout=0.3, on_timeout="truncate", **options)
        with pytest.raises(TimedOut):
            await rollout(slow, ids, lengths, timeout=0.3, **options)
    [text] = late.completions
    assert text.finish_reason == "abort"
    check_places(text, options, lambda context: MODEL.row(context).numpy(), tolerance=1e-5)
    assert late.as_dict()["sampling_mask_sizes"].bool().sum() == len(text.token_ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling_mask": "sets"}, "sampling_mask must be 'ids', 'bits' or None, got 'sets'"),
        ({"sampling_mask": True}, "sampling_mask must be 'ids', 'bits' or None, got True"),
        ({"sampling_mask": "ids"}, "narrow the draws by top_p, top_k, min_p or a structure"),
        ({"sampling_mask": "ids", "top_p": 1.0, "top_k": 70}, "or ask for sampling_mask='bits'"),
    ],
)
def test_wrong_choices_are_refused(lm: AsyncLM, options: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        lm.generate_sync([1], max_tokens=2, **options)


def test_a_mask_has_one_form(lm: AsyncLM) -> None:
    mask = lm.generate_sync([1], max_tokens=2, sampling_mask="bits").sampling_mask
    assert mask is not None
    assert mask.bits.shape == (2, 3)
    assert repr(mask) == "SamplingMask('bits', 2 places)"
    for name in ("token_ids", "offsets"):
        with pytest.raises(InvalidRequest, match="sampling_mask='ids'"):
            getattr(mask, name)
    with pytest.raises(InvalidRequest, match="sampling_mask='bits'"):
        _ = SamplingMask("ids", (), 3).bits


@pytest.mark.parametrize("form", ["ids", "bits"])
def test_arrays_are_read_only(lm: AsyncLM, form: Any) -> None:
    """They are made when they are read: a number written into one would be lost."""
    mask = lm.generate_sync([1], max_tokens=2, top_k=3, sampling_mask=form).sampling_mask
    own = ("token_ids", "offsets") if form == "ids" else ("bits",)
    for name in ("logprobs", "log_mass", *own):
        with pytest.raises(ValueError, match="read-only"):
            getattr(mask, name)[0] = 1


def test_structures_and_penalties_leave_their_sets() -> None:
    """The set is of the tokens that all options leave; penalties act on the logits before."""
    model = NGram.random([b"a", b"b", b"c", b"ab", b""], order=1, seed=1, eos_token_id=4)
    with genrt.load(model, engine="exact") as lm:
        options: dict[str, Any] = {"regex": "[ab]{2}c", "seed": 5, "sampling_mask": "ids"}
        drawn = lm.generate_sync([0], **options)
        sets = sets_in(drawn.sampling_mask)
        assert sets[0] == {0, 1, 3}
        assert sets[-1] in ({2}, {4})
        assert drawn.sampling_mask is not None
        for place, (allowed, token) in enumerate(zip(sets, drawn.token_ids, strict=True)):
            row = model.row([0, *drawn.token_ids[:place]])
            own = float(row[token] - row[sorted(allowed)].logsumexp(0))
            assert drawn.sampling_mask.logprobs[place] == pytest.approx(own, abs=1e-5)
        options = {"logit_bias": {1: 30.0}, "seed": 5, "max_tokens": 3, "top_p": 0.999}
        biased: Completion = lm.generate_sync([0], sampling_mask="ids", **options)
        assert sets_in(biased.sampling_mask) == [{1}] * 3
        mask = biased.sampling_mask
        assert mask is not None
        raw = [float(model.row([0, *biased.token_ids[:n]])[1]) for n in range(3)]
        assert mask.log_mass.tolist() == pytest.approx(raw, abs=1e-5)
