"""The exact engine: its model is a probability distribution, and its samples are drawn from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from scipy.stats import chi2

from genrt.engines.exact import ExactEngine, NGram
from genrt.errors import InvalidAdapter, InvalidRequest, ModelNotFound
from genrt.questions.arguments import Adapter
from genrt.questions.completions import SampleRequest
from genrt.questions.request import Request, Result
from genrt.questions.rows import LogprobsRequest
from genrt.testing import check_engine

LEVEL = 1e-4
"""Of the G-tests: the seeds are fixed, so a test either always passes or always fails."""

models = st.builds(
    NGram.random,
    st.integers(1, 4),
    order=st.integers(0, 2),
    seed=st.integers(0, 1000),
    zeros=st.sampled_from([0.0, 0.3, 0.6, 1.0]),
    eos_token_id=st.sampled_from([None, 0]),
)
quick = settings(max_examples=60, deadline=None)


def adapter_directory(path: Path, table: torch.Tensor, *, name: str = "table") -> Path:
    path.mkdir()
    save_file({name: table}, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text("{}")
    return path


def ask(engine: ExactEngine, requests: list[Request]) -> list[Result | None]:
    engine.submit(requests)
    results: dict[Request, Result | None] = {}
    while len(results) < len(requests):
        for end in engine.step():
            assert end.error is None
            results[end.request] = end.result
    return [results[request] for request in requests]


@pytest.mark.promise(number=17)
@quick
@given(models)
def test_every_row_is_normalised(model: NGram) -> None:
    rows = model.table.reshape(-1, model.vocab_size)
    assert rows.double().logsumexp(-1).abs().max() < 1e-6
    assert model.table.dtype == torch.float32


@quick
@given(models, st.lists(st.just(0), max_size=3), st.integers(0, 3))
def test_texts_ended_and_unfinished_have_probability_one(
    model: NGram, prompt: list[int], max_tokens: int
) -> None:
    in_order = [*model.enumerate(prompt, max_tokens, unfinished=True)]
    texts = dict(in_order)
    assert [text for text, _ in in_order] == sorted(texts)
    assert sum(map(math.exp, texts.values())) == pytest.approx(1.0, abs=1e-5)
    ended = dict(model.enumerate(prompt, max_tokens))
    eos = model.eos_token_id
    assert ended == {text: lp for text, lp in texts.items() if text and text[-1] == eos}
    for text, logprob in texts.items():
        assert len(text) <= max_tokens
        assert eos not in text[:-1]
        assert len(text) == max_tokens or text in ended
        rows = [model.row([*prompt, *text[:index]]) for index in range(len(text))]
        steps = [float(row[token]) for row, token in zip(rows, text, strict=True)]
        assert logprob == pytest.approx(sum(steps), abs=1e-6)
        assert logprob > -math.inf


def test_only_the_last_k_tokens_count_and_short_contexts_are_padded() -> None:
    model = NGram.random(5, order=2, seed=2)
    for copy in (model.row([1]), model.table):
        copy.fill_(0.0)
    assert torch.equal(model.row([4, 4, 1, 3]), model.row([0, 1, 3]))
    assert not torch.equal(model.row([1, 3]), model.row([2, 3]))
    assert torch.equal(model.row([3]), model.row([0, 3]))
    assert torch.equal(model.row([]), model.row([0, 0]))
    assert torch.equal(NGram.random(5, order=0).row([1]), NGram.random(5, order=0).row([]))


@pytest.mark.parametrize(
    "table",
    [
        torch.zeros(2, 3),
        torch.zeros(2, 2),
        torch.tensor(0.0),
        torch.tensor([0.0, math.nan, 0.0]),
        torch.tensor([0.0, math.inf, 0.0]),
        torch.full((3,), -math.inf),
        torch.tensor([[0.0, 0.0, 0.0], [-math.inf] * 3, [0.0, 0.0, 0.0]]),
    ],
)
def test_tables_without_a_distribution_are_refused(table: torch.Tensor) -> None:
    with pytest.raises(InvalidRequest, match="table"):
        NGram([b"a", b"b", b"c"], table)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NGram([b"a"], torch.zeros(1), eos_token_id=1), "not in 0"),
        (lambda: NGram.random(3, order=-1), "order"),
        (lambda: NGram.random(3, zeros=1.5), "zeros"),
        (lambda: NGram.random(3).row([3]), "outside"),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        make()


@quick
@given(model=models)
def test_a_saved_model_loads_as_it_was(
    model: NGram, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("saved") / "model"
    model.save(directory)
    loaded = NGram.load(directory)
    assert loaded.vocabulary == model.vocabulary
    assert loaded.eos_token_id == model.eos_token_id
    torch.testing.assert_close(loaded.table, model.table, atol=1e-6, rtol=0.0)


def test_loading_what_is_not_there_says_so(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    save_file({"weights": torch.zeros(1)}, tmp_path / "other" / "ngram.safetensors")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "ngram.safetensors").write_bytes(b"torn")
    for name in ("nowhere", "other", "torn"):
        with pytest.raises(ModelNotFound, match=r"NGram\.save"):
            NGram.load(tmp_path / name)


def test_rows_are_the_tables() -> None:
    for order in range(3):
        model = NGram.random(7, order=order, seed=order, zeros=0.4)
        contexts = [tuple(torch.randint(7, (length,)).tolist()) for length in range(1, 13)]
        found = ask(ExactEngine(model, max_batch_size=5), [*map(LogprobsRequest, contexts)])
        for context, row in zip(contexts, found, strict=True):
            torch.testing.assert_close(row, model.row(context), atol=1e-6, rtol=0.0)


def g_test(outcomes: list[Result | None], logprobs: dict[tuple[int, ...], float]) -> float:
    """The p-value of samples under a law, cells of fewer than 5 expected ones taken together."""
    total = len(outcomes)
    rare = [text for text, logprob in logprobs.items() if total * math.exp(logprob) < 5]
    cells = [[text] for text in logprobs if text not in rare] + ([rare] if rare else [])
    assert all(outcome in logprobs for outcome in outcomes)
    statistic = 0.0
    for cell in cells:
        found = sum(outcome in cell for outcome in outcomes)
        if found:
            expected = total * sum(math.exp(logprobs[text]) for text in cell)
            statistic += 2 * found * math.log(found / expected)
    return float(chi2.sf(statistic, len(cells) - 1))


def test_two_thousand_samples_are_drawn_from_the_model() -> None:
    model = NGram.random(5, order=1, seed=4, zeros=0.2, eos_token_id=0)
    engine = ExactEngine(model, max_batch_size=500)
    asked: list[Request] = [
        SampleRequest((1, 2), max_tokens=3, stop_token_ids=frozenset({0}), seed=seed)
        for seed in range(2000)
    ]
    law = {
        text[:-1] if text[-1] == 0 else text: logprob
        for text, logprob in model.enumerate([1, 2], 3, unfinished=True)
    }
    assert g_test(ask(engine, asked), law) > LEVEL


@pytest.mark.promise(number=13)
def test_the_engine_keeps_the_protocol(tmp_path: Path) -> None:
    model = NGram.random(50, order=2)
    paths = [
        adapter_directory(tmp_path / str(seed), NGram.random(50, order=2, seed=seed).table)
        for seed in (1, 2)
    ]
    check_engine(lambda: ExactEngine(model), adapter_paths=paths)


def test_the_smallest_engine_keeps_the_protocol() -> None:
    model = NGram.random(3, zeros=0.2, seed=1)
    check_engine(lambda: ExactEngine(model, max_model_len=16, max_batch_size=1))


def test_adapters_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    engine = ExactEngine(NGram.random(4))
    torn = adapter_directory(tmp_path / "torn", torch.zeros(1))
    (torn / "adapter_model.safetensors").write_bytes(b"torn")
    wrong = [
        adapter_directory(tmp_path / "shape", torch.zeros(3, 3)),
        adapter_directory(tmp_path / "order", torch.zeros(4)),
        adapter_directory(tmp_path / "name", torch.zeros(4, 4), name="weights"),
        adapter_directory(tmp_path / "dead", torch.full((4, 4), -math.inf)),
        torn,
        tmp_path / "nowhere",
    ]
    for path in wrong:
        with pytest.raises(InvalidAdapter, match=path.name):
            engine.add_adapter(Adapter("a", 1), path)
    assert "0 adapters" in repr(engine)
