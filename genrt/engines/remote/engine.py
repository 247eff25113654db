"""The Engine protocol over a genrt server: each step is one HTTP call for all requests in progress.

The server computes rows, draws, candidates, top tokens and scores. Samples and completions are drawn here
from rows, a token a step. Draws carry seeds, so that a repeated call gives the same answer. Adapters are
bound when the connection is made. A server with another model or other weights is a lost engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from genrt.engines.protocol import Finished
from genrt.engines.remote.connection import ServerBusy, ServerConnection
from genrt.engines.remote.wire import (
    KINDS,
    Question,
    answers_to,
    flush_of,
    unpacked_tokenizer,
)
from genrt.engines.stepping import SteppedEngine, SteppedModel
from genrt.engines.weights import Layout
from genrt.errors import (
    EngineDied,
    EngineFailed,
    EngineUnsupported,
    GenrtError,
    InvalidAdapter,
)
from genrt.numbers import check_int
from genrt.questions.arguments import TOKEN_BYTES, Adapter
from genrt.questions.draws import DrawToken, PopulationDraw, batch_draw
from genrt.questions.reads import ReadRequest
from genrt.questions.request import Request
from genrt.questions.rows import LogprobsRequest
from genrt.questions.scores import ScoreRequest
from genrt.tokens.sampling import Draw

MOST_IN_BODY = 2**24
"""The approximate bound on the contexts, masks and scores of one call, in bytes; more take several
steps."""


class RemoteEngine(SteppedEngine):
    """The engine of a server.

    Attributes:
        adapters: the server's adapters at the time of connection.
        fingerprint: identifies the model and its weights at that time.
        reads: the kinds of requests that the server answers, beside rows.
        scores: whether the server scores texts, each in one forward.
        scores_rows: false: all rows of a text may be too many for a call.

    Raises:
        EngineDied: the server cannot be reached, or the key is wrong.
        EngineUnsupported: the URL is not a genrt server's.
    """

    reads = frozenset({*KINDS, PopulationDraw})
    scores_rows = False

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        timeout: float = 600.0,
        on_connection: Callable[[ServerConnection], None] = lambda connection: None,
    ) -> None:
        self._connection = ServerConnection(url, api_key, timeout)
        on_connection(self._connection)
        try:
            found = self._connection.get_json("/v1/runtime")
            self.fingerprint, most = str(found["fingerprint"]), int(found["most_questions"])
            self.scores = bool(found["scores"])
            self.adapters = {
                str(name): Adapter(str(name), int(version))
                for name, version in dict(found["adapters"]).items()
            }
            rows = _RemoteRows(check_int("vocab_size", found["vocab_size"], 1, 2**31))
            rows.tokenizer = unpacked_tokenizer(self._connection.get("/v1/tokenizer"))
            super().__init__(
                rows, max_model_len=int(found["max_model_len"]), max_batch_size=max(1, most)
            )
        except BaseException as error:
            self._connection.close()
            if not isinstance(error, KeyError | TypeError | ValueError | ServerBusy):
                raise
            raise EngineUnsupported(f"{url} is not a working genrt server: {error}") from error
        self._rows = rows
        self._adapters |= set(self.adapters.values())
        self._direct: dict[Request, None] = {}
        self._waited = 0.0
        self._drew_last = False
        self._timeout = timeout

    def __repr__(self) -> str:
        return f"RemoteEngine({self._connection.url!r}, {len(self._direct)} in progress)"

    def submit(self, requests: Sequence[Request]) -> None:
        """Take a flush as ``SteppedEngine.submit`` does; the next step sends it."""
        super().submit(requests)
        for request in requests:  # except refused ones, samples and completions
            if request in self._in_progress and isinstance(
                request, LogprobsRequest | ReadRequest | PopulationDraw | ScoreRequest
            ):
                del self._in_progress[request]
                self._direct[request] = None

    def step(self) -> list[Finished]:
        """Send the requests in progress, as many as a call takes, and wait for the answers. If the server
        is busy, the next step sends them again."""
        if self._refused or not (self._direct or self._in_progress):
            return super().step()
        started = time.perf_counter()
        drawing, direct = self._next()
        self._drew_last = bool(drawing)
        contexts = [LogprobsRequest(each.context, each.request.adapter) for each in drawing]
        asked: list[Question] = [*contexts]
        for request in direct:
            asked += _questions(request)
        try:
            results = self._asked(asked)
        except ServerBusy as busy:
            return self._wait(busy.seconds, started)
        except Exception as error:
            self._direct.clear()
            self._fail(error, started)
        self._waited = 0.0
        finished: list[Finished] = []
        place = len(contexts)
        for request in direct:
            count = len(request) if isinstance(request, PopulationDraw) else 1
            finished.append(_finished(request, results[place : place + count]))
            place += count
            del self._direct[request]
        counts = self._counts
        counts["rows"] += sum(isinstance(each, LogprobsRequest) for each in direct)
        counts["computed_tokens"] += sum(map(_token_count, asked[len(contexts) :]))
        counts["scored_tokens"] += sum(
            len(each) for each in direct if isinstance(each, ScoreRequest)
        )
        if not drawing:
            counts["failed"] += sum(end.error is not None for end in finished)
            counts["steps"] += 1
            counts["seconds"] += time.perf_counter() - started
            return finished
        self._rows.found = dict(zip(contexts, results, strict=False))
        try:
            return finished + super().step()
        finally:
            self._rows.found = {}

    def _next(self) -> tuple[list[Any], list[Request]]:
        """Return the contents of one call: texts drawn here and other requests, in turns if need be."""
        most = self.max_batch_size
        drawing = list(islice(self._in_progress.values(), most))
        direct = self._fitting(most - len(drawing))
        if self._direct and not direct and (self._drew_last or not drawing):
            return [], self._fitting(most) or [next(iter(self._direct))]
        return drawing, direct

    def _advance(self, group: Sequence[Any], adapter: Adapter | None) -> list[Finished]:
        """Draw from the rows of this step; a text whose row failed ends with that error."""
        failed: list[Finished] = []
        sound: list[Any] = []
        for each in group:
            row = self._rows.found[LogprobsRequest(each.context, adapter)]
            if isinstance(row, GenrtError):
                failed.append(Finished(each.request, error=row.fresh()))
            else:
                sound.append(each)
        return failed + super()._advance(sound, adapter) if sound else failed

    def cancel(self, requests: Sequence[Request]) -> None:
        """Forget these requests; no call is in progress between steps."""
        for request in requests:
            if self._direct.pop(request, self) is None:
                self._counts["cancelled"] += 1
        super().cancel(requests)

    def close(self) -> None:
        """Close the connection."""
        self._direct.clear()
        super().close()
        self._connection.close()

    def _fitting(self, most: int) -> list[Request]:
        """Return the oldest requests that fit in one call."""
        taken: list[Request] = []
        nbytes = 0
        for request in self._direct:
            most -= request.weight
            nbytes += request.nbytes
            nbytes += request.answer_bytes if isinstance(request, ScoreRequest) else 0
            if most < 0 or (taken and nbytes > MOST_IN_BODY):
                break
            taken.append(request)
        return taken

    def _asked(self, asked: Sequence[Question]) -> list[Any]:
        """Return the server's results, errors among them."""
        data = self._connection.post("/v1/flush", flush_of(asked, self.fingerprint))
        return answers_to(data, asked, self.vocab_size)

    def _wait(self, seconds: float, started: float) -> list[Finished]:
        """Wait for a busy server, up to the timeout."""
        self._waited += (seconds := min(max(seconds, 0.05), 1.0))
        if self._waited > self._timeout:
            waited, self._waited = self._waited, 0.0
            self._direct.clear()
            self._fail(EngineFailed(f"the server was busy for {waited:.0f} s"), started)
        time.sleep(seconds)
        return []

    def _fail(self, error: Exception, started: float) -> NoReturn:
        if isinstance(error, EngineUnsupported):
            error = EngineDied(str(error))
        super()._fail(error, started)


