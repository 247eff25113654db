"""Samples and texts on their way: those that wait for a slot of vLLM, and those that have one.

Rules:
    As many run at once as vLLM was to take requests (``max_num_seqs``). It has been given slots beside
    them, an eighth more and at least one, so that a logprobs request never waits for a long text to end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TypeAlias

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.llm_engine import LLMEngine

from genrt.engines.vllm.completions import COOLEST, HOTTEST, ORDERLY, Completions
from genrt.engines.vllm.native_texts import NativeTexts
from genrt.engines.vllm.requests import SEED, core_request
from genrt.errors import EngineFailed, GenrtError
from genrt.questions.completions import (
    CompletionRequest,
    NativeRequest,
    SampleRequest,
    Streamed,
    Told,
)
from genrt.questions.contexts import deciding_seed
from genrt.questions.request import Request, Result
from genrt.tokens.sampling import GREEDY_BELOW

__all__ = ["Generated", "Samples", "computed_tokens", "new_tokens", "sample_params"]

Generated: TypeAlias = SampleRequest | CompletionRequest | NativeRequest
"""What takes a slot of vLLM for many steps."""

Ended: TypeAlias = tuple[str, Result | GenrtError]
"""The id of a request with its result, or its error."""


class Samples:
    """The samples, completions and native texts of one vLLM engine.

    Args:
        llm_engine: the engine.
        slots: how many requests it runs at once, rows included.
        drawn_here: whether the capture draws the tokens; see ``sample_params``.
    """

    def __init__(self, llm_engine: LLMEngine, slots: int, *, drawn_here: bool) -> None:
        self.completions = Completions(llm_engine, drawn_here=drawn_here)
        shared = self.completions.structures, self.completions.spellings
        self.natives = NativeTexts(llm_engine, *shared, drawn_here=drawn_here)
        self._drawn_here = drawn_here
        self._most = slots - max(1, slots // 9)
        self._waiting: dict[Generated, None] = {}
        self._drawn: dict[str, list[int]] = {}  # by request id; a completion's are vLLM's to keep

    def __len__(self) -> int:
        """Return how many wait for a slot."""
        return len(self._waiting)

    @property
    def under_way(self) -> int:
        """How many have a slot."""
        return len(self._drawn)

    @property
    def waiting(self) -> list[Generated]:
        """Samples and completions that wait for a slot."""
        return [*self._waiting]

    def wait(self, requests: Sequence[Request]) -> None:
        """Have those among these requests wait for a slot."""
        self._waiting.update((each, None) for each in requests if isinstance(each, Generated))

    def admitted(self) -> Iterator[Generated]:
        """Yield those for which there is a slot; each is begun before the next is asked for."""
        while self._waiting and len(self._drawn) < self._most:
            request = next(iter(self._waiting))
            del self._waiting[request]
            yield request

    def begin(
        self, request_id: str, request: Generated, lora: LoRARequest | None
    ) -> EngineCoreRequest:
        """Return a request as vLLM's core takes it, and expect its tokens; raise what vLLM raises for a
        value that it does not take."""
        if isinstance(request, CompletionRequest):
            made = self.completions.begin(request_id, request, lora)
        elif isinstance(request, NativeRequest):
            made = self.natives.begin(request_id, request, lora)
        else:
            params = sample_params(request, drawn_here=self._drawn_here)
            made = core_request(request_id, request.token_ids, params, lora)
        self._drawn[request_id] = []
        return made

    def take(
        self, outputs: Sequence[EngineCoreOutput]
    ) -> tuple[list[Ended], list[str], list[EngineCoreOutput]]:
        """Return what a step's outputs end; the ids of those that vLLM is to abort: it goes on where a
        stop string has ended a text; and the outputs of other requests."""
        ended: list[Ended] = []
        others: list[EngineCoreOutput] = []
        texts, over, rest = self.completions.take(outputs)
        natives, more, rest = self.natives.take(rest)
        ended += [*texts, *natives]
        over += more
        for output in rest:
            drawn = self._drawn.get(output.request_id)
            if drawn is None:
                others.append(output)
                continue
            drawn += output.new_token_ids
            if output.finish_reason not in ORDERLY:
                reason = f"vLLM ended the request with {output.finish_reason}"
                ended.append((output.request_id, EngineFailed(reason)))
            elif output.finish_reason is not None:
                stopped = output.finish_reason == FinishReason.STOP
                ended.append((output.request_id, tuple(drawn[:-1] if stopped else drawn)))
        return ended, over, others

    def forget(self, request_ids: Collection[str]) -> None:
        """Forget what vLLM had or has ended; requests for rows are ignored."""
        for request_id in request_ids:
            self._drawn.pop(request_id, None)
        self.completions.forget(request_ids)
        self.natives.forget(request_ids)

    def progress(self, streamed: Sequence[Streamed]) -> list[Told | None]:
        """Return what each of these has drawn since the last call; ``None`` if that is nothing."""
        texts = [each for each in streamed if isinstance(each, CompletionRequest)]
        natives = [each for each in streamed if isinstance(each, NativeRequest)]
        told = iter(self.completions.progress(texts))
        of_natives = iter(self.natives.progress(natives))
        return [
            next(of_natives) if isinstance(each, NativeRequest) else next(told) for each in streamed
        ]

    def withdraw(self, unwanted: Collection[Request]) -> int:
        """Have these wait no more; return how many did."""
        gone = [request for request in self._waiting if request in unwanted]
        for request in gone:
            del self._waiting[request]
        return len(gone)

    def clear(self) -> None:
        """Forget those that wait."""
        self._waiting.clear()


def new_tokens(outputs: Sequence[EngineCoreOutput]) -> int:
    """Return how many tokens a step drew."""
    return sum([len(output.new_token_ids) for output in outputs])


def computed_tokens(outputs: Sequence[EngineCoreOutput]) -> int:
    """Return how many tokens a step put through the model: one for each that it drew, or a prompt's."""
    begun = [output for output in outputs if output.prefill_stats is not None]
    of_prompts: int = sum([output.prefill_stats.num_computed_tokens for output in begun])
    return new_tokens(outputs) - new_tokens(begun) + of_prompts


def sample_params(request: SampleRequest, *, drawn_here: bool) -> SamplingParams:
    """Return how vLLM is asked for a sample; raise what vLLM raises for a value it does not take.

    With ``drawn_here``, the capture draws the tokens, and is the one to know the seed."""
    greedy = request.temperature < GREEDY_BELOW
    params = SamplingParams(
        max_tokens=request.max_tokens,
        stop_token_ids=sorted(request.stop_token_ids),
        temperature=0.0 if greedy else min(max(request.temperature, COOLEST), HOTTEST),
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        ignore_eos=True,
        detokenize=False,
    )
    if not greedy:
        params.temperature = request.temperature
        if drawn_here:
            params.extra_args = {SEED: deciding_seed(request)}
        else:
            params.seed = deciding_seed(request)
    return params
