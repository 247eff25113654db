"""Separates the reasoning that a model writes before its answer, by vLLM's parsers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig

from genrt.errors import EngineFailed, InvalidRequest
from genrt.questions.completions import CompletionRequest, Decoding

if TYPE_CHECKING:
    from vllm.parser import Parser

NO_PARSER = (
    "split_reasoning needs the parser of the model's reasoning: load with engine_options="
    "{'reasoning_parser': …} and vLLM's name of the parser"
)

NO_TOKENIZER = "reasoning_parser needs a tokenizer: leave out skip_tokenizer_init"


class ReasoningParsers:
    """Makes parsers of one model's reasoning, of the class that ``reasoning_parser`` names. Raises
    InvalidRequest if there is none, or it does not fit the model's tokenizer."""

    def __init__(self, config: VllmConfig) -> None:
        self._config = config.model_config
        named = config.structured_outputs_config
        self._made: type[Parser] | None = None
        if not named.reasoning_parser:
            return
        # Imported here, as it brings vLLM's server along.
        from vllm.parser import ParserManager
        from vllm.reasoning import ReasoningParserManager
        from vllm.tokenizers import cached_tokenizer_from_config

        self._tokenizer = cached_tokenizer_from_config(model_config=self._config)
        try:
            if named.reasoning_parser_plugin:
                ReasoningParserManager.import_reasoning_parser(named.reasoning_parser_plugin)
            self._made = ParserManager.get_parser(
                reasoning_parser_name=named.reasoning_parser,
                is_harmony=self._config.hf_config.model_type == "gpt_oss",
            )
            self._parser({})
        except Exception as error:
            raise InvalidRequest(
                f"reasoning_parser={named.reasoning_parser!r}: {error or type(error).__name__}"
            ) from error

    def __bool__(self) -> bool:
        return self._made is not None

    def splits(self, decoding: Decoding) -> bool:
        """Return whether the reasoning of such a text is separated: by default in chats only."""
        wanted = decoding.split_reasoning
        return bool(self) and (decoding.is_chat if wanted is None else wanted)

    def begin(self, request: CompletionRequest) -> Reasoning:
        """Return the parser of one text."""
        kwargs = dict(request.decoding.template)
        return Reasoning(self._parser(kwargs), request, kwargs)

    def _parser(self, kwargs: dict[str, Any]) -> Parser:
        if self._made is None:
            raise InvalidRequest(NO_PARSER)
        return self._made(self._tokenizer, model_config=self._config, chat_template_kwargs=kwargs)


class Reasoning:
    """The reasoning of one text, and the text that follows.

    A whole text is parsed by ``split``. The tokens of a stream are parsed one by one by ``add`` and
    ``end``, because vLLM's parsers miss a marker that comes together with other tokens. All three raise
    EngineFailed if vLLM's parser fails.

    Attributes:
        is_over: whether the prompt already ends the reasoning, so that nothing is separated.
        skip_special_tokens: whether vLLM leaves special tokens out of the text to be parsed.
        reasoning, text: the reasoning that ``add`` and ``end`` have found, and the text after it.
    """

    def __init__(
        self, parser: Parser, request: CompletionRequest, template_kwargs: dict[str, Any]
    ) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        self._parser = parser
        self._prompt = [*request.token_ids]
        self.template_kwargs = template_kwargs
        self.is_over = bool(parser.is_reasoning_end(self._prompt))
        asked = ChatCompletionRequest(
            messages=[{"role": "user", "content": ""}],
            skip_special_tokens=request.decoding.skip_special_tokens,
            chat_template_kwargs=template_kwargs,
        )
        if not self.is_over:
            asked = parser.adjust_request(asked)
        self._asked = asked
        self.skip_special_tokens = bool(asked.skip_special_tokens)
        self.reasoning = self.text = ""
        # Unparsed tokens, each with its end in the decoded text.
        self._waiting: deque[tuple[int, int]] = deque()
        self._added = self._read = 0  # tokens; characters of the decoded text

    def split(self, token_ids: Sequence[int], decoded: str) -> tuple[str, str]:
        """Return the reasoning and the text of a decoded text with these tokens."""
        with _parser_errors():
            self._parser.set_prompt_token_ids(self._prompt)
            reasoning, text, _ = self._parser.parse(
                decoded, self._asked, model_output_token_ids=token_ids
            )
        return reasoning or "", text or ""

    def add(self, token_ids: Sequence[int], decoded: str, held_back: int) -> None:
        """Parse a step's tokens. The last ``held_back`` characters of the text ``decoded`` so far may
        begin a stop string."""
        self._waiting.extend((token_id, len(decoded)) for token_id in token_ids)
        self._added += len(token_ids)
        certain = len(decoded) - held_back
        # The newest token waits, because the parser needs to know which token is the last.
        while len(self._waiting) > 1 and self._waiting[0][1] <= certain:
            self._parse(decoded, finished=False)

    def end(self, token_ids: Sequence[int], decoded: str) -> tuple[str, str]:
        """Parse the tokens that ``add`` has not parsed; return the reasoning and the text."""
        self._waiting.extend((token_id, len(decoded)) for token_id in token_ids[self._added :])
        while self._waiting:
            self._parse(decoded, finished=len(self._waiting) == 1)
        return self.reasoning, self.text

    def _parse(self, decoded: str, *, finished: bool) -> None:
        token_id, end = self._waiting.popleft()
        start, self._read = self._read, max(self._read, min(end, len(decoded)))
        new = decoded[start : self._read]
        with _parser_errors():
            found = self._parser.parse_delta(
                new, [token_id], self._asked, self._prompt, finished=finished
            )
        if found is not None:
            self.reasoning += found.reasoning or ""
            self.text += found.content or ""


@contextmanager
def _parser_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        message = f"vLLM's reasoning parser failed: {type(error).__name__}: {error}"
        raise EngineFailed(message) from error
