"""Completions in vLLM: options as vLLM takes them, and its outputs as texts.

vLLM's own input and output processors check the options, compile structures, detokenize and look for stop
strings.

Rules:
    The output processor reads ``READ_EVERY`` tokens of a text at once, for it costs more than all else
    that is done for a token. It reads each as it comes where a stop string may end the text there, where
    vLLM keeps log-probabilities, and where a parser takes one at a time. A stream's are read before it
    is told of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

from vllm import envs
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine import FinishReason as CoreFinishReason
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.output_processor import OutputProcessor

from genrt.engines.vllm.reasoning import NO_PARSER, Reasoning, ReasoningParsers
from genrt.engines.vllm.requests import LAW, TEXT_SEED
from genrt.engines.vllm.structures import GuidedStructures
from genrt.errors import EngineFailed, GenrtError, InvalidRequest
from genrt.questions.completions import Completion, CompletionRequest, Decoding, Delta, FinishReason
from genrt.questions.contexts import deciding_seed
from genrt.tokens.detokenizing import TextStream, ends_inside_character
from genrt.tokens.sampling import GREEDY_BELOW
from genrt.tokens.spellings import Spellings

__all__ = [
    "COOLEST",
    "HOTTEST",
    "ORDERLY",
    "READ_EVERY",
    "Completions",
    "Ended",
    "check_v2",
    "failure_of",
    "leave_out_prompt",
]

Ended: TypeAlias = tuple[str, Completion | GenrtError]
"""The id of a request with its text, or its error."""

COOLEST, HOTTEST = 0.01, 2.0
"""The temperatures that vLLM lets users give; its runners take any that is not greedy."""

ORDERLY = (None, CoreFinishReason.STOP, CoreFinishReason.LENGTH)
"""How an output's text goes on, or ends."""

READ_EVERY = 16
"""How many tokens of a text are read at once, if nobody asks before."""


class _OwnParams(SamplingParams):  # type: ignore[misc]
    """Parameters of one request alone, which vLLM would copy before it changes them: half of what it
    takes to begin a request."""

    def clone(self) -> SamplingParams:
        return self


@dataclass(slots=True)
class _Course:
    began: float
    logprobs: int | None
    is_certain: bool  # log-probabilities are of a law that is greedy
    nonce: int | None  # of one that is streamed
    reasoning: Reasoning | None
    structure: str | None  # its name
    unread_at_most: int
    weights_version: int
    unread: list[int] = field(default_factory=list)
    first: float | None = None
    told: int = 0  # how many tokens, and characters of text and reasoning, progress has returned
    told_text: int = 0
    told_reasoning: int = 0


