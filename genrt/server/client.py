"""vLLM's ``EngineClient`` over a runtime: vLLM's front ends share the runtime with its other users."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from copy import copy
from http import HTTPStatus
from typing import Any, NoReturn, cast

from vllm.engine.protocol import EngineClient, StreamingInput
from vllm.exceptions import GenerationError
from vllm.inputs import EngineInput, PromptType
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers import renderer_from_config
from vllm.renderers.inputs.preprocess import extract_prompt_components
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tasks import SupportedTask
from vllm.utils.async_utils import merge_async_iterators
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor

from genrt.engines.protocol import FullEngine
from genrt.engines.vllm.texts import NativeText
from genrt.errors import Closed, GenrtError
from genrt.lm import AsyncLM
from genrt.questions.completions import NativeRequest
from genrt.runtime.streams import NativeFlow
from genrt.server.gate import HTTPError, http_error

TASKS: tuple[SupportedTask, ...] = ("generate",)
"""The tasks of vLLM's front ends that a runtime supports."""


class TextFailed(GenerationError):  # type: ignore[misc]
    """A GenrtError inside vLLM's front ends, which log no traceback of this type.

    Args:
        error: why the text failed.

    Attributes:
        answer: the error as clients get it.
    """

    def __init__(self, error: GenrtError) -> None:
        super().__init__(str(error))
        self.__cause__ = error
        self.answer: HTTPError = http_error(error)
        self.status_code = HTTPStatus(self.answer.status)


