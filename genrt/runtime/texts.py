"""Makes requests for samples and completions from prompts and conversations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from genrt.engines.protocol import check_supported, tokenizer_of
from genrt.errors import InvalidRequest
from genrt.numbers import check_options, shown
from genrt.questions.arguments import TokenIds
from genrt.questions.completions import (
    CompletionRequest,
    SampleOptions,
    SampleRequest,
    TurnOptions,
    completion_requests,
    sample_requests,
)
from genrt.questions.reads import KeptContext, Prefix, PrefixOptions, ReadRequest, WarmUpOptions
from genrt.questions.rows import Limits, row_request
from genrt.runtime.ask import Asker
from genrt.runtime.thread import EngineThread
from genrt.tokens import encoding

TimedRequests: TypeAlias = tuple[list[CompletionRequest], float | None]
"""Requests with their timeout in seconds."""


class Texts:
    """Makes the requests of one runtime."""

    def __init__(
        self, thread: EngineThread, asker: Asker, limits: Limits, nonces: Iterator[int]
    ) -> None:
        self._thread = thread
        self._limits = limits
        self._bound = asker.bound
        self._nonces = nonces

    def samples(
        self, contexts: Sequence[TokenIds], options: SampleOptions, *, method: str
    ) -> list[SampleRequest]:
        """Return a request for each context of a call of ``method``. Raises TypeError without
        ``max_tokens``; InvalidRequest, ContextTooLong, UnknownAdapter."""
        given: dict[str, Any] = {**options}
        bound = self._bound(given.pop("adapter", None))
        return sample_requests(self._limits, contexts, bound, self._nonces, method, given)

    def requests(
        self,
        prompts: Sequence[str | TokenIds],
        options: Mapping[str, Any],
        template: Mapping[str, Any] | None = None,
    ) -> TimedRequests:
        """Return a request for each prompt, and the timeout. A chat has options for the ``template``.
        Raises InvalidRequest, also for an option that the engine lacks; ContextTooLong, UnknownAdapter.
        """
        if isinstance(prompts, str):
            raise InvalidRequest("prompts must be a list of texts, got one of them: give [prompt]")
        if not isinstance(prompts, Sequence):
            raise InvalidRequest(f"prompts must be a list, got {shown(prompts)}")
        contexts = [
            encoding.encode_prompt(self._thread.engine.tokenizer, each)
            if isinstance(each, str)
            else each
            for each in prompts
        ]
        given: dict[str, Any] = {**options}
        seed, timeout = given.pop("seed", None), given.pop("timeout", None)
        bound = self._bound(given.pop("adapter", None))
        requests = completion_requests(
            self._limits, contexts, bound, self._nonces, seed, given, template
        )
        for decoding in dict.fromkeys(request.decoding for request in requests):
            check_supported(self._thread.engine, decoding)
        return requests, timeout

    def turn(self, messages: Sequence[Mapping[str, Any]], options: TurnOptions) -> TimedRequests:
        """Return a request for the next message of a conversation, and the timeout. Raises as
        ``requests``; InvalidRequest without a tokenizer or a template that takes the messages."""
        given: dict[str, Any] = {**options}
        tools, kwargs = given.pop("tools", None), given.pop("chat_template_kwargs", None)
        ids = encoding.encode_turn(tokenizer_of(self._thread.engine), messages, tools, kwargs)
        return self.requests([ids], given, kwargs or {})

    def prefix(self, prefix: Prefix, options: WarmUpOptions) -> tuple[ReadRequest, float | None]:
        """Return the request to compute and pin a prefix, and the timeout. Raises InvalidRequest,
        ContextTooLong, UnknownAdapter."""
        check_options("warm_up", options, WarmUpOptions.__annotations__)
        given: dict[str, Any] = {**options}
        timeout = given.pop("timeout", None)
        return self._pinned(prefix, **given), timeout

    def release(self, prefix: Prefix | None, options: PrefixOptions) -> None:
        """Unpin a prefix, or all; raises as ``prefix``."""
        check_options("cool_down", options, PrefixOptions.__annotations__)
        if prefix is not None:
            self._thread.release(self._pinned(prefix, **options).row)
        elif options:
            raise InvalidRequest(
                f"{', '.join(options)} belong to a prefix: name the one to give up"
            )
        else:
            self._thread.release(None)

    def _pinned(
        self,
        prefix: Prefix,
        *,
        adapter: str | None = None,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> ReadRequest:
        bound = self._bound(adapter)
        given: Any = prefix
        if isinstance(given, list | tuple) and given and isinstance(given[0], Mapping):
            tokenizer = tokenizer_of(self._thread.engine)
            given = encoding.encode_shared_turns(tokenizer, given, tools, chat_template_kwargs)
        elif tools is not None or chat_template_kwargs is not None:
            raise InvalidRequest(
                "tools and chat_template_kwargs belong to a conversation: give its first messages"
            )
        elif isinstance(given, str):
            given = encoding.encode_shared(self._thread.engine.tokenizer, given)
        return ReadRequest(row_request(self._limits, given, bound), KeptContext())

    def streamed(self, asked: TimedRequests) -> tuple[CompletionRequest, float | None]:
        """Return the request of a stream, and the timeout."""
        [request], timeout = asked
        return replace(request, streamed=True, nonce=next(self._nonces)), timeout
