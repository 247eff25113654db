"""lm-evaluation-harness on a genrt runtime: its tasks, on local data, say what they say of ``hf``."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import genrt
from genrt.errors import ContextTooLong, EngineNotInstalled, InvalidRequest, UnknownAdapter
from genrt.lm import AsyncLM

LENGTH = 160
WORDS = ["the", "capital", "of", "France", "is", "Paris", "a", "particle", "text", "it", "goes"]
TASKS = {
    "choice": (
        "output_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: '{{choices}}'\n"
        "doc_to_target: gold\nmetric_list:\n  - metric: acc\n  - metric: acc_norm\n"
    ),
    "rolling": (
        "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
        "metric_list:\n  - metric: word_perplexity\n  - metric: bits_per_byte\n"
    ),
    "generate": (
        "output_type: generate_until\ndoc_to_text: '{{q}}'\ndoc_to_target: '{{answer}}'\n"
        "generation_kwargs:\n  until: ['a']\n  max_gen_toks: 12\n  do_sample: false\n"
        "metric_list:\n  - metric: exact_match\n"
    ),
}


def write_tasks(folder: Path) -> list[str]:
    """Tasks of every type, some of whose texts are longer than a context."""
    drawn = random.Random(0)

    def text(count: int) -> str:
        return " ".join(drawn.choice(WORDS) for _ in range(count))

    documents = [
        {
            "q": text(drawn.randint(3, 60)),
            "choices": [text(drawn.randint(1, 5)) for _ in range(4)],
            "gold": drawn.randrange(4),
            "text": text(drawn.randint(1, 150)),
            "answer": text(2),
        }
        for _ in range(24)
    ]
    data = folder / "documents.jsonl"
    data.write_text("\n".join(map(json.dumps, documents)))
    for name, rest in TASKS.items():
        source = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\n"
        (folder / f"{name}.yaml").write_text(
            f"task: local_{name}\n{source}test_split: test\n{rest}"
        )
    return [f"local_{name}" for name in TASKS]


@pytest.fixture(scope="module")
def lm(llama: Path) -> Iterator[AsyncLM]:
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": LENGTH}
    with genrt.load(str(llama), engine_options=options, cache_bytes=0) as lm:
        yield lm


def requests_of(*arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    kind: Any = "loglikelihood"
    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=n)
        for n, each in enumerate(arguments)
    ]


@pytest.mark.eval
@pytest.mark.vllm
@pytest.mark.proof
@pytest.mark.filterwarnings("ignore")
@pytest.mark.promise(number=38)
def test_tasks_of_every_type_are_what_hf_says(lm: AsyncLM, llama: Path, tmp_path: Path) -> None:
    from genrt.interop.lm_eval import as_lm_eval  # first: it quiets what the harness imports

    import lm_eval  # isort: skip
    from lm_eval.tasks import TaskManager

    names = write_tasks(tmp_path)
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)

    def evaluated(model: Any, **options: Any) -> Any:
        return lm_eval.simple_evaluate(
            model, tasks=names, task_manager=manager, bootstrap_iters=0, **options
        )

    before = lm.statistics()
    ours = evaluated(as_lm_eval(lm))
    since = lm.statistics().since(before)
    arguments = f"pretrained={llama},dtype=float32,max_length={LENGTH}"
    theirs = evaluated("hf", model_args=arguments, device="cpu", batch_size=1)
    compared = 0
    for name in names:
        pairs = zip(ours["samples"][name], theirs["samples"][name], strict=True)
        for one, other in pairs:
            assert one["doc"] == other["doc"]
            for mine, his in zip(one["resps"], other["resps"], strict=True):
                compared += 1
                if name == "local_generate":
                    assert mine == his
                elif name == "local_rolling":
                    assert mine[0] == pytest.approx(his[0], rel=1e-5, abs=1e-3)
                else:
                    assert mine[0][0] == pytest.approx(his[0][0], rel=1e-5, abs=1e-3)
                    assert mine[0][1] == his[0][1]
        for metric, value in theirs["results"][name].items():
            if isinstance(value, float):
                assert ours["results"][name][metric] == pytest.approx(value, rel=1e-4)
    assert compared == 24 * 6
    # A task's questions were asked together, and none of them as a row for each token.
    assert since.batcher.flushes < 40
    assert since.engine.scored_tokens > 10 * since.engine.rows


@pytest.mark.eval
@pytest.mark.vllm
@pytest.mark.proof
@pytest.mark.filterwarnings("ignore")
def test_edges_of_scores_and_arguments(lm: AsyncLM) -> None:
    from genrt.interop.lm_eval import as_lm_eval

    model = as_lm_eval(lm)
    greedy = lm.generate_sync("the capital", max_tokens=6, temperature=0.0)
    ids = list(greedy.token_ids)
    context = model.tok_encode("the capital")
    [(score, is_greedy), (_, other), (empty, trivial)] = model._loglikelihood_tokens(
        [(None, context, ids), (None, context, [*ids[:-1], ids[-1] ^ 1]), (None, context, [])]
    )
    assert is_greedy
    assert not other
    assert (empty, trivial) == (0.0, True)
    assert score == pytest.approx(float(lm.score_sync(context, ids).double().sum()), abs=1e-3)
    [(one, likeliest)] = model._loglikelihood_tokens([(None, context, ids[:1])])
    assert likeliest
    assert one == pytest.approx(float(lm.score_sync(context, ids[:1])[0]), abs=1e-3)
    # A text without a context is scored after the first special token.
    [found] = model.loglikelihood(requests_of(("", "Paris")), disable_tqdm=True)
    after = model.tok_encode("Paris", add_special_tokens=False)
    wanted = lm.score_sync([model.prefix_token_id], after)
    assert found[0] == pytest.approx(float(wanted.double().sum()), abs=1e-3)
    # What joins into one token with its context is scored by its own tokens: nothing is certain.
    whole = next(
        text
        for text in (token.decode(errors="replace") for token in lm.byte_vocab)
        if len(text) > 1 and text.isascii() and text.isalpha()
    )
    begun, more = whole[:-1], whole[-1]
    assert len(model.tok_encode(whole)) == 1
    [(score, _), (alone, _), (blank, _)] = model.loglikelihood(
        requests_of((begun, more), (f"{begun} ", f"{more}a"), (" ", more)), disable_tqdm=True
    )
    pairs = [(begun, more), (begun, f" {more}a")]
    encoded = [
        (model.tok_encode(one), model.tok_encode(other, add_special_tokens=False))
        for one, other in pairs
    ]
    encoded += [([model.prefix_token_id], model.tok_encode(f" {more}", add_special_tokens=False))]
    for got, (before, rest) in zip((score, alone, blank), encoded, strict=True):
        assert got == pytest.approx(float(lm.score_sync(before, rest).double().sum()), abs=1e-3)
        assert got < 0.0
    with pytest.raises(ContextTooLong):
        model._loglikelihood_tokens([(None, [1], [2] * (LENGTH + 2))])
    with pytest.raises(InvalidRequest, match="does not fit"):
        model.generate_until(requests_of(("a", {"until": ["b"], "max_gen_toks": 10_000})))
    for wrong, options, error in (
        ("gpt2", {}, InvalidRequest),
        (lm, {"max_gen_toks": 0}, InvalidRequest),
        (lm, {"add_bos_token": 1}, InvalidRequest),
        (lm, {"adapter": "none"}, UnknownAdapter),
    ):
        with pytest.raises(error):
            as_lm_eval(wrong, **options)  # type: ignore[arg-type]


def test_without_the_harness_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "genrt.interop.lm_eval", raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(EngineNotInstalled, match=r"pip install 'genrt\[eval\]'"):
        import genrt.interop.lm_eval  # noqa: F401
