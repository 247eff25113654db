"""AsyncLM.connect: a runtime over a server answers as the one that is served, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import math
import socket
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import genrt
from genrt.constraints import regex
from genrt.engines.exact import ExactEngine, NGram
from genrt.engines.remote.engine import RemoteEngine
from genrt.engines.remote.wire import (
    answers_of,
    answers_to,
    flush_of,
    flush_to,
    packed_tokenizer,
    unpacked_tokenizer,
)
from genrt.errors import EngineFailed, EngineUnsupported, InvalidRequest, NotFinite
from genrt.inference import SMC, Law, TextModel
from genrt.lm import AsyncLM
from genrt.questions.arguments import Adapter
from genrt.questions.draws import DrawToken
from genrt.questions.reads import Candidates, ReadRequest, TopTokens, TopWithTail
from genrt.questions.rows import Limits, LogprobsRequest
from genrt.questions.scores import ScoreRequest, Wanted
from genrt.server import Server, ServerLimits, serving
from genrt.testing import check_engine
from genrt.tokens.sampling import Draw, TopLogprobs
from genrt.tokens.vocabulary import BytesTokenizer
from tests import inside
from tests.answers import READS
from tests.apart import drawn_apart
from tests.inside import adapters_of, system_thread, thread_of
from tests.scoring_engine import ScoringEngine
from tests.scripted import Gate, ScriptedEngine, expected_row, logprobs
from tests.small_models import make_tokenizer
from tests.waiting import until

VOCABULARY = [b"a", b"b", b"c", b"ab", b" ", b"1", b"2", b""]
MODEL = NGram.random(VOCABULARY, order=2, seed=4, eos_token_id=7)
KEY = "open-sesame-42"


@pytest.fixture(scope="module")
def lm() -> Iterator[AsyncLM]:
    with genrt.load(engine=lambda: ExactEngine(MODEL, max_model_len=48)) as lm:
        yield lm


@pytest.fixture(scope="module")
def server(lm: AsyncLM) -> Iterator[Server]:
    with serving(lm, api_key=KEY) as server:
        yield server


def remote_engine(server: Server, **options: Any) -> RemoteEngine:
    return RemoteEngine(str(server.url), KEY, **options)


@pytest.fixture(scope="module")
def scoring() -> Iterator[Server]:
    """A server of an engine that scores."""
    with (
        genrt.load(engine=lambda: ScoringEngine(MODEL, max_model_len=48)) as lm,
        serving(lm, api_key=KEY) as server,
    ):
        yield server


def test_the_engine_of_a_server_keeps_the_protocol(scoring: Server) -> None:
    check_engine(lambda: remote_engine(scoring))


async def test_scores_are_sent_as_such(lm: AsyncLM, scoring: Server, server: Server) -> None:
    """One question each, computed over there; whole rows travel one by one."""
    async with await AsyncLM.connect(str(scoring.url), api_key=KEY, cache_bytes=0) as remote:
        text = [1, 2, 3, 4, 5, 6]
        asked = [([1], [2, 3, 4]), ([2, 5], [6, 1]), ([3], [4]), ([1], [2, 3, 4])]
        contexts, continuations = map(list, zip(*asked, strict=True))
        here = await remote.batch_score(contexts, continuations)
        there = await lm.batch_score(contexts, continuations)
        assert all(torch.equal(*pair) for pair in zip(here, there, strict=True))
        own = remote.statistics().engine
        assert (own.steps, own.scored_tokens, own.requests) == (1, 5, 3)
        population, same = remote.population(contexts), lm.population(contexts)
        here = await population.score(continuations, temperature=0.4)
        there = await same.score(continuations, temperature=0.4)
        assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(here, there, strict=True))
        rows = torch.cat([each async for each in remote.prompt_rows(text, chunk=2)])
        assert torch.equal(rows, torch.cat([each async for each in lm.prompt_rows(text, chunk=2)]))
        with pytest.raises(genrt.ContextTooLong):
            await remote.score([1] * 48, [2, 3])
        assert len(await remote.score([1], [2] * 48)) == 48
    engine = remote_engine(server)  # as of a client that has met another server at this place
    engine.submit([request := ScoreRequest(LogprobsRequest([1, 2, 3]).packed, 1)])
    [end] = engine.step()
    assert end.request is request
    assert isinstance(end.error, EngineUnsupported)
    engine.close()


async def test_every_question_has_the_answer_of_the_runtime_that_is_served(
    lm: AsyncLM, server: Server
) -> None:
    async with await AsyncLM.connect(str(server.url), api_key=KEY) as remote:
        assert (remote.vocab_size, remote.max_model_len) == (lm.vocab_size, lm.max_model_len)
        assert remote.byte_vocab == lm.byte_vocab
        contexts = [[1], [2, 3], [1]]
        asked: list[tuple[str, dict[str, Any]]] = [
            ("next_token_logprobs", {"token_ids": [1, 2]}),
            ("batch_next_token_logprobs", {"contexts": contexts}),
            ("draw", {"token_ids": [4], "mask": [1, 2, 5], "seed": 3}),
            ("draw", {"token_ids": [4], "temperature": 0.0}),
            ("batch_draw", {"contexts": contexts, "seed": 3, "masks": [None, [1, 2], None]}),
            ("token_logprobs", {"token_ids": [5], "candidates": [1, 1, 6]}),
            ("token_logprobs", {"token_ids": [5], "candidates": []}),
            ("top_logprobs", {"token_ids": [5, 1], "k": 3}),
            ("score", {"token_ids": [1], "continuation": [2, 3, 4]}),
            ("sample", {"token_ids": [1], "max_tokens": 5, "seed": 8}),
            ("generate", {"prompt": "ab", "regex": "[ab]{2}", "max_tokens": 4, "seed": 2}),
        ]
        for method, arguments in asked:
            here = await getattr(remote, method)(**arguments)
            there = await getattr(lm, method)(**arguments)
            if method == "generate":
                here, there = (here.text, here.token_ids), (there.text, there.token_ids)
            assert str(here) == str(there), method
            if isinstance(here, torch.Tensor):
                assert torch.equal(here, there)


async def test_a_sampler_written_for_one_runs_on_the_other(lm: AsyncLM, server: Server) -> None:
    def smc(own: AsyncLM) -> SMC:
        constraint = regex("[ab]{1,4}1", own)
        return SMC(TextModel(own, "a", max_tokens=6, constraint=constraint), num_particles=12)

    async with await AsyncLM.connect(str(server.url), api_key=KEY) as remote:
        here, there = await smc(remote).run(3), await smc(lm).run(3)
        assert here.posterior() == there.posterior()
        assert here.log_evidence == pytest.approx(there.log_evidence, abs=1e-6)
        # Draws are answered over there: no row of a step comes here.
        assert remote.statistics().engine.rows == 0


async def test_the_laws_of_a_text_are_multiplied_here(lm: AsyncLM, server: Server) -> None:
    def smc(own: AsyncLM) -> SMC:
        laws = [Law(own, "a", power=2.0), Law(own, "bc", temperature=0.7)]
        return SMC(TextModel(laws, max_tokens=6), num_particles=12)

    async with await AsyncLM.connect(str(server.url), api_key=KEY) as remote:
        here, there = await smc(remote).run(3), await smc(lm).run(3)
        assert here.posterior() == there.posterior()
        assert here.log_evidence == pytest.approx(there.log_evidence, abs=1e-6)


async def test_a_flush_that_is_larger_than_a_call_takes_several(lm: AsyncLM) -> None:
    """Populations and samples share the calls of a server."""
    with serving(lm, limits=ServerLimits(contexts=5)) as server:
        async with await AsyncLM.connect(str(server.url), cache_bytes=0) as remote:
            contexts = [[1, each % 7, each // 7] for each in range(23)]
            before = remote.statistics().engine
            drawn = await remote.batch_draw(contexts, seed=1)
            assert remote.statistics().engine.steps == before.steps + 5
            expected = await drawn_apart(lm, contexts, seed=1)
            assert torch.equal(drawn.token_ids, expected.token_ids)
            before = remote.statistics().engine
            assert len((await remote.population([1], 12).draw(seed=1)).token_ids) == 12
            assert remote.statistics().engine.computed_tokens == before.computed_tokens + 12
            samples = [remote.sample([1, each], max_tokens=9, seed=each) for each in range(4)]
            there = [lm.sample([1, each], max_tokens=9, seed=each) for each in range(4)]
            draws = [remote.population([2, each], 5).draw(seed=1) for each in range(4)]
            sampling = [asyncio.ensure_future(each) for each in samples]
            await asyncio.gather(*draws)  # which take turns with them
            assert not all(each.done() for each in sampling)
            assert await asyncio.gather(*sampling) == await asyncio.gather(*there)


def save_adapter(directory: Path, seed: int) -> Path:
    model = NGram.random(VOCABULARY, order=2, seed=seed, eos_token_id=7)
    directory.mkdir()
    (directory / "adapter_config.json").write_text("{}")
    save_file({"table": model.table}, directory / "adapter_model.safetensors")
    return directory


async def test_adapters_are_the_servers(tmp_path: Path) -> None:
    first, second = (save_adapter(tmp_path / str(seed), seed) for seed in (9, 10))
    with genrt.load(engine=lambda: ExactEngine(MODEL, max_model_len=48)) as own:
        for name in ("style", "gone"):
            own.add_adapter_sync(name, first)
        with serving(own) as server:
            async with await AsyncLM.connect(str(server.url)) as remote:
                assert remote.adapters == ("style", "gone")
                before = await remote.next_token_logprobs([1], adapter="style")
                assert torch.equal(before, await own.next_token_logprobs([1], adapter="style"))
                assert not torch.equal(before, await remote.next_token_logprobs([1]))
                with pytest.raises(genrt.InvalidAdapter, match="load the adapter there"):
                    await remote.add_adapter("another", first)
                for name in ("style", "new"):
                    own.add_adapter_sync(name, second)
                own.remove_adapter("gone")
                with pytest.raises(genrt.UnknownAdapter, match="connect again"):
                    await remote.next_token_logprobs([2], adapter="style")
                gone, there = await asyncio.gather(
                    remote.draw([2], adapter="gone"), remote.draw([2]), return_exceptions=True
                )
                assert isinstance(gone, genrt.UnknownAdapter)
                assert isinstance(there, Draw)
                await remote.arestart()  # and has the adapters of now
                assert set(remote.adapters) == {"style", "new"}
                for name in remote.adapters:
                    row = await remote.next_token_logprobs([1], adapter=name)
                    assert torch.equal(row, await own.next_token_logprobs([1], adapter=name))
                    assert not torch.equal(row, before)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


async def test_a_server_that_is_lost_is_found_again_where_it_comes_back(lm: AsyncLM) -> None:
    port = free_port()
    first = serving(lm, port=port, shutdown_seconds=0.1).start()
    remote = await AsyncLM.connect(str(first.url), restart="auto")
    plain = await AsyncLM.connect(str(first.url))
    expected = await lm.next_token_logprobs([1])
    assert torch.equal(await remote.next_token_logprobs([1]), expected)
    first.close()
    with pytest.raises(genrt.EngineDied, match="cannot be reached"):
        await plain.next_token_logprobs([2])
    with serving(lm, port=port):
        assert torch.equal(await remote.next_token_logprobs([2]), await lm.next_token_logprobs([2]))
        with pytest.raises(genrt.EngineDied):
            await plain.next_token_logprobs([2])
        await plain.arestart()
        assert torch.equal(await plain.next_token_logprobs([2]), await lm.next_token_logprobs([2]))
        await remote.aclose()
        await plain.aclose()


@pytest.mark.parametrize("restart", [None, "auto"])
async def test_new_weights_on_the_server_end_a_connection(restart: Any) -> None:
    own, other = (NGram.random(VOCABULARY, order=1, seed=seed) for seed in (5, 6))
    with (
        genrt.load(engine=lambda: ExactEngine(own, max_model_len=48)) as lm,
        serving(lm) as server,
    ):
        remote = await AsyncLM.connect(str(server.url), restart=restart)
        before = await remote.next_token_logprobs([1])
        await lm.update_weights({"table": other.table})
        with pytest.raises(genrt.EngineFailed):
            await remote.next_token_logprobs([2])
        with pytest.raises(genrt.EngineFailed, match="connect again"):  # its cache has old rows
            await remote.arestart()
        await remote.aclose()
        again = await AsyncLM.connect(str(server.url))
        row = await again.next_token_logprobs([1])
        assert torch.equal(row, await lm.next_token_logprobs([1]))
        assert not torch.equal(row, before)
        with pytest.raises(genrt.EngineUnsupported, match="where the model is"):
            await again.update_weights({"table": own.table})
        await again.aclose()


async def test_a_busy_server_is_asked_again() -> None:
    held = Gate()
    engine = ScriptedEngine(gate=held)
    with (
        genrt.load(engine=lambda: engine) as lm,
        serving(lm, limits=ServerLimits(requests=1)) as server,
    ):
        remote = await AsyncLM.connect(str(server.url))
        other = await AsyncLM.connect(str(server.url))
        first = asyncio.create_task(remote.next_token_logprobs([1]))
        await asyncio.to_thread(held.wait_until_held)
        second = asyncio.create_task(other.next_token_logprobs([2]))
        await asyncio.to_thread(_until_it_waits, inside.engine_of(other))
        held.open()
        assert torch.equal(await first, expected_row(logprobs(1)))
        assert torch.equal(await second, expected_row(logprobs(2)))
        await remote.aclose()
        await other.aclose()


def _until_it_waits(engine: RemoteEngine) -> None:
    while not engine._waited:
        assert engine.statistics().steps == 0


@pytest.mark.parametrize(
    "url",
    [
        *("", "nowhere", "ftp://x", "http://", "http://x:99999", None, 8, "file:///etc/passwd"),
        *("http://[::1", "http://a b", "http://x/\u00e9", "http://\u00e9..com", "http://x/\0"),
        *("http://\udcff", f"http://{'a' * 70}.com", "http://me:open-sesame@x", "http://x:-1"),
    ],
)
async def test_what_is_no_url_is_refused(url: Any) -> None:
    with pytest.raises(InvalidRequest, match="url") as raised:
        await AsyncLM.connect(url)
    assert "sesame" not in str(raised.value)


async def test_wrong_options_a_wrong_key_and_a_closed_port_say_what_is_wrong(
    server: Server,
) -> None:
    wrong: list[dict[str, Any]] = [{"timeout": 0}, {"timeout": "1"}, {"cache_bytes": -1}]
    wrong += [{"restart": "no"}, {"seed": -1}, {"api_key": 3}, {"api_key": "new\nline"}]
    for options in wrong:
        with pytest.raises(InvalidRequest):
            await AsyncLM.connect(str(server.url), **options)
    with pytest.raises(genrt.EngineDied, match="key is missing or wrong"):
        await AsyncLM.connect(str(server.url), api_key="another-key")
    with pytest.raises(genrt.EngineDied, match="cannot be reached"):
        await AsyncLM.connect(f"http://127.0.0.1:{free_port()}")


@contextlib.contextmanager
def canned(*answers: bytes) -> Iterator[str]:
    """The address of a server of its own kind: each connection gets the next of these bytes."""

    def run() -> None:
        for answer in answers:
            connection, _ = listening.accept()
            # A client that stops reading resets the connection; the next one is answered all the same.
            with connection, contextlib.suppress(ConnectionError):
                connection.recv(65536)
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            thread.join(30)


def ok(body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


NO_SERVERS = (
    *(b"", b"SSH-2.0-x\r\n", ok(b"hello"), ok(b"[]"), ok(b'{"vocab_size": 3}'), ok(b"null")),
    *(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", b"HTTP/1.1 500 x\r\n\r\n"),
    ok(b"{" * 50_000),
)


async def test_what_is_no_genrt_server_or_has_no_vocabulary_is_refused(server: Server) -> None:
    opening = json.loads(opening_of(server)[0].partition(b"\r\n\r\n")[2])
    sizes = [ok(json.dumps(opening | {"vocab_size": each}).encode()) for each in (0, 1.5, 2**40)]
    for answer in (*NO_SERVERS, *sizes):
        message = "vocab_size" if answer in sizes else "."
        refused = pytest.raises((EngineUnsupported, EngineFailed), match=message)
        with canned(answer) as url, refused:
            await AsyncLM.connect(url, timeout=20)


# -- servers that are lost, silent, busy or others by now ------------------------------------------


def opening_of(server: Server) -> tuple[bytes, bytes]:
    """What a server answers to who connects."""
    connection = remote_engine(server)._connection
    found = [ok(connection.get(path)) for path in ("/v1/runtime", "/v1/tokenizer")]
    connection.close()
    return found[0], found[1]


@pytest.mark.parametrize("kept", [0, 3, 20])
@pytest.mark.parametrize("restart", [None, "auto"])
async def test_an_answer_that_is_cut_off_is_of_a_server_that_is_lost(
    server: Server, kept: int, restart: Any
) -> None:
    opening, row = opening_of(server), torch.full((8,), -math.log(8.0))
    answer = ok(answers_of([row]))
    cut = answer[: answer.index(b"\r\n\r\n") + 4 + kept]
    with canned(*opening, cut, *((*opening, answer) if restart else ())) as url:
        async with await AsyncLM.connect(url, restart=restart) as remote:
            if restart:
                assert torch.equal(await remote.next_token_logprobs([1]), row)
            else:
                with pytest.raises(genrt.EngineDied, match="cannot be reached"):
                    await remote.next_token_logprobs([1])


async def test_nobody_waits_for_a_server_that_is_silent(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        asked = threading.Event()

        def serve() -> None:
            for answer in opening_of(server):
                with listening.accept()[0] as connection:
                    connection.recv(65536)
                    connection.sendall(answer)
            connection, _ = listening.accept()
            with connection:
                while connection.recv(65536):  # until the client hangs up
                    asked.set()

        thread = threading.Thread(target=serve)
        thread.start()
        remote = await AsyncLM.connect(url)
        question = asyncio.create_task(remote.next_token_logprobs([1]))
        await asyncio.to_thread(asked.wait, 30)
        engine = system_thread(remote)
        thread_of(remote).close(wait=False)  # as an interpreter does that exits
        with pytest.raises(genrt.Closed):
            await question
        await until(lambda: not engine.is_alive())
        await until(lambda: not thread.is_alive())


async def test_another_runtime_of_the_same_name_is_another_server() -> None:
    """Versions of weights and adapters count alike in both."""
    port = free_port()
    models = [NGram.random(VOCABULARY, order=2, seed=seed, eos_token_id=7) for seed in (5, 6)]
    remote = None
    for model in models:
        with (
            genrt.load(engine=lambda model=model: ExactEngine(model, max_model_len=48)) as own,  # type: ignore[misc]
            serving(own, port=port, shutdown_seconds=0.1) as server,
        ):
            if remote is None:
                remote = await AsyncLM.connect(str(server.url), restart="auto")
                assert torch.equal(
                    await remote.next_token_logprobs([1]), await own.next_token_logprobs([1])
                )
                continue
            with pytest.raises(genrt.EngineFailed):
                await remote.next_token_logprobs([2])
            with pytest.raises(genrt.EngineFailed):  # of which a row is cached
                await remote.next_token_logprobs([1])
            await remote.aclose()


async def test_rows_of_an_adapter_that_is_replaced_meanwhile_are_nobodys() -> None:
    own: list[AsyncLM] = []

    def row(request: LogprobsRequest) -> torch.Tensor:
        if request.adapter is not None:
            adapters_of(own[0]).by_name["style"] = Adapter("style", 7)
        return expected_row(request)

    with genrt.load(engine=lambda: ScriptedEngine(row=row)) as lm, serving(lm) as server:
        own.append(lm)
        adapters_of(lm).by_name["style"] = Adapter("style", 1)
        async with await AsyncLM.connect(str(server.url)) as remote:
            styled, plain = await asyncio.gather(
                remote.next_token_logprobs([1], adapter="style"),
                remote.next_token_logprobs([1]),
                return_exceptions=True,
            )
            assert isinstance(styled, genrt.UnknownAdapter)
            assert torch.equal(plain, expected_row(logprobs(1)))  # type: ignore[arg-type]


async def test_one_poisoned_context_fails_alone_over_there_too() -> None:
    """And ends its own sample alone."""
    poisoned = logprobs(1, 2)

    def row(request: LogprobsRequest) -> torch.Tensor:
        found = torch.full((8,), -math.inf)
        found[2] = 0.0
        return found

    engine = ScriptedEngine(errors={poisoned: NotFinite("it is poisoned")}, row=row)
    with genrt.load(engine=lambda: engine) as lm, serving(lm) as server:
        async with await AsyncLM.connect(str(server.url), cache_bytes=0) as remote:
            found = await asyncio.gather(
                *(remote.sample([each], max_tokens=4, seed=0) for each in (0, 1, 3)),
                *(remote.draw([each], seed=0) for each in (4, 5)),
                *(remote.next_token_logprobs(each) for each in ([1], [1, 2])),
                return_exceptions=True,
            )
    assert all(isinstance(each, NotFinite) for each in (found[1], found[6]))
    assert "it is poisoned" in str(found[6])
    assert [found[0], found[2]] == [[2, 2, 2, 2]] * 2
    assert all(isinstance(each, Draw) for each in found[3:5])
    assert torch.equal(found[5], row(poisoned))  # type: ignore[arg-type]


# -- the wire -------------------------------------------------------------------------------------

LIMITS = Limits(40, 16)
TRAVELLING = [each for each in READS if each in RemoteEngine.reads]
STYLE = Adapter("style", 3)
IDS = st.lists(st.integers(0, 39), min_size=1, max_size=9).map(tuple)


@st.composite
def flushes(draw: st.DrawFn) -> list[Any]:
    """Rows and reads of every kind that travels, some of equal contexts and masks."""
    asked: list[Any] = []
    for _ in range(draw(st.integers(0, 9))):
        row = LogprobsRequest(draw(IDS), draw(st.sampled_from([None, STYLE])))
        kind = draw(st.sampled_from([None, *TRAVELLING]))
        if draw(st.booleans()):
            text = LogprobsRequest((*row.token_ids, 7)).packed
            start, heat = draw(st.integers(1, len(row))), draw(st.sampled_from([1.0, 0.3, 1e300]))
            wanted: Wanted = draw(st.sampled_from(["greedy", "logprobs", "top"]))
            top = draw(st.integers(1, 40)) if wanted == "top" else 0
            asked.append(ScoreRequest(text, start, row.adapter, 0, wanted, heat, top))
            continue
        if kind is None:
            asked.append(row)
            continue
        generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        asked.append(
            ReadRequest(row, draw(st.sampled_from([*READS[kind].examples(40, generator)])))
        )
    return asked


@settings(deadline=None)
@given(asked=flushes())
def test_a_flush_arrives_as_it_was_sent(asked: list[Any]) -> None:
    data = flush_of(asked, "m")
    found = flush_to(data, LIMITS, {None: None, "style": STYLE}.__getitem__, model="m", most=99)
    assert found == asked


def result_of(asked: Any) -> Any:
    """A result that a model can have."""
    wanted, row = getattr(asked, "wanted", None), torch.randn(40).log_softmax(-1)
    if isinstance(wanted, TopWithTail) or wanted == "top":
        width = 2 * (asked.top if isinstance(asked, ScoreRequest) else wanted.k) + 1
        shape = (len(asked), width) if isinstance(asked, ScoreRequest) else (width,)
        return torch.randint(-(2**31), 2**31, shape).int()
    if isinstance(asked, ScoreRequest):
        scores = -torch.rand(len(asked))
        return torch.stack([scores, scores.round().abs()]) if wanted == "greedy" else scores
    if isinstance(wanted, DrawToken):
        logprob = -1.5 if wanted.temperature else 0.0
        if wanted.mask is None:
            return Draw(3, logprob, 0.0)
        allowed = [n for n in range(40) if wanted.mask[n // 8] >> n % 8 & 1]
        return Draw(allowed[0], logprob, -0.5) if allowed else Draw(-1, -math.inf, -math.inf)
    if isinstance(wanted, TopTokens):
        return TopLogprobs(*reversed(row.topk(wanted.k)))
    return row[list(wanted.token_ids)] if isinstance(wanted, Candidates) else row


@settings(deadline=None)
@given(asked=flushes(), cut=st.integers(1, 8))
def test_answers_arrive_as_they_were_sent_or_not_at_all(asked: list[Any], cut: int) -> None:
    results = [*map(result_of, asked)]
    if results:
        results[0] = NotFinite("poison")
    data = answers_of(results)
    found = answers_to(data, asked, 40)
    for here, there in zip(results, found, strict=True):
        assert type(here) is type(there)
        assert str(here) == str(there)
    with pytest.raises(EngineFailed):
        answers_to(data[:-cut] if len(data) > 8 + cut else b"", asked, 40)
    with pytest.raises(EngineFailed):
        answers_to(data + b"\0" * cut, asked, 40)


@pytest.mark.parametrize(
    ("wanted", "result", "message"),
    [
        (DrawToken(None, seed=3), Draw(4, -0.5, -0.5), "outside the vocabulary"),
        (DrawToken(None, seed=3), Draw(math.nan, -0.5, -0.5), "outside the vocabulary"),  # type: ignore[arg-type]
        (DrawToken(None, seed=3), Draw(-2, -0.5, -0.5), "outside the vocabulary"),
        (DrawToken(None, seed=3), torch.zeros(4), "another form"),
        (
            TopTokens(2),
            TopLogprobs(torch.zeros(1, dtype=torch.int64), torch.zeros(1)),
            "another form",
        ),
        (TopWithTail(1), torch.zeros(3), "another form"),
        (Candidates((1, 2)), torch.zeros(4), "another form"),
        (None, torch.zeros(3), "another form"),
        (None, torch.zeros(2, 4), "another form"),
    ],
)
def test_an_answer_for_another_vocabulary_is_none(wanted: Any, result: Any, message: str) -> None:
    row = LogprobsRequest((1, 2))
    asked = row if wanted is None else ReadRequest(row, wanted)
    with pytest.raises(EngineFailed, match=message):
        answers_to(answers_of([result]), [asked], 4)


@pytest.mark.promise(number=35)
@settings(deadline=None)
@given(asked=flushes(), data=st.data())
def test_a_flush_that_was_changed_on_its_way_is_refused_or_another(
    asked: list[Any], data: st.DataObject
) -> None:
    sent = bytearray(flush_of(asked, "m"))
    for _ in range(data.draw(st.integers(1, 3))):
        sent[data.draw(st.integers(0, len(sent) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = flush_to(bytes(sent), LIMITS, {None: None, "style": STYLE}.get, model="m", most=9)
    except InvalidRequest:
        return
    assert len(found) <= 9


# -- tokenizers -----------------------------------------------------------------------------------


def test_tokenizers_arrive_as_they_were_sent() -> None:
    own = BytesTokenizer(VOCABULARY, eos_token_id=7)
    there = unpacked_tokenizer(packed_tokenizer(own))
    assert (there.byte_vocab, there.eos_token_id) == (own.byte_vocab, own.eos_token_id)
    assert unpacked_tokenizer(packed_tokenizer(None)) is None
    trained = make_tokenizer(300)
    trained.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    found = unpacked_tokenizer(packed_tokenizer(trained))
    assert found.get_vocab() == trained.get_vocab()
    assert found.encode("Paris is 1 city") == trained.encode("Paris is 1 city")
    assert (found.eos_token_id, found.chat_template) == (1, trained.chat_template)


@pytest.mark.parametrize(
    "files",
    [
        *({"../x.json": "{}"}, {"/etc/x.json": "{}"}, {"x.py": "1"}, {"a/x.json": "{}"}),
        *({"bytes_tokenizer.json": "[]"}, {"bytes_tokenizer.json": '{"vocabulary": 3}'}),
        {"x.json": "{}"},
        {f"{number}.json": "{}" for number in range(65)},
    ],
)
def test_what_is_no_tokenizer_is_refused(files: dict[str, str]) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    with pytest.raises(EngineFailed, match="tokenizer cannot be read"):
        unpacked_tokenizer(packed.getvalue())
    with pytest.raises(EngineFailed, match="tokenizer cannot be read"):
        unpacked_tokenizer(b"no archive")
