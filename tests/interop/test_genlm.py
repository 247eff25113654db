"""genlm-control, genlm-bytes and genlm-backend's interface on a genrt runtime.

Statistics have fixed seeds and compare means with what enumeration knows, at five standard errors:
a right implementation fails one of the fifteen comparisons with a probability of 1e-5.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import math
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import genrt
from genrt.engines.exact import NGram
from genrt.errors import Closed, EngineNotInstalled, InvalidAdapter, InvalidRequest
from genrt.lm import AsyncLM
from tests import children
from tests.engines.test_exact import adapter_directory
from tests.small_models import make_llama

if TYPE_CHECKING:
    from genrt.interop.genlm import GenrtLM

pytestmark = pytest.mark.genlm

VOCABULARY = [b"a", b"b", b"ab", b"c", b"</s>"]
EOS = 4
MODEL = NGram.random(VOCABULARY, order=2, seed=3, eos_token_id=EOS)
PROMPT = [0, 1]


def as_genlm(lm: AsyncLM) -> GenrtLM:
    from genrt.interop import genlm

    return genlm.as_genlm(lm)


@pytest.fixture(scope="module")
def control() -> Any:
    importlib.import_module("genrt.interop.genlm")  # first, as its users do
    return importlib.import_module("genlm.control")


@pytest.fixture
def lm() -> Iterator[AsyncLM]:
    with genrt.load(MODEL, engine="exact") as lm:
        yield lm


@pytest.fixture
def model(lm: AsyncLM) -> GenrtLM:
    return as_genlm(lm)


@pytest.fixture(scope="module")
def llama_lm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLM]:
    """Its matrices have more rows than its tokenizer has tokens."""
    llama = make_llama(tmp_path_factory.mktemp("padded") / "model", vocab_size=1024)
    with genrt.load(str(llama), engine="transformers") as lm:
        yield lm


def seed_everything(seed: int) -> None:
    np.random.seed(seed)
    torch.manual_seed(seed)


def assert_close(rows: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(rows, expected, atol=1e-5, rtol=0)


# -- the interface --------------------------------------------------------------------------------


def test_it_has_every_method_of_genlm_backends_interface(model: GenrtLM) -> None:
    from genlm.backend.llm import AsyncLM as GenlmLM

    from genrt.interop.genlm import GenrtLM

    assert isinstance(model, GenlmLM)
    methods = {name for name in dir(GenlmLM) if not name.startswith("_")}
    assert {"next_token_logprobs", "batch_sample", "add_new_lora"} <= methods
    for name in methods - {"register"}:
        theirs = list(inspect.signature(getattr(GenlmLM, name)).parameters)
        assert list(inspect.signature(getattr(GenrtLM, name)).parameters) == theirs, name


async def test_rows_are_the_runtimes_one_by_one_together_and_synchronous(model: GenrtLM) -> None:
    contexts = [[0], [1, 2], [0]]
    rows = torch.stack([MODEL.row(context) for context in contexts])
    assert_close(await model.next_token_logprobs([1, 2]), rows[1])
    assert_close(model.next_token_logprobs_sync([1, 2]), rows[1])
    assert_close(await model.batch_next_token_logprobs(contexts), rows)
    assert_close(model.batch_next_token_logprobs_sync(contexts), rows)


async def test_concurrent_questions_are_one_step_of_the_engine(lm: AsyncLM, model: GenrtLM) -> None:
    await asyncio.gather(*(model.next_token_logprobs([token % 5]) for token in range(20)))
    assert (lm.statistics().engine.steps, lm.statistics().engine.rows) == (1, 5)


def test_the_byte_vocabulary_is_of_tokens_with_their_ids(model: GenrtLM) -> None:
    from genlm.backend import Token

    assert [type(token) for token in model.byte_vocab] == [Token] * 5
    assert [token.token_id for token in model.byte_vocab] == list(range(5))
    assert [token.byte_string for token in model.byte_vocab] == VOCABULARY
    assert model.str_vocab == [token.decode() for token in VOCABULARY]


def test_a_transformers_vocabulary_is_what_genlm_backend_makes_of_it(llama_lm: AsyncLM) -> None:
    from genlm.backend import decode_vocab

    model = as_genlm(llama_lm)
    tokens, texts = decode_vocab(llama_lm.tokenizer)
    assert list(map(bytes, model.byte_vocab)) == list(map(bytes, tokens))
    assert model.str_vocab == texts
    assert len(tokens) < llama_lm.vocab_size  # the matrices are padded
    row = llama_lm.next_token_logprobs_sync([5, 6])[: len(tokens)]
    assert_close(model.next_token_logprobs_sync([5, 6]), row - row.logsumexp(0))


def test_it_does_what_async_transformer_does_with_the_same_model(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    from genlm.backend.llm import AsyncTransformer
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = str(make_llama(tmp_path_factory.mktemp("theirs") / "model", vocab_size=320))
    theirs = AsyncTransformer(
        AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    )
    with genrt.load(path, engine="transformers") as lm:
        ours = as_genlm(lm)
        for token_ids in ([5, 6, 7], [9]):
            row = theirs.next_token_logprobs_uncached(token_ids)[: len(ours.byte_vocab)]
            expected = row.log_softmax(-1)
            row = ours.next_token_logprobs_sync(token_ids)
            torch.testing.assert_close(row, expected, atol=1e-4, rtol=0)
        for ask in (theirs.next_token_logprobs_uncached, ours.next_token_logprobs_sync):
            with pytest.raises(ValueError, match=r"(?i)empty"):
                ask([])


@pytest.mark.parametrize("size", [3, 5, 7])
async def test_rows_have_an_entry_for_each_token(lm: AsyncLM, size: int) -> None:
    from genrt.interop.genlm import GenrtLM

    vocabulary = [*VOCABULARY, b"x", b"y"][:size]
    model = GenrtLM(lm, byte_vocab=vocabulary, str_vocab=list(map(str, vocabulary)))
    rows = await model.batch_next_token_logprobs([[0], [1, 2]])
    kept = min(size, 5)
    expected = torch.stack([MODEL.row([0]), MODEL.row([1, 2])])[:, :kept].log_softmax(-1)
    assert rows.shape == (2, size)
    assert_close(rows[:, :kept], expected)
    assert torch.equal(rows[:, kept:], torch.full((2, size - kept), -math.inf))
    assert torch.equal(rows[1], model.next_token_logprobs_sync([1, 2]))


async def test_samples_are_the_runtimes_and_equal_seeds_give_equal_samples(
    lm: AsyncLM, model: GenrtLM
) -> None:
    options: dict[str, Any] = {"max_tokens": 9, "temperature": 0.8, "seed": 7}
    expected = await lm.sample(PROMPT, stop_token_ids=[EOS], **options)
    assert len(expected) > 0
    assert await model.sample(PROMPT, 9, [EOS], 0.8, 7) == expected
    batch = await model.batch_sample([PROMPT, [3], PROMPT], eos_token_ids=[EOS], **options)
    assert batch == [expected, await model.sample([3], eos_token_ids=[EOS], **options), expected]
    greedy = await model.sample(PROMPT, 9, [], 0.0)
    end = greedy[-1]
    assert await model.sample(PROMPT, 9, [end], 0.0) == greedy[: greedy.index(end)]
    unseeded = await model.batch_sample([PROMPT] * 8, 9, [])
    assert len(set(map(tuple, unseeded))) > 1


async def test_adapters_are_named_on_each_call(model: GenrtLM, tmp_path: Path) -> None:
    other = NGram.random(VOCABULARY, order=2, seed=4)
    model.add_new_lora(str(adapter_directory(tmp_path / "other", other.table)), "other")
    assert_close(await model.next_token_logprobs([1, 2], "other"), other.row([1, 2]))
    assert_close(model.next_token_logprobs_sync([1, 2]), MODEL.row([1, 2]))
    rows = await model.batch_next_token_logprobs([[0], [1]], lora_name="other")
    assert_close(rows[1], other.row([1]))
    assert await model.sample([1], 3, [], 0.0, lora_name="other") == [
        *(first := [int(other.row([1]).argmax())]),
        *(second := [int(other.row([1, *first]).argmax())]),
        int(other.row([*first, *second]).argmax()),
    ]
    model.remove_lora("other")
    with pytest.raises(ValueError, match="other"):
        await model.next_token_logprobs([1], "other")
    with pytest.raises(InvalidAdapter, match="no-such"):
        model.add_new_lora("no-such/adapter")


def test_what_cannot_be_done_is_said(lm: AsyncLM) -> None:
    model = as_genlm(lm)
    with pytest.raises(InvalidRequest, match="lora_name="):
        model.set_lora("path", "name")
    with pytest.raises(InvalidRequest, match="leave lora_name out"):
        model.clear_lora()
    with pytest.raises(ValueError, match="token"):
        model.next_token_logprobs_sync([])
    with pytest.raises(InvalidRequest, match=r"genrt\.load returns, got str: 'gpt2'"):
        as_genlm("gpt2")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="GenrtLM"):
        as_genlm(model)  # type: ignore[arg-type]


@pytest.mark.parametrize(("extra", "package"), [("genlm", "genlm.backend"), ("llamppl",) * 2])
def test_a_missing_package_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, extra: str, package: str
) -> None:
    importlib.import_module("genrt.interop.genlm")
    monkeypatch.setitem(sys.modules, f"{package}.{'llm' if extra == 'genlm' else 'llms'}", None)
    monkeypatch.delitem(sys.modules, f"genrt.interop.{extra}", raising=False)
    with pytest.raises(EngineNotInstalled, match=re.escape(f"pip install 'genrt[{extra}]'")):
        importlib.import_module(f"genrt.interop.{extra}")


def test_the_runtime_is_closed_by_whoever_opened_it() -> None:
    with genrt.load(MODEL, engine="exact") as lm:
        model = as_genlm(lm)
        model.next_token_logprobs_sync([1])
        model.cleanup()
        assert lm.statistics().cache.rows == 1
        model.clear_cache()
        assert lm.statistics().cache.rows == 0
        model.next_token_logprobs_sync([1])
    with pytest.raises(Closed):
        model.next_token_logprobs_sync([1])


LEAVES_ALONE = """
import json, logging, os, warnings
import genrt.engines.vllm.opening

