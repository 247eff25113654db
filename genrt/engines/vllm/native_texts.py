"""Texts that vLLM's own front ends ask for: requests and outputs are vLLM's objects.

Rules:
    What a reader was told is not told again: a text that is begun anew, in another engine too, goes on
    from there. One that differs from it fails.
    The output processor reads several tokens at once, as in ``completions.py``.
    A front end's arguments never reach the capture: keys of ``extra_args`` that are genrt's are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.llm_engine import LLMEngine

from genrt.engines.vllm.completions import (
    ORDERLY,
    READ_EVERY,
    check_v2,
    failure_of,
    leave_out_prompt,
)
from genrt.engines.vllm.requests import TEXT_SEED
from genrt.engines.vllm.structures import GuidedStructures
from genrt.errors import GenrtError, InvalidRequest, StreamCut
from genrt.questions.completions import NativeRequest
from genrt.questions.contexts import LAST_SEED
from genrt.tokens.spellings import Spellings

__all__ = ["NativeText", "NativeTexts"]

Outputs: TypeAlias = tuple[RequestOutput, ...]

OWN_KEYS = "genrt_"
"""What the keys of ``extra_args`` begin with that the capture reads."""


@dataclass(slots=True, eq=False)
class NativeText:
    """The text that one ``NativeRequest`` asks for. Its last fields are the engine thread's.

    Attributes:
        core: the request as vLLM's input processor makes it; it is not changed.
        prompt: the text of the prompt, for a front end that repeats it.
        index: which of the texts after one prompt this is.
        told: the tokens that the reader of a stream has been told of.
        told_text: how many characters.
    """

    core: EngineCoreRequest
    prompt: str | None = None
    index: int = 0
    told: list[int] = field(default_factory=list)
    told_text: int = 0

    def tell(self, outputs: Iterable[RequestOutput]) -> None:
        """Keep in mind that the reader has been told this: an engine that begins anew leaves it out."""
        for made in outputs:
            for output in made.outputs:
                self.told += output.token_ids
                self.told_text += len(output.text)


@dataclass(slots=True)
class _Course:
    text: NativeText
    request: NativeRequest
    unread_at_most: int
    is_delta: bool
    structure: str | None  # its name
    unread: list[int] = field(default_factory=list)
    prefill: Any = None  # what vLLM says of the prompt, with the first token
    outputs: list[RequestOutput] = field(default_factory=list)
    error: GenrtError | None = None
    seen: int = 0  # how many tokens, and characters, have been handed over or left out
    seen_text: int = 0


class NativeTexts:
    """The native texts that one vLLM engine draws.

    Args:
        structures: what compiles structures, if there is a tokenizer.
        spellings: of words by the tokenizer.
        drawn_here: whether the capture draws the tokens, and is the one to know the seeds.
    """

    def __init__(
        self,
        llm_engine: LLMEngine,
        structures: GuidedStructures | None,
        spellings: Spellings,
        *,
        drawn_here: bool,
    ) -> None:
        self._outputs = llm_engine.output_processor
        self._is_v2 = llm_engine.vllm_config.use_v2_model_runner
        self._has_loras = llm_engine.vllm_config.lora_config is not None
        self._structures = structures
        self._spellings = spellings
        self._drawn_here = drawn_here
        self._courses: dict[str, _Course] = {}
        self._streamed: dict[NativeRequest, str] = {}

    def begin(
        self, request_id: str, request: NativeRequest, lora: LoRARequest | None
    ) -> EngineCoreRequest:
        """Return a request for vLLM's core, once its outputs are expected here.

        Raises:
            InvalidRequest: its parameters are not for a front end to set, or a structure is none.
        """
        text = cast("NativeText", request.asked)
        made = copy(text.core)
        made.request_id = made.external_req_id = request_id
        made.lora_request = lora
        made.sampling_params = params = self._params(text.core.sampling_params, request)
        wanted = params.structured_outputs
        name = None
        if wanted is not None and self._structures is not None:
            name = "json_schema" if wanted.json is not None else "structured_outputs"
            params.structured_outputs = self._structures.taken(wanted)
        self._outputs.add_request(made, text.prompt, None, text.index)
        leave_out_prompt(self._outputs, made)
        # Each output of vLLM's core brings the log-probabilities of its own tokens alone.
        at_once = (
            params.stop
            or params.logprobs is not None
            or params.prompt_logprobs is not None
            or params.logprob_token_ids
            or params.prompt_logprob_token_ids is not None
            or params.stream_interval
        )
        most = 0 if at_once else 1 + len(self._courses) % (READ_EVERY - 1)
        is_delta = params.output_kind == RequestOutputKind.DELTA
        self._courses[request_id] = _Course(text, request, most, is_delta, name)
        if request.streamed:
            self._streamed[request] = request_id
        return made

    def _params(self, given: Any, request: NativeRequest) -> SamplingParams:
        params = copy(cast("SamplingParams", given))
        extra = dict(params.extra_args or {})
        if any(str(key).startswith(OWN_KEYS) for key in extra):
            raise InvalidRequest(f"no argument may begin with {OWN_KEYS!r}")
        if params.temperature:
            seed = request.nonce if params.seed is None else params.seed % (LAST_SEED + 1)
            params.seed = None if self._drawn_here else seed
            if self._drawn_here:
                extra[TEXT_SEED] = seed
        params.extra_args = extra or None
        if self._has_loras and params.prompt_logprobs is not None:
            # Its adapters compute logits of sampled places alone: the whole step would fail.
            raise InvalidRequest(
                "vLLM has no log-probabilities of prompts where adapters are enabled: ask /v1/score"
            )
        params._bad_words_token_ids = self._spellings.of(params.bad_words or ())
        if params.ignore_eos and params.structured_outputs is None:
            params._all_stop_token_ids = {*(params.stop_token_ids or ())}
        if self._is_v2:
            check_v2(params)
        elif params.logprob_token_ids:
            raise InvalidRequest(
                "logprob_token_ids: vLLM's runner V1 writes them over rows of other requests"
            )
        return params

    def take(
        self, outputs: Sequence[EngineCoreOutput]
    ) -> tuple[list[tuple[str, Outputs | GenrtError]], list[str], list[EngineCoreOutput]]:
        """Return what a step's outputs end, by request id; those among them that vLLM goes on with: they
        are to be aborted; and the outputs of others."""
        ended: list[tuple[str, Outputs | GenrtError]] = []
        read: list[EngineCoreOutput] = []
        others: list[EngineCoreOutput] = []
        for output in outputs:
            course = self._courses.get(output.request_id)
            if course is None:
                others.append(output)
                continue
            course.unread += output.new_token_ids
            course.prefill = output.prefill_stats or course.prefill
            if output.finish_reason not in ORDERLY:
                ended.append((output.request_id, failure_of(output, course.structure)))
            elif output.finish_reason is not None or len(course.unread) > course.unread_at_most:
                course.unread_at_most = course.unread_at_most and READ_EVERY - 1
                read.append(self._unread(course, output))
        over = self._read(read, ended) if read else []
        return ended, over, others

    def _unread(self, course: _Course, output: EngineCoreOutput) -> EngineCoreOutput:
        """Return the output with all that has not been read."""
        output.new_token_ids, course.unread = course.unread, []
        output.prefill_stats, course.prefill = course.prefill, None
        return output

    def _read(
        self, outputs: Sequence[EngineCoreOutput], ended: list[tuple[str, Outputs | GenrtError]]
    ) -> list[str]:
        """Have vLLM's output processor read these; add what ended, and return what is to be aborted."""
        processed = self._outputs.process_outputs(outputs)
        for made in processed.request_outputs:
            request_id = made.request_id
            course = self._courses[request_id]
            made.request_id = course.text.core.request_id
            course.outputs.append(made)
            if made.finished:
                try:
                    ended.append((request_id, self._handed_over(course)))
                except GenrtError as error:
                    ended.append((request_id, error))
        over: list[str] = processed.reqs_to_abort
        return over

    def progress(self, streamed: Sequence[NativeRequest]) -> list[Outputs | None]:
        """Return what each of these has drawn since the last call; ``None`` if that is nothing."""
        known = [self._streamed.get(request) for request in streamed]
        courses = [None if each is None else self._courses[each] for each in known]
        unread = [
            self._unread(course, EngineCoreOutput(request_id=request_id, new_token_ids=[]))
            for request_id, course in zip(known, courses, strict=True)
            if request_id is not None and course is not None and course.unread
        ]
        self._read(unread, [])
        told: list[Outputs | None] = []
        for course in courses:
            try:
                told.append(self._handed_over(course) if course is not None else None)
            except GenrtError:  # which the end tells: what was drawn anew is another text
                told.append(None)
        return [each or None for each in told]

    def _handed_over(self, course: _Course) -> Outputs:
        """Return the outputs that came since the last call, without what the reader knows.

        Raises:
            StreamCut: the text was begun anew, and differs from what was told.
        """
        if not course.is_delta or not course.request.streamed:
            given, course.outputs = tuple(course.outputs), []
            return given
        if course.error is not None:
            raise course.error
        given, course.outputs = tuple(course.outputs), []
        try:
            for made in given:
                _leave_out_known(course, made)
        except StreamCut as error:
            course.error = error
            raise
        return tuple(made for made in given if made.finished or _has_news(made))

    def forget(self, request_ids: Iterable[str]) -> None:
        """Forget these; others than native texts are ignored."""
        known = [each for each in request_ids if each in self._courses]
        for request_id in known:
            self._streamed.pop(self._courses.pop(request_id).request, None)
        self._outputs.abort_requests(known, internal=True)


def _leave_out_known(course: _Course, made: RequestOutput) -> None:
    """Leave out what the reader knows, and count the rest as known."""
    text, [output] = course.text, made.outputs
    token_ids = list(output.token_ids)
    known = min(max(len(text.told) - course.seen, 0), len(token_ids))
    if token_ids[:known] != text.told[course.seen : course.seen + known]:
        raise StreamCut(
            "the engine began this text anew, and drew another one than was told so far: ask again"
        )
    known_text = min(max(text.told_text - course.seen_text, 0), len(output.text))
    course.seen += len(token_ids)
    course.seen_text += len(output.text)
    if known or known_text:
        output.token_ids, output.text = token_ids[known:], output.text[known_text:]
        if output.logprobs:
            output.logprobs = output.logprobs[known:]
    text.tell([made])


def _has_news(made: RequestOutput) -> bool:
    [output] = made.outputs
    return bool(output.token_ids or output.text)