class Completions:
    """The completions that one vLLM engine draws. With ``drawn_here``, the capture draws the tokens, and
    is the one to know the seeds."""

    def __init__(self, llm_engine: LLMEngine, *, drawn_here: bool) -> None:
        self._drawn_here = drawn_here
        self._inputs = llm_engine.input_processor
        self._outputs = llm_engine.output_processor
        self._tasks = llm_engine.get_supported_tasks()
        self._has_tokenizer = not llm_engine.model_config.skip_tokenizer_init
        self._is_v2 = llm_engine.vllm_config.use_v2_model_runner
        self._parsers = ReasoningParsers(llm_engine.vllm_config)
        self._courses: dict[str, _Course] = {}
        self.structures = GuidedStructures(llm_engine) if self._has_tokenizer else None
        self.spellings = Spellings(
            self._outputs.tokenizer, llm_engine.model_config.get_vocab_size()
        )
        self._streamed: dict[int | None, str] = {}  # by nonce, which each has for itself
        self._parsed: dict[str, Reasoning] = {}  # of those streamed

    def unsupported(self, decoding: Decoding) -> str | None:
        """Return the option that this vLLM cannot do, and why."""
        if decoding.split_reasoning and not self._parsers:
            return NO_PARSER
        name = None if self._has_tokenizer else decoding.of_text
        if name is not None:
            return f"{name} needs a tokenizer, and vLLM was opened with skip_tokenizer_init"
        self.spellings.of(decoding.bad_words)
        return None

    def begin(
        self, request_id: str, request: CompletionRequest, lora: LoRARequest | None
    ) -> EngineCoreRequest:
        """Return a request for vLLM's core, once its outputs are expected here; raise what vLLM raises
        for an option that it does not take."""
        decoding, reasoning = request.decoding, None
        params = self._params(request)
        if self._parsers.splits(decoding):
            reasoning = self._parsers.begin(request)
            params.skip_special_tokens = reasoning.skip_special_tokens
        asked = None
        if decoding.structure is not None and self.structures is not None:
            asked = self.structures.asked(decoding.structure)
        made = self._inputs.process_inputs(
            request_id,
            tokens_input(list(request.token_ids)),
            params,
            self._tasks,
            lora_request=lora,
        )
        made.external_req_id = request_id
        # A structure begins where the reasoning ends.
        made.reasoning_ended = reasoning is None or reasoning.is_over
        if reasoning is not None:
            made.reasoning_parser_kwargs = {"chat_template_kwargs": reasoning.template_kwargs}
            if reasoning.is_over:
                reasoning = None
        params = cast("SamplingParams", made.sampling_params)
        if params.temperature:  # vLLM's check is over: its runners take any
            params.temperature = request.temperature
            extra = {LAW: True} if decoding.tells_law else {}
            if self._drawn_here:
                extra[TEXT_SEED] = params.seed
                params.seed = None
            params.extra_args = extra or None
        params._bad_words_token_ids = self.spellings.of(decoding.bad_words)
        # Of an end token that ends nothing min_tokens says nothing, though vLLM holds it back.
        if decoding.ignore_eos and decoding.structure is None:
            params._all_stop_token_ids = {*decoding.stop_token_ids}
        if self._is_v2:
            check_v2(params)
        params.structured_outputs = asked  # which vLLM's checks would read in their own way
        self._outputs.add_request(made, None)
        leave_out_prompt(self._outputs, made)
        nonce = request.nonce if request.streamed else None
        structure = decoding.structure and decoding.structure[0]
        at_once = (
            decoding.stop or decoding.logprobs is not None or (reasoning and nonce is not None)
        )
        # Texts that begin together are read in different steps.
        most = 0 if at_once else 1 + len(self._courses) % (READ_EVERY - 1)
        self._courses[request_id] = _Course(
            time.perf_counter(),
            decoding.logprobs,
            decoding.tells_law and not params.temperature,
            nonce,
            reasoning,
            structure,
            most,
            request.weights_version,
        )
        if nonce is not None:
            self._streamed[nonce] = request_id
            if reasoning is not None:
                self._parsed[request_id] = reasoning
        return made

    def _params(self, request: CompletionRequest) -> SamplingParams:
        decoding = request.decoding
        greedy = decoding.temperature < GREEDY_BELOW
        return _OwnParams(
            max_tokens=decoding.max_tokens,
            min_tokens=decoding.min_tokens,
            temperature=0.0 if greedy else min(max(decoding.temperature, COOLEST), HOTTEST),
            top_p=decoding.top_p,
            top_k=decoding.top_k,
            min_p=decoding.min_p,
            seed=None if greedy else deciding_seed(request),
            stop=list(decoding.stop),
            stop_token_ids=list(decoding.stop_token_ids),
            include_stop_str_in_output=decoding.include_stop_str_in_output,
            skip_special_tokens=decoding.skip_special_tokens,
            presence_penalty=decoding.presence_penalty,
            frequency_penalty=decoding.frequency_penalty,
            repetition_penalty=decoding.repetition_penalty,
            logit_bias=dict(decoding.logit_bias) or None,
            ignore_eos=decoding.ignore_eos,
            logprobs=decoding.logprobs,
            detokenize=self._has_tokenizer,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def take(
        self, outputs: Sequence[EngineCoreOutput]
    ) -> tuple[list[Ended], list[str], list[EngineCoreOutput]]:
        """Return what a step's outputs end, by request id; those among them that vLLM goes on with, as it
        does not look for stop strings: they are to be aborted; and the outputs of others."""
        now, courses = time.perf_counter(), self._courses
        ended: list[Ended] = []
        read: list[EngineCoreOutput] = []
        others: list[EngineCoreOutput] = []
        for output in outputs:  # of which there is one for each text and step: little is done here
            course = courses.get(output.request_id)
            if course is None:
                others.append(output)
                continue
            unread = course.unread
            unread += output.new_token_ids
            if course.first is None and unread:
                course.first = now
            if output.finish_reason is None and len(unread) <= course.unread_at_most:
                continue
            output.new_token_ids, course.unread = unread, []
            course.unread_at_most = course.unread_at_most and READ_EVERY - 1
            if output.finish_reason in ORDERLY:
                read.append(output)
            else:
                ended.append((output.request_id, failure_of(output, course.structure)))
        over = self._read(read, ended, now) if read else []
        return ended, over, others

    def _read(
        self, outputs: Sequence[EngineCoreOutput], ended: list[Ended], now: float
    ) -> list[str]:
        """Have vLLM's output processor read these; add what ended, and return what is to be aborted."""
        processed = self._outputs.process_outputs(outputs)
        over: list[str] = processed.reqs_to_abort
        for done in processed.request_outputs:
            try:
                ended.append((done.request_id, self._completion(done, now)))
            except GenrtError as error:
                ended.append((done.request_id, error))
        for output in outputs if self._parsed else ():
            if output.request_id in self._parsed:
                try:
                    self._parse(output)
                except GenrtError as error:
                    ended.append((output.request_id, error))
                    over.append(output.request_id)
        return over

    def _parse(self, output: EngineCoreOutput) -> None:
        """Tell the reasoning of a stream's new tokens apart from its text."""
        detokenizer = self._outputs.request_states[output.request_id].detokenizer
        self._parsed[output.request_id].add(
            output.new_token_ids, detokenizer.output_text, detokenizer.stop_buffer_length
        )

    def _completion(self, done: Any, now: float) -> Completion:
        """Return one of vLLM's ``RequestOutput`` as a completion that ended at ``now``."""
        course, [output] = self._ended(done.request_id), done.outputs
        drawn, reasoning, text = tuple(output.token_ids), "", output.text
        if course.reasoning is not None:
            split = course.reasoning.split if course.nonce is None else course.reasoning.end
            reasoning, text = split(drawn, text)
        logprobs, top_logprobs = _logprobs(output.logprobs or (), drawn, course)
        return Completion(
            text=text,
            token_ids=drawn,
            prompt_token_ids=tuple(done.prompt_token_ids),
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            finish_reason=cast("FinishReason", output.finish_reason),
            stop_reason=output.stop_reason,
            seconds=now - course.began,
            seconds_to_first_token=(course.first or now) - course.began,
            reasoning=reasoning,
            weights_version=course.weights_version,
        )

    def progress(self, streamed: Sequence[CompletionRequest]) -> list[Delta | None]:
        """Return what each of these has drawn since the last call; ``None`` if that is nothing."""
        known = [self._streamed.get(request.nonce) for request in streamed]
        unread: list[EngineCoreOutput] = []
        for request_id in known:
            if request_id is not None and (course := self._courses[request_id]).unread:
                unread.append(EngineCoreOutput(request_id=request_id, new_token_ids=course.unread))
                course.unread = []
        self._outputs.process_outputs(unread)
        return [self._progress(request_id) for request_id in known]

    def _progress(self, request_id: str | None) -> Delta | None:
        if request_id is None:
            return None
        course, state = self._courses[request_id], self._outputs.request_states[request_id]
        drawn, start, text_start = state.detokenizer.output_token_ids, course.told, course.told_text
        if len(drawn) == start:
            return None
        token_ids, reasoning, reasoning_start = tuple(drawn[start:]), "", course.told_reasoning
        if course.reasoning is None:
            text = state.detokenizer.get_next_output_text(finished=False, delta=True)
        else:
            text = course.reasoning.text[text_start:]
            reasoning = course.reasoning.reasoning[reasoning_start:]
        places = () if course.logprobs is None else state.logprobs_processor.logprobs[start:]
        course.told, course.told_text = len(drawn), text_start + len(text)
        course.told_reasoning += len(reasoning)
        logprobs, top = _logprobs(places, token_ids, course)
        return Delta(text, token_ids, logprobs, top, start, text_start, reasoning, reasoning_start)

    def _ended(self, request_id: str) -> _Course:
        course = self._courses.pop(request_id)
        self._parsed.pop(request_id, None)
        if course.nonce is not None:
            self._streamed.pop(course.nonce, None)
        return course

    def forget(self, request_ids: Iterable[str]) -> None:
        """Forget these; others than completions are ignored."""
        known = [each for each in request_ids if each in self._courses]
        for request_id in known:
            self._ended(request_id)
        self._outputs.abort_requests(known, internal=True)


class _AfterPrompt:
    """A ``TextStream`` in the place of the library's ``DecodeStream``."""

    def __init__(self, stream: TextStream) -> None:
        self._stream = stream

    def step(self, _: object, token_id: int) -> str:
        return self._stream.step(token_id)


def leave_out_prompt(outputs: OutputProcessor, request: EngineCoreRequest) -> None:
    """Have the detokenizer of a request that was added leave out a prompt that ends inside a character:
    vLLM's would repeat all of it in the text."""
    detokenizer = outputs.request_states[request.request_id].detokenizer
    if not isinstance(detokenizer, FastIncrementalDetokenizer):
        return
    prompt, skip = request.prompt_token_ids or (), detokenizer.skip_special_tokens
    if ends_inside_character(outputs.tokenizer, prompt, skip_special_tokens=skip):
        stream = TextStream(outputs.tokenizer, prompt, skip_special_tokens=skip)
        detokenizer.stream = _AfterPrompt(stream)


def failure_of(output: EngineCoreOutput, structure: str | None) -> GenrtError:
    """Return what is wrong with a text that vLLM gave up, by the name of its structure."""
    if structure is None:
        return EngineFailed(f"vLLM ended the request with {output.finish_reason}")
    return InvalidRequest(
        f"{structure}: no token can follow. Nothing satisfies it, vLLM cannot compile it, or "
        "bad_words and stop_token_ids leave nothing of what does: change them"
    )


def check_v2(params: SamplingParams) -> None:
    """Raise InvalidRequest for what runner V2 has no room for: it would raise in the middle of a step, in
    which all requests would fail."""
    from vllm.v1.worker.gpu.sample import logit_bias

    ends = params.all_stop_token_ids if params.min_tokens else ()
    words = params.bad_words_token_ids or ()
    for what, count, most in (
        (
            "logit_bias, of tokens",
            len(params.logit_bias or ()),
            logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS,
        ),
        ("min_tokens, of tokens that end", len(ends), logit_bias.MAX_NUM_STOP_TOKEN_IDS),
        ("bad_words, of spellings", len(words), envs.VLLM_MAX_NUM_BAD_WORDS),
        ("bad_words, of tokens", sum(map(len, words)), envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS),
    ):
        if count > most:
            raise InvalidRequest(f"{what}: vLLM's runner V2 takes {most} at most, got {count}")


def _logprobs(
    places: Sequence[Any], drawn: Sequence[int], course: _Course
) -> tuple[tuple[float, ...], tuple[dict[int, float], ...]]:
    """Return the log-probabilities of drawn tokens, and the likeliest at each place if wanted."""
    count = course.logprobs
    own = tuple(place[token].logprob for place, token in zip(places, drawn, strict=False))
    top = tuple(_likeliest(place, count) for place in places) if count else ()
    if course.is_certain:
        own = (0.0,) * len(own)
        top = tuple(_certain(token, each) for token, each in zip(drawn, top, strict=False))
    return own, top


def _certain(token: int, likeliest: dict[int, float]) -> dict[int, float]:
    """Return as many tokens as these with their log-probabilities where one token is certain."""
    others = [each for each in likeliest if each != token]
    return {token: 0.0, **dict.fromkeys(others[: len(likeliest) - 1], -math.inf)}


def _likeliest(place: dict[int, Any], count: int) -> dict[int, float]:
    """Return the ``count`` likeliest tokens of a place, likeliest first: the drawn one is there too."""
    ranked = sorted(place.items(), key=lambda entry: entry[1].rank)
    return {token: entry.logprob for token, entry in ranked if entry.rank <= count}
