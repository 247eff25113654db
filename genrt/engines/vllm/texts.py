"""Draws samples, completions and the texts of vLLM's own front ends, all by one path.

vLLM checks the options; its output processor detokenizes, finds stop strings and collects
log-probabilities. A restarted stream skips the tokens that its reader has, also on another engine, and
fails if the new text differs from them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from vllm import envs
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine import FinishReason as CoreFinishReason
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer
from vllm.v1.engine.llm_engine import LLMEngine

from genrt.engines.completions import sampling_mask
from genrt.engines.vllm.capture import DrawnSets
from genrt.engines.vllm.reasoning import NO_PARSER, Reasoning, ReasoningParsers
from genrt.engines.vllm.requests import MASKED, PROCESSED, SEED, Masked, core_request
from genrt.engines.vllm.structures import GuidedStructures
from genrt.errors import EngineFailed, GenrtError, InvalidRequest, StreamCut
from genrt.numbers import check_float
from genrt.questions.arguments import LAST_SEED, deciding_seed
from genrt.questions.completions import (
    Completion,
    CompletionRequest,
    Decoding,
    Delta,
    FinishReason,
    NativeRequest,
    SampleRequest,
    SamplingMask,
    Streamed,
    TextRequest,
    Told,
    WeightsSpan,
    weights_spans,
)
from genrt.questions.request import Request, Result
from genrt.tokens.detokenizing import TextStream, ends_inside_character
from genrt.tokens.sampling import GREEDY_BELOW
from genrt.tokens.sets import DrawnFrom, MaskForm, in_form
from genrt.tokens.spellings import Spellings

READ_EVERY = 16
"""How many tokens of a text the output processor reads at once: it costs more than all other work."""

SAME = (
    *("max_tokens", "min_tokens", "top_p", "top_k", "min_p", "ignore_eos", "logprobs"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("include_stop_str_in_output", "skip_special_tokens"),
)
"""The options that have the same name and meaning in vLLM."""


@dataclass(slots=True, eq=False)
class NativeText:
    """The text that one ``NativeRequest`` asks for."""

    core: EngineCoreRequest  # as vLLM's input processor makes it; it is not changed
    prompt: str | None = None  # for a front end that repeats it
    index: int = 0  # among the texts of one prompt
    # The tokens, and the number of characters, that the reader of a stream has. The engine thread writes
    # both.
    told: list[int] = field(default_factory=list)
    told_text: int = 0

    def tell(self, outputs: Iterable[RequestOutput]) -> None:
        """Record that these outputs were delivered: a restarted text skips them."""
        for made in outputs:
            for output in made.outputs:
                self.told += output.token_ids
                self.told_text += len(output.text)


class _OwnParams(SamplingParams):  # type: ignore[misc]
    """Parameters that vLLM need not copy before it changes them: half the cost of a request's begin."""

    def clone(self) -> SamplingParams:
        return self