class RuntimeClient(EngineClient):  # type: ignore[misc]
    """A runtime as an engine of vLLM's front ends. Each text is one native request in its queue. Sleep,
    pauses and profiles are refused: they belong to the runtime's owner.

    Args:
        lm: a runtime over vLLM; its owner closes and restarts it.
    """

    def __init__(self, lm: AsyncLM) -> None:
        engine = cast("FullEngine", lm._thread.engine)
        self._lm = lm
        self._asker = lm._asker
        self._flows: dict[str, set[NativeFlow]] = {}  # texts in progress, by the front end's ids
        self.vllm_config = engine.vllm_config
        self.model_config = self.vllm_config.model_config
        self.renderer = renderer_from_config(self.vllm_config)
        self.input_processor = InputProcessor(self.vllm_config, self.renderer)

    async def generate(
        self,
        prompt: EngineCoreRequest | PromptType | EngineInput | AsyncGenerator[StreamingInput, None],
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
        **_: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of ``sampling_params.n`` texts after a prompt; closing it cancels them.

        The output kinds are those of vLLM's front ends: pieces, or one output at the end. Priorities,
        sessions, trace headers and hints are ignored.

        Raises:
            VLLMValidationError: a parameter is out of range.
            TextFailed: the runtime is closed or paused, or cannot draw the text.
            NotImplementedError: the prompt is a stream.
        """
        if isinstance(prompt, AsyncGenerator):
            raise NotImplementedError("a prompt that is a stream is not supported")
        if isinstance(prompt, EngineCoreRequest):
            prompt = tokens_input(list(prompt.prompt_token_ids or ()))
        # The engine checks structures, by other rules than vLLM's.
        structures = sampling_params.structured_outputs
        if structures is not None:
            sampling_params = copy(sampling_params)
            sampling_params.structured_outputs = None
        if isinstance(prompt, dict) and "type" in prompt:
            made = self.input_processor.process_inputs(request_id, prompt, sampling_params, TASKS)
        else:
            made = await self.input_processor.process_inputs_async(
                request_id, prompt, sampling_params, TASKS, tokenization_kwargs=tokenization_kwargs
            )
        made.sampling_params.structured_outputs = structures
        if prompt_text is None:
            prompt_text, _, _ = extract_prompt_components(self.model_config, prompt)
        if made.prompt_token_ids is None or made.mm_features:
            raise NotImplementedError("prompts are texts or token ids here")
        if reasoning_ended is not None:
            made.reasoning_ended = reasoning_ended
        if reasoning_parser_kwargs is not None:
            made.reasoning_parser_kwargs = reasoning_parser_kwargs
        adapter = None if lora_request is None else lora_request.lora_name
        is_streamed = made.sampling_params.output_kind == RequestOutputKind.DELTA
        texts = [self._text(each, adapter, is_streamed) for each in _texts_of(made, prompt_text)]
        async with aclosing(merge_async_iterators(*texts)) as outputs:
            running, whole = len(texts), None
            async for _, output in outputs:
                running -= output.finished
                output.finished = not running
                if is_streamed:
                    yield output
                elif whole is None:
                    whole = output
                else:
                    whole.add(output, aggregate=True)
            if whole is not None:
                whole.outputs.sort(key=lambda each: each.index)
                yield whole

    async def _text(
        self, text: NativeText, adapter: str | None, is_streamed: bool
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of one text. After ``abort``, the last one ends with that reason."""
        lm, core, flow = self._lm, text.core, NativeFlow()
        token_ids = cast("list[int]", core.prompt_token_ids)
        flows = self._flows.setdefault(core.request_id, set())
        flows.add(flow)
        try:
            bound = lm._bound(adapter)
            request = NativeRequest(tuple(token_ids), text, next(lm._nonces), bound, is_streamed)
            async with aclosing(self._asker.native(request, flow)) as steps:
                async for outputs in steps:
                    for output in outputs:
                        yield output
            if not flow.is_over:
                end = CompletionOutput(text.index, "", [], None, None, finish_reason="abort")
                yield RequestOutput(core.request_id, text.prompt, token_ids, None, [end], True)
        except GenrtError as error:
            raise TextFailed(error) from error
        finally:
            flows.discard(flow)
            if not flows and self._flows.get(core.request_id) is flows:
                del self._flows[core.request_id]

    def encode(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("a runtime has no pooling")

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Cancel these texts; their readers get what there is, ended by "abort"."""
        for each in [request_id] if isinstance(request_id, str) else [*request_id]:
            for flow in [*self._flows.get(each, ())]:
                flow.leave()

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter under its name, for all users of the runtime."""
        await self._lm.add_adapter(lora_request.lora_name, lora_request.lora_path)
        return True

    @property
    def is_running(self) -> bool:
        return self._lm._thread.alive

    @property
    def is_stopped(self) -> bool:
        return not self.is_running

    @property
    def errored(self) -> bool:
        return not self.is_running

    @property
    def dead_error(self) -> BaseException:
        """The error of requests to a dead runtime; a restart may end that state."""
        error: BaseException = TextFailed(Closed("the runtime is closed, or its engine has died"))
        return error

    async def check_health(self) -> None:
        """Raise ``dead_error`` if the runtime is dead."""
        if self.errored:
            raise self.dead_error

    async def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        return TASKS

    async def _no(self) -> bool:
        return False

    async def _nothing(self, *_: Any, **__: Any) -> None:
        """Do nothing: ``AsyncLM.statistics`` counts, and a runtime transfers no KV blocks."""

    is_tracing_enabled = is_sleeping = is_paused = _no
    do_log_stats = notify_kv_transfer_request_rejected = _nothing

    def shutdown(self, timeout: float | None = None) -> None:
        """Free the front end's resources. The runtime goes on."""
        self.renderer.shutdown()

    async def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("the server does not offer this: ask the runtime's owner")

    start_profile = stop_profile = sleep = wake_up = release_kv_cache_memory = _refuse
    reset_mm_cache = reset_encoder_cache = reset_prefix_cache = _refuse
    pause_generation = resume_generation = _refuse


def _texts_of(made: EngineCoreRequest, prompt: str | None) -> list[NativeText]:
    """Return a text for each of ``n``. With a seed, number ``i`` has ``seed + i``, as in vLLM."""
    params = made.sampling_params
    if params.n == 1:
        return [NativeText(made, prompt)]
    texts: list[NativeText] = []
    for index in range(params.n):
        core = copy(made)
        core.sampling_params = own = copy(params)
        own.n = 1
        if params.seed is not None:
            own.seed = params.seed + index
        texts.append(NativeText(core, prompt, index))
    return texts