warnings.simplefilter("error", RuntimeWarning)
logging.getLogger("vllm").setLevel(logging.ERROR)
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
before, filters = dict(os.environ), list(warnings.filters)
import genrt.interop.llamppl
import llamppl, genlm.backend
changed = {name for name in before | os.environ if before.get(name) != os.environ.get(name)}
print(json.dumps([
    sorted(changed), logging.getLogger("vllm").level, warnings.filters == filters,
    genlm.backend.llm.vllm.HAS_VLLM,
]))
"""


@pytest.mark.proof
@pytest.mark.vllm
def test_the_process_is_left_as_it_was() -> None:
    """Where vLLM is imported already, which sets some of its own."""
    ran = subprocess.run(
        [sys.executable, "-c", LEAVES_ALONE],
        capture_output=True,
        text=True,
        timeout=children.ALARM_SECONDS,
        env=children.environment(),
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == [[], 40, True, True]


# -- genlm-control and genlm-bytes on a model whose every probability is known ---------------------

PATTERN = r"a(b|ab)*c?"
LONGEST = 5


def exact_masses() -> dict[str, float]:
    """The probability of each text that matches and ends within ``LONGEST`` tokens."""
    masses: dict[str, float] = defaultdict(float)
    for tokens, logprob in MODEL.enumerate(PROMPT, LONGEST):
        text = b"".join(VOCABULARY[token] for token in tokens[:-1]).decode()
        if re.fullmatch(PATTERN, text):
            masses[text] += math.exp(logprob)
    return masses


@pytest.mark.parametrize("sampler", ["AWRS", "eager"])
async def test_its_smc_has_the_right_evidence_and_posterior(
    control: Any, model: GenrtLM, sampler: str
) -> None:
    llm = control.PromptedLLM(model, prompt_ids=PROMPT)
    fsa = control.BoolFSA.from_regex(PATTERN)
    coerced = fsa.coerce(llm, f=b"".join)
    seed_everything(1)
    if sampler == "AWRS":
        tokens = control.AWRS(llm, coerced, seed=1)
    else:
        tokens = control.eager_token_sampler(llm, fsa)
    runs = []
    for _ in range(100):
        result = await tokens.smc(n_particles=10, ess_threshold=0.5, max_tokens=LONGEST)
        evidence = math.exp(result.log_ml)
        shares = result.decoded_posterior if evidence > 0 else {}
        masses = {text: evidence * share for text, share in shares.items() if share > 0}
        runs.append(defaultdict(float, masses))
    exact = exact_masses()
    texts = [text for text, _ in sorted(exact.items(), key=lambda item: -item[1])[:4]]
    assert {text for run in runs for text in run} <= exact.keys()
    check_mean([sum(run.values()) for run in runs], sum(exact.values()))
    for text in texts:
        check_mean([run[text] for run in runs], exact[text])


def check_mean(values: list[float], expected: float) -> None:
    standard_error = np.std(values, ddof=1) / len(values) ** 0.5
    assert 0 < standard_error < 0.5 * expected
    assert abs(np.mean(values) - expected) < 5 * standard_error


async def test_its_potentials_are_the_models_probabilities(control: Any, model: GenrtLM) -> None:
    llm = control.PromptedLLM(model, prompt_ids=PROMPT, temperature=0.7)
    text = [model.byte_vocab[token] for token in (2, 0, 3)]
    rows = [(MODEL.row(PROMPT + [2, 0, 3][:i]) / 0.7).log_softmax(-1) for i in range(4)]
    expected = sum(float(row[token]) for row, token in zip(rows, (2, 0, 3), strict=False))
    assert await llm.prefix(text) == pytest.approx(expected, abs=1e-5)
    assert await llm.complete(text) == pytest.approx(expected + float(rows[3][EOS]), abs=1e-5)
    weights = await llm.logw_next(text)
    assert float(weights[control.EOS]) == pytest.approx(float(rows[3][EOS]), abs=1e-5)


async def test_genlm_bytes_has_the_mass_of_every_first_byte(
    control: Any, llama_lm: AsyncLM
) -> None:
    from genlm.bytes import BeamParams, ByteBeamState

    model = as_genlm(llama_lm)
    row = model.next_token_logprobs_sync([model.tokenizer.bos_token_id]).exp().double()
    masses = np.zeros(256)
    for token, probability in zip(model.byte_vocab[2:], row[2:].tolist(), strict=True):
        masses[token[0]] += probability
    state = await ByteBeamState.initial(model, BeamParams(K=1, eos_byte_strings=[b"</s>"]))
    try:
        found = await state.logp_next()
        bytes_of = [math.exp(found[byte]) for byte in range(256)]
    finally:
        await state.cleanup()
    # Its beam may spell special tokens too: the byte "<" has their mass as well, but for the end's.
    masses[ord("<")] += float(row[0])
    assert bytes_of == pytest.approx(masses, abs=1e-5)