class _RemoteRows(SteppedModel):
    """Returns the rows received in this step."""

    device = torch.device("cpu")

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.found: dict[LogprobsRequest, Any] = {}

    def logits(self, contexts: Sequence[Sequence[int]], adapter: Adapter | None) -> Tensor:
        return torch.stack([self.found[LogprobsRequest(each, adapter)] for each in contexts])

    def load_adapter(self, adapter: Adapter, path: Path) -> None:
        raise InvalidAdapter(
            "this runtime is connected to a server: load the adapter there, and connect again"
        )

    def layout(self) -> Layout:
        raise EngineUnsupported("weights are replaced where the model is: connect again after that")


def _token_count(asked: Question) -> int:
    """Return the number of tokens of a question's text."""
    row = asked.row if isinstance(asked, ReadRequest) else asked
    return len(row.packed) // TOKEN_BYTES


def _questions(request: Request) -> list[Question]:
    """Return a request's questions: for a population, a draw for each sequence, or its row."""
    if not isinstance(request, PopulationDraw):
        return [cast("Question", request)]
    if request.laws:
        return [*request.rows]
    table = request.mask_table
    masks = [None] * len(request) if table is None else map(bytes, table)
    seeds = cast("Any", request.seeds).tolist()
    return [
        ReadRequest(row, DrawToken(mask, request.temperature, seed=seed))
        for row, mask, seed in zip(request.rows, masks, seeds, strict=True)
    ]


def _finished(request: Request, results: Sequence[Any]) -> Finished:
    """Return a finished request. A population fails with any of its draws."""
    failed = next((each for each in results if isinstance(each, GenrtError)), None)
    if failed is not None:
        return Finished(request, error=failed.fresh())
    if not isinstance(request, PopulationDraw):
        return Finished(request, results[0])
    if request.laws:
        results = [Draw.of(each, 0) for each in request.draw(results).tolist()]
    return Finished(request, batch_draw(results))