@dataclass(slots=True)
class _TextState:
    """A sample or a completion in progress."""

    request: Any
    state: Any  # the output processor's
    most_unread: int  # how many tokens may wait for the output processor
    structure: str | None  # the name of the option that gives it
    words: int  # of the bits of a set of tokens
    reasoning: Reasoning | None = None
    unread: list[int] = field(default_factory=list)
    form: MaskForm | None = None  # of the sets of places, if they are wanted and not greedy
    places: list[DrawnFrom] = field(default_factory=list)
    prefill: Any = None  # vLLM's statistics of the prompt, which come with the first token
    began: float = field(default_factory=time.perf_counter)
    first: float | None = None
    # How many tokens and characters ``progress`` has returned.
    delivered: int = 0
    delivered_text: int = 0
    delivered_reasoning: int = 0

    def with_unread(self, output: EngineCoreOutput) -> EngineCoreOutput:
        """Return the output with all unread tokens."""
        output.new_token_ids, self.unread = self.unread, []
        output.prefill_stats, self.prefill = self.prefill, None
        self.most_unread = self.most_unread and READ_EVERY - 1
        return output

    def read(self, made: RequestOutput, now: float) -> Result:
        """Return the result, from the output at the end of the text."""
        [output] = made.outputs
        drawn, reasoning, text = tuple(output.token_ids), "", output.text
        if isinstance(self.request, SampleRequest):
            return self.request.result(drawn, output.finish_reason)
        if self.reasoning is not None:
            split = self.reasoning.end if self.request.streamed else self.reasoning.split
            reasoning, text = split(drawn, text)
        logprobs, top_logprobs = self._logprobs(output.logprobs or (), drawn)
        spans = self._spans(0, len(drawn))
        return Completion(
            text=text,
            token_ids=drawn,
            prompt_token_ids=tuple(made.prompt_token_ids),
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            finish_reason=cast("FinishReason", output.finish_reason),
            stop_reason=output.stop_reason,
            seconds=now - self.began,
            seconds_to_first_token=(self.first or now) - self.began,
            reasoning=reasoning,
            weights_version=spans[-1].version if spans else self.request.weights_version,
            weights_spans=spans,
            sampling_mask=self._mask(drawn),
        )

    def progress(self) -> Delta | None:
        """Return the part that was drawn since the last call, if any."""
        detokenizer, start, text_start = self.state.detokenizer, self.delivered, self.delivered_text
        token_ids, reasoning = tuple(detokenizer.output_token_ids[start:]), ""
        if not token_ids:
            return None
        reasoning_start = self.delivered_reasoning
        if self.reasoning is None:
            text = detokenizer.get_next_output_text(finished=False, delta=True)
        else:
            text = self.reasoning.text[text_start:]
            reasoning = self.reasoning.reasoning[reasoning_start:]
        self.delivered += len(token_ids)
        self.delivered_text += len(text)
        self.delivered_reasoning += len(reasoning)
        places = self.state.logprobs_processor.logprobs or ()
        logprobs, top = self._logprobs(places[start:], token_ids)
        spans = self._spans(start, self.delivered)
        own = text, token_ids, logprobs, top, start, text_start, reasoning, reasoning_start
        return Delta(*own, weights_spans=spans, sampling_mask=self._mask(token_ids, start))

    def _spans(self, start: int, end: int) -> tuple[WeightsSpan, ...]:
        begins = [(int(version), place) for version, place in self.state.weight_version_starts]
        return weights_spans(begins, start, end)

    def _mask(self, drawn: Sequence[int], start: int = 0) -> SamplingMask | None:
        """Return the sets of drawn tokens; the first is number ``start``."""
        decoding, places = self.request.decoding, self.places[start : start + len(drawn)]
        if decoding.sampling_mask is not None and decoding.temperature < GREEDY_BELOW:
            packed = np.zeros((len(drawn), self.words), np.uint32)
            for row, token in zip(packed, drawn, strict=True):
                row[token // 32] = 1 << token % 32
            sets = in_form(packed.view(np.int32), decoding.sampling_mask)
            places = [(0.0, 0.0, each) for each in sets]
        return sampling_mask(decoding, places, self.words)

    def _logprobs(
        self, places: Sequence[Any], drawn: Sequence[int]
    ) -> tuple[tuple[float, ...], tuple[dict[int, float], ...]]:
        """Return the log-probabilities of drawn tokens, and the likeliest tokens of each place."""
        decoding = self.request.decoding
        is_certain = decoding.returns_processed and decoding.temperature < GREEDY_BELOW
        own: list[float] = []
        top: list[dict[int, float]] = []
        for place, token in zip(places, drawn, strict=False):
            own.append(0.0 if is_certain else place[token].logprob)
            if count := decoding.logprobs:  # vLLM adds the drawn token
                ranked = sorted(place.items(), key=lambda entry: entry[1].rank)
                likeliest = {token: each.logprob for token, each in ranked if each.rank <= count}
                if is_certain:
                    others = [each for each in likeliest if each != token][: len(likeliest) - 1]
                    likeliest = {token: 0.0, **dict.fromkeys(others, -math.inf)}
                top.append(likeliest)
        return tuple(own), tuple(top)


@dataclass(slots=True)
class _FrontEndState(_TextState):
    """A text of one of vLLM's front ends in progress."""

    outputs: list[RequestOutput] = field(default_factory=list)  # to hand over next
    error: GenrtError | None = None  # with which the text will end

    def read(self, made: RequestOutput, now: float) -> Result:
        made.request_id = self.request.asked.core.request_id
        self.outputs.append(made)
        return self._handed_over() if made.finished else None

    def progress(self) -> Any:
        try:
            return self._handed_over() or None
        except GenrtError:  # the text's end raises it too
            return None

    def _handed_over(self) -> tuple[RequestOutput, ...]:
        """Return the outputs since the last call, without tokens that were delivered before a restart.
        Raise StreamCut if the restarted text differs from the delivered one."""
        outputs, self.outputs = tuple(self.outputs), []
        if not (self.request.streamed and self.state.output_kind == RequestOutputKind.DELTA):
            return outputs
        if self.error is not None:
            raise self.error
        try:
            for made in outputs:
                self._leave_out_delivered(made)
        except StreamCut as error:
            self.error = error
            raise
        return tuple(
            made
            for made in outputs
            if made.finished or made.outputs[0].token_ids or made.outputs[0].text
        )

    def _leave_out_delivered(self, made: RequestOutput) -> None:
        """Leave out the tokens that the reader has, and count the others as delivered."""
        text, [output] = self.request.asked, made.outputs
        token_ids = list(output.token_ids)
        known = min(max(len(text.told) - self.delivered, 0), len(token_ids))
        if token_ids[:known] != text.told[self.delivered : self.delivered + known]:
            raise StreamCut(
                "the engine restarted this text and drew tokens other than those delivered: ask again"
            )
        known_text = min(max(text.told_text - self.delivered_text, 0), len(output.text))
        self.delivered += len(token_ids)
        self.delivered_text += len(output.text)
        if known or known_text:
            output.token_ids, output.text = token_ids[known:], output.text[known_text:]
            if output.logprobs:
                output.logprobs = output.logprobs[known:]
        text.tell([made])


class VLLMTexts:
    """The texts of one vLLM engine: in progress, or waiting for a slot.

    Args:
        slots: how many requests the engine runs at once, rows included.
        sets: the sets that tokens are drawn from; ``None`` if the sampler is in another process.
        drawn_here: whether the capture draws the tokens, so that it needs the seeds.

    Attributes:
        waiting: the texts that wait for a slot, in order.
        weights_version: labels the tokens that are drawn from now on.
        truncates: whether texts may have top-k and top-p.
    """

    def __init__(
        self, llm_engine: LLMEngine, slots: int, sets: DrawnSets | None, *, drawn_here: bool
    ) -> None:
        config = llm_engine.vllm_config
        self._sets = sets
        self._words = -(-config.model_config.get_vocab_size() // 32)
        self._drawn_here = drawn_here
        self._most = slots - max(1, slots // 9)  # a row never waits for a long text to end
        self._inputs = llm_engine.input_processor
        self._outputs = llm_engine.output_processor
        self._tasks = llm_engine.get_supported_tasks()
        self._has_tokenizer = not config.model_config.skip_tokenizer_init
        self._has_loras = config.lora_config is not None
        self._is_v2 = config.use_v2_model_runner
        self._has_drafts = config.speculative_config is not None
        self._parsers = ReasoningParsers(config)
        self._structures = GuidedStructures(llm_engine) if self._has_tokenizer else None
        self._spellings = Spellings(self._outputs.tokenizer, config.model_config.get_vocab_size())
        self.waiting: dict[TextRequest, None] = {}
        self.weights_version = 0
        self.truncates = True
        self._in_progress: dict[str, _TextState] = {}
        self._streamed: dict[TextRequest, str] = {}

    @property
    def running(self) -> int:
        """The number of texts that have a slot."""
        return len(self._in_progress)

    def wait(self, requests: Sequence[Request]) -> None:
        """Queue the texts among these requests for slots."""
        self.waiting.update((each, None) for each in requests if isinstance(each, TextRequest))

    def admitted(self) -> Iterator[TextRequest]:
        """Yield the texts that get a slot; begin each text before taking the next."""
        while self.waiting and len(self._in_progress) < self._most:
            request = next(iter(self.waiting))
            del self.waiting[request]
            yield request

    def withdraw(self, unwanted: Collection[Request]) -> int:
        """Remove these texts from the queue; return how many were in it."""
        gone = [request for request in self.waiting if request in unwanted]
        for request in gone:
            del self.waiting[request]
        return len(gone)

    def unsupported(self, decoding: Decoding) -> str | None:
        """Return which option this vLLM does not support, and why."""
        if decoding.split_reasoning and not self._parsers:
            return NO_PARSER
        if decoding.sampling_mask is not None and self._sets is None:
            return "sampling_mask needs vLLM's sampler in this process, and it is in a worker"
        if self._has_drafts and (name := _without_drafts(decoding)) is not None:
            return f"{name} is not available with a speculative_config: leave one of them out"
        if not self.truncates and (decoding.top_k or decoding.top_p < 1.0):
            return "deterministic=True: vLLM's top-k and top-p kernels cut by the batch: leave them out"
        name = None if self._has_tokenizer else decoding.of_text
        if name is not None:
            return f"{name} needs a tokenizer, and vLLM was opened with skip_tokenizer_init"
        self._spellings.of(decoding.bad_words)
        return None

    def begin(
        self, request_id: str, request: TextRequest, lora: LoRARequest | None
    ) -> EngineCoreRequest:
        """Return a request for vLLM's core, and expect its outputs. Raise vLLM's error for an option that
        it does not take."""
        reasoning, prompt, index = None, None, 0
        kind: type[_TextState] = _TextState
        if isinstance(request, NativeRequest):
            kind, prompt, index = _FrontEndState, request.asked.prompt, request.asked.index
            made, structure = self._of_front_end(request, lora)
        else:
            made, reasoning = self._own(request_id, request, lora)
            structure = request.decoding.structure and request.decoding.structure[0]
        made.request_id = made.external_req_id = request_id
        params = cast("SamplingParams", made.sampling_params)
        if self._is_v2:
            check_v2(params)
        self._outputs.add_request(made, prompt, None, index)
        state = self._outputs.request_states[request_id]
        self._leave_out_prompt(state.detokenizer, made)
        # An output of vLLM's core has log-probabilities of new tokens only.
        at_once = (
            params.stop
            or params.logprobs is not None
            or params.prompt_logprobs is not None
            or params.logprob_token_ids
            or params.prompt_logprob_token_ids is not None
            or params.stream_interval
            or (request.streamed and reasoning is not None)
        )
        # Texts that begin together are read in different steps.
        most = 0 if at_once else 1 + len(self._in_progress) % (READ_EVERY - 1)
        own = most, structure, self._words, reasoning
        self._in_progress[request_id] = text = kind(request, state, *own)
        if isinstance(request, CompletionRequest) and MASKED in (params.extra_args or ()):
            text.form = request.decoding.sampling_mask
        if request.streamed:
            self._streamed[request] = request_id
        return made

    def _own(
        self,
        request_id: str,
        request: SampleRequest | CompletionRequest,
        lora: LoRARequest | None,
    ) -> tuple[EngineCoreRequest, Reasoning | None]:
        reasoning = asked = None
        params, decoding = self._params(request), request.decoding
        if isinstance(request, CompletionRequest):
            if self._parsers.splits(decoding):
                reasoning = self._parsers.begin(request)
                params.skip_special_tokens = reasoning.skip_special_tokens
            if decoding.structure is not None and self._structures is not None:
                asked = self._structures.to_params(decoding.structure)
        if isinstance(request, SampleRequest):  # vLLM's checks would take most of the time
            made = core_request(request_id, request.token_ids, params, lora)
        else:
            prompt = tokens_input(list(request.token_ids))
            made = self._inputs.process_inputs(
                request_id, prompt, params, self._tasks, lora_request=lora
            )
        # A structure begins where the reasoning ends.
        made.reasoning_ended = reasoning is None or reasoning.is_over
        if reasoning is not None:
            made.reasoning_parser_kwargs = {"chat_template_kwargs": reasoning.template_kwargs}
            if reasoning.is_over:
                reasoning = None
        params = cast("SamplingParams", made.sampling_params)
        extra: dict[str, Any] = (
            {PROCESSED: True} if params.temperature and decoding.returns_processed else {}
        )
        if params.temperature and decoding.sampling_mask is not None:
            extra[MASKED] = Masked(int(request_id), len(request.token_ids), request.temperature)
        self._draw(params, params.seed, extra)
        self._rule_out(params, decoding.bad_words, has_structure=asked is not None)
        if params.temperature:
            params.temperature = request.temperature
        params.structured_outputs = asked  # vLLM's checks would read it in their own way
        return made, reasoning

    def _params(self, request: SampleRequest | CompletionRequest) -> SamplingParams:
        decoding = request.decoding
        greedy = decoding.temperature < GREEDY_BELOW
        return _OwnParams(
            # vLLM's checks admit these; its runners take any that is not greedy.
            temperature=0.0 if greedy else min(max(decoding.temperature, 0.01), 2.0),
            seed=None if greedy else deciding_seed(request),
            stop=list(decoding.stop),
            stop_token_ids=list(decoding.stop_token_ids),
            logit_bias=dict(decoding.logit_bias) or None,
            detokenize=self._has_tokenizer and isinstance(request, CompletionRequest),
            output_kind=RequestOutputKind.FINAL_ONLY,
            **{name: getattr(decoding, name) for name in SAME},
        )

    def _of_front_end(
        self, request: NativeRequest, lora: LoRARequest | None
    ) -> tuple[EngineCoreRequest, str | None]:
        """Return vLLM's request of a front end's text, and the name of its structure. Raise
        InvalidRequest for a parameter that a front end may not set."""
        made = copy(request.asked.core)
        made.lora_request = lora
        params = made.sampling_params = copy(cast("SamplingParams", made.sampling_params))
        extra = dict(params.extra_args or {})
        if any(str(key).startswith("genrt_") for key in extra):  # the capture reads these
            raise InvalidRequest("no argument may begin with 'genrt_'")
        if self._has_loras and params.prompt_logprobs is not None:
            # vLLM's adapters compute logits of sampled places only: the whole step would fail.
            raise InvalidRequest(
                "vLLM has no log-probabilities of prompts where adapters are enabled: ask /v1/score"
            )
        if params.logprob_token_ids and not self._is_v2:
            raise InvalidRequest(
                "logprob_token_ids: vLLM's runner V1 writes them over rows of other requests"
            )
        # As for completions: vLLM takes numbers that float32 has not.
        check_float("repetition_penalty", params.repetition_penalty, 0.01, 100.0)
        seed = request.nonce if params.seed is None else params.seed % (LAST_SEED + 1)
        self._draw(params, seed, extra)
        wanted = params.structured_outputs
        self._rule_out(params, params.bad_words or (), has_structure=wanted is not None)
        if wanted is None or self._structures is None:
            return made, None
        params.structured_outputs = self._structures.of_front_end(wanted)
        return made, "json_schema" if wanted.json is not None else "structured_outputs"

    def _draw(self, params: SamplingParams, seed: int | None, extra: dict[str, Any]) -> None:
        """Set the seed of a text that is not greedy, for vLLM or the capture."""
        if params.temperature:
            params.seed = None if self._drawn_here else seed
            if self._drawn_here:
                extra[SEED] = seed
        params.extra_args = extra or None

    def _rule_out(
        self, params: SamplingParams, bad_words: Sequence[str], *, has_structure: bool
    ) -> None:
        """Set the spellings of bad words, and the tokens that ``min_tokens`` holds back."""
        params._bad_words_token_ids = self._spellings.of(bad_words)
        # vLLM would hold back an end token too that ends nothing.
        if params.ignore_eos and not has_structure:
            params._all_stop_token_ids = {*(params.stop_token_ids or ())}

    def _leave_out_prompt(self, detokenizer: Any, request: EngineCoreRequest) -> None:
        """Keep a prompt that ends inside a character out of the text: vLLM would repeat it whole."""
        if not isinstance(detokenizer, FastIncrementalDetokenizer):
            return
        prompt, skip = request.prompt_token_ids or (), detokenizer.skip_special_tokens
        tokenizer = self._outputs.tokenizer
        if ends_inside_character(tokenizer, prompt, skip_special_tokens=skip):
            stream = TextStream(tokenizer, prompt, skip_special_tokens=skip)
            # In the place of the library's ``DecodeStream``, with its arguments.
            detokenizer.stream = SimpleNamespace(step=lambda _, token_id: stream.step(token_id))

    def take(
        self, outputs: Sequence[EngineCoreOutput]
    ) -> tuple[list[tuple[str, Result | GenrtError]], list[str], list[EngineCoreOutput]]:
        """Take a step's outputs.

        Return the request ids of texts that end with their results or errors; the ids of requests that
        vLLM must abort, because it does not see stop strings; and the outputs of other requests.
        """
        now, in_progress = time.perf_counter(), self._in_progress
        ended: list[tuple[str, Result | GenrtError]] = []
        due: list[EngineCoreOutput] = []
        others: list[EngineCoreOutput] = []
        for output in outputs:  # one for each text and step: keep this loop short
            text = in_progress.get(output.request_id)
            if text is None:
                others.append(output)
                continue
            unread = text.unread
            unread += output.new_token_ids
            if text.form is not None and self._sets is not None:
                text.places += self._sets.take(
                    int(output.request_id), len(text.places), len(output.new_token_ids), text.form
                )
            if text.first is None and unread:
                text.first = now
            if output.prefill_stats is not None:
                text.prefill = output.prefill_stats
            if output.finish_reason is None and len(unread) <= text.most_unread:
                continue
            if output.finish_reason in (None, CoreFinishReason.STOP, CoreFinishReason.LENGTH):
                due.append(text.with_unread(output))
            else:
                ended.append((output.request_id, _error_of(output, text.structure)))
        over = [each for part in self._parts(due) for each in self._read(part, ended, now)]
        return ended, over, others

    def _parts(self, outputs: Sequence[EngineCoreOutput]) -> list[list[EngineCoreOutput]]:
        """Divide outputs into lists to be read one after the other. A streamed reasoning is parsed token
        by token, and a step with drafts may bring several."""
        if not self._has_drafts:
            return [[*outputs]] if outputs else []
        at_once, parts = list[EngineCoreOutput](), list[list[EngineCoreOutput]]()
        for output in outputs:
            text = self._in_progress[output.request_id]
            if text.reasoning is not None and text.request.streamed:
                parts += [[each] for each in _single_tokens(output)]
            else:
                at_once.append(output)
        return [at_once, *parts] if at_once else parts

    def _read(
        self,
        outputs: Sequence[EngineCoreOutput],
        ended: list[tuple[str, Result | GenrtError]],
        now: float,
    ) -> list[str]:
        """Let vLLM's output processor read these outputs; add the texts that end to ``ended``, and return
        the ids of requests that vLLM must abort."""
        label = str(self.weights_version)
        processed = self._outputs.process_outputs(outputs, weight_version=label)
        over: list[str] = processed.reqs_to_abort
        for made in processed.request_outputs:
            request_id = made.request_id
            try:
                result = self._in_progress[request_id].read(made, now)
            except GenrtError as error:
                result = error
            if made.finished:
                ended.append((request_id, result))
        for output in outputs:
            text, request_id = self._in_progress[output.request_id], output.request_id
            is_parsed = text.reasoning is not None and text.request.streamed
            if is_parsed and request_id in self._outputs.request_states:
                detokenizer, reasoning = text.state.detokenizer, cast("Reasoning", text.reasoning)
                written, held_back = detokenizer.output_text, detokenizer.stop_buffer_length
                try:
                    reasoning.add(output.new_token_ids, written, held_back)
                except GenrtError as error:
                    ended.append((request_id, error))
                    over.append(request_id)
        return over

    def progress(self, streamed: Sequence[Streamed]) -> list[Told | None]:
        """Return the part of each text that was drawn since the last call, if any."""
        ids = [self._streamed.get(request, "") for request in streamed]
        self._read_unread(ids)
        texts = [self._in_progress.get(request_id) for request_id in ids]
        return [None if text is None else text.progress() for text in texts]

    def set_version(self, version: int) -> None:
        """Label the tokens that are drawn from now on."""
        self._read_unread([*self._in_progress])
        self.weights_version = version

    def _read_unread(self, request_ids: Sequence[str]) -> None:
        """Let vLLM's output processor read all tokens of these texts."""
        texts = [(each, self._in_progress.get(each)) for each in request_ids]
        unread = [
            text.with_unread(EngineCoreOutput(request_id=request_id, new_token_ids=[]))
            for request_id, text in texts
            if text is not None and text.unread
        ]
        self._read(unread, [], time.perf_counter())

    def forget(self, request_ids: Collection[str]) -> None:
        """Forget texts that have ended or were aborted; ignore other requests."""
        known = [each for each in request_ids if each in self._in_progress]
        for request_id in known:
            request = self._in_progress.pop(request_id).request
            if request.streamed:
                self._streamed.pop(request, None)
        if self._sets is not None:
            self._sets.forget(map(int, known))
        self._outputs.abort_requests(known, internal=True)


def _error_of(output: EngineCoreOutput, structure: str | None) -> GenrtError:
    """Return the error of a text that vLLM gave up."""
    if structure is None:
        return EngineFailed(f"vLLM ended the request with {output.finish_reason}")
    return InvalidRequest(
        f"{structure}: no token can follow. Nothing satisfies it, vLLM cannot compile it, or "
        "bad_words and stop_token_ids rule out every token that it admits: change them"
    )


def _single_tokens(output: EngineCoreOutput) -> list[EngineCoreOutput]:
    """Return an output for each token of this one; the last one has its end."""
    singles = [copy(output) for _ in output.new_token_ids[1:]]
    for each in singles:
        each.finish_reason = each.stop_reason = None
    singles.append(output)
    logprobs = output.new_logprobs
    for n, (each, token_id) in enumerate(zip(singles, output.new_token_ids, strict=False)):
        each.new_token_ids = [token_id]
        each.new_logprobs = None if logprobs is None else logprobs.slice_request(n, 1)
    return singles


def _without_drafts(decoding: Decoding) -> str | None:
    """Return an option that vLLM ignores for drafts, or that needs a view of every draw."""
    used = {
        "min_p": decoding.min_p > 0.0,
        "logit_bias": bool(decoding.logit_bias),
        "sampling_mask": decoding.sampling_mask is not None,
        "logprobs_mode='processed_logprobs'": decoding.returns_processed,
    }
    return next((name for name, is_used in used.items() if is_used), None)


def check_v2(params: SamplingParams) -> None:
    """Raise InvalidRequest beyond the limits of runner V2, which would fail the step of all requests."""
    from vllm.v1.worker.gpu.sample import logit_bias

    ends = params.all_stop_token_ids if params.min_tokens else ()
    words = params.bad_words_token_ids or ()
    most_biased, most_ends = logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS, logit_bias.MAX_NUM_STOP_TOKEN_IDS
    for what, count, most in (
        ("logit_bias, of tokens", len(params.logit_bias or ()), most_biased),
        ("min_tokens, of tokens that end", len(ends), most_ends),
        ("bad_words, of spellings", len(words), envs.VLLM_MAX_NUM_BAD_WORDS),
        ("bad_words, of tokens", sum(map(len, words)), envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS),
    ):
        if count > most:
            raise InvalidRequest(f"{what}: vLLM's runner V2 takes {most} at most, got {count}")


def new_token_count(outputs: Sequence[EngineCoreOutput]) -> int:
    """Return the number of tokens that a step drew."""
    return sum([len(output.new_token_ids) for output in outputs])


def computed_token_count(outputs: Sequence[EngineCoreOutput]) -> int:
    """Return the number of tokens that a step put through the model."""
    begun = [output for output in outputs if output.prefill_stats is not None]
    of_prompts: int = sum([output.prefill_stats.num_computed_tokens for output in begun])
    return new_token_count(outputs) - new_token_count(begun) + of_prompts
