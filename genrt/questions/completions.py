"""Samples and completions: tokens that the engine's own decode loop draws one after another."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple, Required, TypeAlias, TypedDict, get_args

import numpy as np

from genrt.errors import ContextTooLong, InvalidRequest
from genrt.numbers import (
    check_bool,
    check_float,
    check_int,
    check_one_of,
    check_options,
    frozen,
    shown,
)
from genrt.questions.arguments import Adapter, TokenIds, abbreviated, check_seed, seed_at
from genrt.questions.request import Request
from genrt.questions.rows import Limits
from genrt.tokens.sampling import GREEDY_BELOW
from genrt.tokens.sets import DrawnFrom, MaskForm, as_bits

FinishReason: TypeAlias = Literal["stop", "length", "abort"]
"""Why a text is over: it has ended, it is as long as it may be, or the engine aborted it."""

LogprobsMode: TypeAlias = Literal["raw_logprobs", "processed_logprobs"]
"""The distribution of log-probabilities: the model's, or the one that tokens are drawn from."""

STRUCTURES = ("json_schema", "regex", "grammar", "choice")
"""The options that prescribe a form; a completion has at most one."""


class WeightsSpan(NamedTuple):
    """The tokens from ``start`` to before ``end`` of a text, drawn by one ``version`` of the weights."""

    version: int
    start: int
    end: int


def weights_spans(
    begins: Sequence[tuple[int, int]], start: int, end: int
) -> tuple[WeightsSpan, ...]:
    """Return the spans of the tokens from ``start`` to before ``end``.

    ``begins`` has each version with the place of its first token, in order.
    """
    ends = [*(place for _, place in begins[1:]), end]
    spans = (
        WeightsSpan(version, max(place, start), min(until, end))
        for (version, place), until in zip(begins, ends, strict=False)
    )
    return tuple(each for each in spans if each.start < each.end)


@dataclass(frozen=True, slots=True, repr=False)
class SamplingMask:
    """The set of tokens that each token of a text was drawn from, one place for each drawn token.

    A trainer divides its logits by the temperature, after penalties and ``logit_bias`` if there are any,
    and normalizes them over a set. It gets ``logprobs``, to 1e-5 for equal logits. Arrays are read-only.

    Attributes:
        form: the form in which the sets can be read.
        places: the sets.
        words: how many int32 words the bits of the vocabulary take.
    """

    form: MaskForm
    places: tuple[DrawnFrom, ...]
    words: int

    @property
    def logprobs(self) -> np.ndarray:
        """The log-probability of each drawn token within its set, float32 ``[n]``; 0 if it is greedy."""
        return frozen(np.array([logprob for logprob, _, _ in self.places], np.float32))

    @property
    def log_mass(self) -> np.ndarray:
        """The log-probability of each set by the model at the temperature, float32 ``[n]``: before
        penalties, and with a structure among the tokens that it admits. 0 if it is greedy."""
        return frozen(np.array([log_mass for _, log_mass, _ in self.places], np.float32))

    @property
    def token_ids(self) -> np.ndarray:
        """The ids of all sets in order, int32: set ``i`` is ``token_ids[offsets[i] : offsets[i + 1]]``.
        Raises InvalidRequest unless the form is ``"ids"``, as ``offsets``."""
        return np.frombuffer(b"".join(self._sets("ids")), np.int32)

    @property
    def offsets(self) -> np.ndarray:
        """Where each set begins in ``token_ids``, and the end of the last one: int64 ``[n + 1]``."""
        sizes = [len(each) // 4 for each in self._sets("ids")]
        return frozen(np.array([0, *sizes], np.int64).cumsum())

    @property
    def bits(self) -> np.ndarray:
        """The sets as masks, int32 ``[n, words]``: token ``i`` is bit ``i % 32`` of word ``i // 32``.
        Raises InvalidRequest unless the form is ``"bits"``."""
        return frozen(as_bits(self._sets("bits"), self.words))

    def _sets(self, form: MaskForm) -> list[bytes]:
        if self.form != form:
            raise InvalidRequest(f"the sets are {self.form}: ask with sampling_mask={form!r}")
        return [tokens for _, _, tokens in self.places]

    def __len__(self) -> int:
        return len(self.places)

    def __repr__(self) -> str:
        return f"SamplingMask({self.form!r}, {len(self)} places)"


@dataclass(frozen=True, slots=True)
class Completion:
    """A text that the engine has drawn.

    Attributes:
        text: by default without special tokens and without the stop string.
        token_ids: all tokens that were drawn, including one that stopped it.
        prompt_token_ids: the tokens before them.
        logprobs: the log-probability of each drawn token, by ``logprobs_mode=``; with a structure, among
            the tokens that it admits. Empty without ``logprobs=``.
        top_logprobs: at each place, the ``logprobs=`` likeliest tokens with their log-probabilities.
        finish_reason: "stop", "length" (``max_tokens`` or the context length) or "abort".
        stop_reason: the stop string or token id at the end; ``None`` for the end token and for other
            finish reasons.
        seconds: from when the engine took the request to its end.
        seconds_to_first_token: from when the engine took the request to its first token.
        reasoning: the model's reasoning before the text, with ``split_reasoning``. Its tokens are among
            ``token_ids``.
        weights_version: ``AsyncLM.weights_version`` at the last draw.
        weights_spans: the tokens that each version of the weights drew, in order: one span, unless
            ``update_weights(pending="continue")`` replaced the weights meanwhile.
        sampling_mask: the sets that the tokens were drawn from, with ``sampling_mask=``.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[dict[int, float], ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    seconds: float
    seconds_to_first_token: float
    reasoning: str = ""
    weights_version: int = 0
    weights_spans: tuple[WeightsSpan, ...] = ()
    sampling_mask: SamplingMask | None = None

    @property
    def truncated(self) -> bool:
        """True if the text was cut off, so that it may violate its structure."""
        return self.finish_reason != "stop"


@dataclass(frozen=True, slots=True)
class Delta:
    """A part of a stream: the tokens since the last part. All deltas together are the completion.

    Attributes:
        text: the new text. Incomplete characters, and text that may begin a stop string, come later.
        token_ids: the tokens drawn.
        logprobs: for these tokens, as in a completion.
        top_logprobs: for these tokens, as in a completion.
        start: the number of earlier tokens.
        text_start: the number of earlier characters.
        reasoning: the new reasoning.
        reasoning_start: the number of earlier characters of reasoning.
        finish_reason: in the last delta, the completion's; ``None`` before.
        stop_reason: in the last delta, the completion's.
        weights_spans: for these tokens, by their places in the text, as in a completion.
        sampling_mask: for these tokens, as in a completion.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[dict[int, float], ...] = ()
    start: int = 0
    text_start: int = 0
    reasoning: str = ""
    reasoning_start: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    weights_spans: tuple[WeightsSpan, ...] = ()
    sampling_mask: SamplingMask | None = None


@dataclass(frozen=True, slots=True)
class Decoding:
    """The checked options of a completion; ``CompletionOptions`` and ``DecodingOptions`` document them.

    ``structure`` is a name of ``STRUCTURES`` and its value: a JSON text, a pattern, a grammar, or a
    choice of texts. ``template`` has the plain options of a chat's template.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bad_words: tuple[str, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw_logprobs"
    sampling_mask: MaskForm | None = None
    structure: tuple[str, str | tuple[str, ...]] | None = None
    split_reasoning: bool | None = None
    is_chat: bool = False
    template: tuple[tuple[str, Any], ...] = ()

    @property
    def returns_processed(self) -> bool:
        """True if log-probabilities come from the sampling distribution."""
        return self.logprobs is not None and self.logprobs_mode == "processed_logprobs"

    @property
    def is_whole(self) -> bool:
        """True if every token may be drawn, however unlikely it is."""
        cuts = self.top_p < 1.0 or self.top_k or self.min_p or self.temperature < GREEDY_BELOW
        return not cuts and self.structure is None

    @property
    def changes_logits(self) -> bool:
        """True if an option changes logits, rather than only excluding tokens."""
        penalties = self.frequency_penalty or self.presence_penalty
        return bool(penalties or self.logit_bias or self.repetition_penalty != 1.0)

    @property
    def of_text(self) -> str | None:
        """The name of an option that needs a tokenizer, if there is one."""
        if self.structure is not None:
            return self.structure[0]
        return next((name for name in ("stop", "bad_words") if getattr(self, name)), None)

    def __repr__(self) -> str:
        changed = [
            f"{each.name}={value!r}"
            for each in fields(self)
            if (value := getattr(self, each.name)) != each.default
        ]
        return f"Decoding({', '.join(changed)})"


@dataclass(frozen=True, slots=True, repr=False)
class SampleRequest(Request):
    """Up to ``max_tokens`` tokens drawn after ``token_ids``; ``SampleOptions`` has the options. The
    answer is a tuple of token ids.

    Attributes:
        stop_token_ids: a token that ends the sample and is not part of the result.
        nonce: decides the draws of a request without a seed, and distinguishes it. ``None`` if equal
            requests have equal answers.
    """

    token_ids: tuple[int, ...]
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    adapter: Adapter | None = None
    nonce: int | None = None
    weights_version: int = 0

    streamed: ClassVar[bool] = False

    @property
    def decoding(self) -> Decoding:
        """The options as those of a completion that only ``stop_token_ids`` end early."""
        return Decoding(
            self.max_tokens,
            self.temperature,
            self.top_p,
            self.top_k,
            self.min_p,
            stop_token_ids=tuple(sorted(self.stop_token_ids)),
            ignore_eos=True,
        )

    def result(self, drawn: Sequence[int], reason: FinishReason) -> tuple[int, ...]:
        """Return the drawn tokens without the one that stopped the sample."""
        return tuple(drawn[:-1] if reason == "stop" else drawn)

    def __repr__(self) -> str:
        ids = abbreviated(self.token_ids)
        return (
            f"SampleRequest({ids}, max_tokens={self.max_tokens}, temperature={self.temperature}, "
            f"seed={self.seed}, adapter={self.adapter})"
        )


@dataclass(frozen=True, slots=True, repr=False)
class CompletionRequest(Request):
    """The completion of ``token_ids`` by ``decoding``. The answer is a ``Completion``.

    Attributes:
        nonce: as in ``SampleRequest``.
        streamed: whether the engine delivers parts meanwhile. A streamed request always has a nonce, so
            callers do not share it.
    """

    token_ids: tuple[int, ...]
    decoding: Decoding
    seed: int | None = None
    adapter: Adapter | None = None
    nonce: int | None = None
    streamed: bool = False
    weights_version: int = 0
    _hash: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self._key()))

    def _key(self) -> tuple[Any, ...]:
        own = self.token_ids, self.decoding, self.seed, self.adapter, self.nonce, self.streamed
        return (*own, self.weights_version)

    @property
    def temperature(self) -> float:
        """The temperature; 0 is greedy."""
        return self.decoding.temperature

    def owned(self, result: Any) -> Any:
        return replace(result, top_logprobs=tuple(map(dict, result.top_logprobs)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._key()  # another process hashes its texts by another key

    def __repr__(self) -> str:
        ids, options = abbreviated(self.token_ids), repr(self.decoding)
        return f"CompletionRequest({ids}, {options}, seed={self.seed}, adapter={self.adapter})"


class DecodingOptions(TypedDict, total=False):
    """The options of samples and completions.

    Attributes:
        temperature: divides the logits; below 1e-5 it is greedy.
        top_p: draw among the likeliest tokens with this joint probability; 1.0 is off.
        top_k: draw among this many of the likeliest tokens; 0 is off.
        min_p: draw among tokens with at least this share of the likeliest token's probability; 0.0 is
            off.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float


class SampleOptions(DecodingOptions, total=False):
    """The options of ``AsyncLM.sample``, in addition to ``DecodingOptions``.

    Attributes:
        max_tokens: the most tokens, at least 1.
        stop_token_ids: each ends the sample and is not returned. Add ``tokenizer.eos_token_id`` to stop
            there; otherwise the sample continues.
        seed: makes the draws reproducible, independent of the rest of the batch. Without one, equal calls
            are independent draws.
        adapter: the name of the adapter to ask; by default the base model.
    """

    max_tokens: Required[int]
    stop_token_ids: Collection[int]
    seed: int | None
    adapter: str | None


@dataclass(frozen=True, slots=True, repr=False)
class NativeRequest(Request):
    """A text after ``token_ids`` in the engine's own terms, for its own front ends.

    The answer is a tuple of the engine's outputs. Requests are equal if their nonces are; a runtime uses
    no nonce twice.

    Attributes:
        asked: the engine's own parameters. Its ``tell(outputs)`` notes delivered outputs.
        nonce: decides the draws if ``asked`` has no seed.
        streamed: whether outputs are delivered meanwhile; the answer then has the rest.
    """

    token_ids: tuple[int, ...] = field(compare=False)
    asked: Any = field(compare=False)
    nonce: int
    adapter: Adapter | None = None
    streamed: bool = False
    weights_version: int = 0

    def __repr__(self) -> str:
        return f"NativeRequest({abbreviated(self.token_ids)}, adapter={self.adapter})"


TextRequest: TypeAlias = SampleRequest | CompletionRequest | NativeRequest
"""A text: a request that takes the engine many steps."""

Streamed: TypeAlias = CompletionRequest | NativeRequest
"""A text whose parts an engine can deliver while it draws."""

Told: TypeAlias = Delta | tuple[Any, ...]
"""A delivered part of a text, or of a native one."""


class CompletionOptions(DecodingOptions, total=False):
    """The options of a completion, with ``DecodingOptions``; names and meanings are vLLM's
    (``SamplingParams``).

    Attributes:
        max_tokens: the most tokens; by default the rest of the context length.
        stop: a text or several; the completion ends at the beginning of the first of them.
        stop_token_ids: tokens that end the completion and are not in its text.
        include_stop_str_in_output: whether the text includes the stop string.
        skip_special_tokens: whether the text excludes special tokens.
        min_tokens: the least tokens before the completion may end. A complete structure ends it earlier.
        presence_penalty: is subtracted from the logits of drawn tokens; -2 to 2.
        frequency_penalty: is subtracted once for each time that a token was drawn; -2 to 2.
        repetition_penalty: divides the positive logits, and multiplies the negative ones, of tokens in
            the prompt or the text; 0.01 to 100.
        bad_words: forbidden texts, also after one space, by all of the tokenizer's spellings.
        logit_bias: numbers to add to the logits of some tokens; -100 to 100.
        ignore_eos: whether the text continues after the model's end token. A complete structure ends it.
        logprobs: returns log-probabilities of the drawn tokens, and of this many of the likeliest tokens
            at each place; by default neither.
        logprobs_mode: "raw_logprobs", the default, come from the model; "processed_logprobs" from the
            sampling distribution, after penalties, temperature and truncation (0 if it is greedy).
        sampling_mask: returns the set of tokens that each token was drawn from, as "ids" or as "bits",
            with the log-probability in it (``SamplingMask``), and log-probabilities as ``logprobs=0``.
        json_schema: the JSON schema of the text: a dict, a JSON text, or a pydantic model.
        regex: a pattern that the whole text matches.
        grammar: a grammar of the whole text, as in vLLM's structured outputs.
        choice: the texts to choose from.
        split_reasoning: whether the model's reasoning is separate from its text, so that a structure
            applies to the text alone. It needs vLLM's option ``reasoning_parser``, and is then the
            default in chats.
    """

    max_tokens: int | None
    stop: str | Sequence[str]
    stop_token_ids: Collection[int]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    min_tokens: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    bad_words: Sequence[str]
    logit_bias: Mapping[int, float]
    ignore_eos: bool
    logprobs: int | None
    logprobs_mode: LogprobsMode
    sampling_mask: MaskForm | None
    json_schema: Mapping[str, Any] | str | type
    regex: str
    grammar: str
    choice: Sequence[str]
    split_reasoning: bool | None


class GenerateOptions(CompletionOptions, total=False):
    """The options of ``AsyncLM.generate``: ``CompletionOptions`` and the options of every question.

    Attributes:
        seed: as in ``SampleOptions``.
        adapter: as in ``SampleOptions``.
        timeout: the seconds until TimedOut is raised and the question is withdrawn.
    """

    seed: int | None
    adapter: str | None
    timeout: float | None


class TurnOptions(GenerateOptions, total=False):
    """The options of ``AsyncLM.chat``: ``GenerateOptions`` and the options of the chat template.

    Attributes:
        tools: the tools that the model may call, as in transformers' ``apply_chat_template``.
        chat_template_kwargs: other options of the template, such as ``enable_thinking``.
    """

    tools: Sequence[Any] | None
    chat_template_kwargs: Mapping[str, Any] | None


def sample_requests(
    limits: Limits,
    contexts: Sequence[TokenIds],
    adapter: Adapter | None,
    nonces: Iterator[int],
    method: str,
    options: Mapping[str, Any],
) -> list[SampleRequest]:
    """Return a request for each context; context ``i`` is drawn with seed ``seed + i``.

    Raises:
        TypeError: as Python raises for ``method``: ``max_tokens`` is missing.
        InvalidRequest: as ``completion_requests``; ContextTooLong.
    """
    check_options(method, options, [*SampleOptions.__annotations__, "timeout"])
    if "max_tokens" not in options:
        raise TypeError(f"{method}() missing a required keyword argument: 'max_tokens'")
    given = {**options, "max_tokens": check_int("max_tokens", options["max_tokens"], 1)}
    seed = check_seed(given.pop("seed", None))
    checked = {name: _CHECKS[name](limits, name, each) for name, each in given.items()}
    checked["stop_token_ids"] = frozenset(checked.get("stop_token_ids", ()))
    requests: list[SampleRequest] = []
    for place, token_ids in enumerate(contexts):
        ids, nonce = limits.token_ids(token_ids), next(nonces)
        _check_room(limits, len(ids), checked["max_tokens"])
        decided = _decided_by(seed, place, nonce, checked.get("temperature"))
        requests.append(SampleRequest(ids, adapter=adapter, **checked, **decided))
    return requests


def completion_requests(
    limits: Limits,
    contexts: Sequence[TokenIds],
    adapter: Adapter | None,
    nonces: Iterator[int],
    seed: int | None,
    options: Mapping[str, Any],
    template: Mapping[str, Any] | None = None,
) -> list[CompletionRequest]:
    """Return a request for each context; context ``i`` is drawn with seed ``seed + i``. A chat has a
    ``template``, with options.

    Raises:
        InvalidRequest: an option is unknown, of the wrong type or out of range, also without contexts.
        ContextTooLong: a context and ``max_tokens`` are too long together.
    """
    known = (GenerateOptions if template is None else TurnOptions).__annotations__
    check_options("a completion", options, known)
    checked, seed = _checked_options(limits, options), check_seed(seed)
    if template is not None:
        checked |= {"is_chat": True, "template": _plain(template)}
    max_tokens = checked.pop("max_tokens", None)
    requests: list[CompletionRequest] = []
    for place, token_ids in enumerate(contexts):
        ids = limits.token_ids(token_ids)
        wanted = max(limits.max_model_len - len(ids), 1) if max_tokens is None else max_tokens
        _check_room(limits, len(ids), wanted)
        decoding = Decoding(wanted, **checked)
        if decoding.sampling_mask == "ids" and decoding.is_whole:
            raise InvalidRequest(
                "sampling_mask='ids' would list the whole vocabulary for each token: narrow the draws by "
                "top_p, top_k, min_p or a structure, or ask for sampling_mask='bits'"
            )
        check_int("min_tokens", decoding.min_tokens, 0, wanted)
        nonce = next(nonces) if seed is None else None
        decided = _decided_by(seed, place, nonce, decoding.temperature)
        requests.append(CompletionRequest(ids, decoding, adapter=adapter, **decided))
    return requests


def _decided_by(
    seed: int | None, place: int, nonce: int | None, temperature: float | None
) -> dict[str, Any]:
    """Return the seed or else the nonce that decides the draws; greedy requests have neither."""
    if temperature == 0.0:
        return {}
    return {"nonce": nonce} if seed is None else {"seed": seed_at(seed, place)}


Check: TypeAlias = Callable[[Limits, str, Any], Any]
"""Returns the value of an option by its name, as plain types; raises InvalidRequest if it is wrong."""


def _number(low: float, high: float = math.inf) -> Check:
    return lambda _, name, value: check_float(name, value, low, high)


def _integer(low: int, *, optional: bool = False) -> Check:
    return lambda _, name, value: (
        None if optional and value is None else check_int(name, value, low)
    )


def _flag(_: Limits, name: str, value: object) -> bool:
    return check_bool(name, value)


def _one_of(kind: Any, *, optional: bool = False) -> Check:
    names = (*get_args(kind), None) if optional else get_args(kind)
    return lambda _, name, value: check_one_of(name, value, names)


def _top_p(_: Limits, name: str, value: object) -> float:
    top_p = check_float(name, value, 0.0, 1.0)
    if top_p == 0.0:
        raise InvalidRequest("top_p must be over 0 (1.0 keeps everything), got 0")
    # The least normal float32, in which vLLM computes: any smaller number keeps the likeliest token too.
    return max(top_p, 2.0**-126)


def _top_k(limits: Limits, name: str, value: int) -> int:
    top_k = check_int(name, value, 0)
    return top_k if top_k < limits.vocab_size else 0


def _stop_token_ids(limits: Limits, name: str, value: Any) -> tuple[int, ...]:
    stops = tuple(value) if isinstance(value, Set) else value
    return tuple(sorted({*limits.token_ids(stops, allow_empty=True, name=name)}))


def _check_room(limits: Limits, length: int, max_tokens: int) -> None:
    """Raise ContextTooLong unless ``max_tokens`` tokens fit behind ``length`` others."""
    room = limits.max_model_len - length
    if max_tokens > room:
        advice = f"max_tokens can be {room} here" if room > 0 else "shorten the context"
        raise ContextTooLong(
            f"a context of length {length} and max_tokens={shown(max_tokens)} are over "
            f"max_model_len={limits.max_model_len} together: {advice}"
        )


def _checked_options(limits: Limits, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options as fields of ``Decoding``, in plain types."""
    given: dict[str, Any] = {**options}
    structure = _structure_option({name: given.pop(name) for name in STRUCTURES if name in given})
    checked = {name: _CHECKS[name](limits, name, value) for name, value in given.items()}
    if checked.get("sampling_mask") is not None and checked.get("logprobs") is None:
        checked["logprobs"] = 0
    if structure is not None:  # its end ends the text
        checked["ignore_eos"] = False
    return checked | {"structure": structure}


def _plain(template: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return the options of a template that a reasoning parser may want to know."""
    plain = {k: v for k, v in template.items() if isinstance(v, bool | int | float | str | None)}
    return tuple((name, value) for name, value in plain.items() if name != "chat_template")


def _structure_option(given: dict[str, Any]) -> tuple[str, str | tuple[str, ...]] | None:
    if len(given) > 1:
        raise InvalidRequest(f"give one of {', '.join(given)}: a text has one structure")
    if not given:
        return None
    [(name, value)] = given.items()
    if name == "choice":
        choices = _texts(None, name, value)
        if not choices:
            raise InvalidRequest("choice must have at least one text")
        return name, choices
    if name == "json_schema":
        value = schema_text(value)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{name} must be a non-empty str, got {shown(value)}")
    _check_encodable(name, value)
    return name, value


def schema_text(schema: Mapping[str, Any] | str | bool | type) -> str:
    """Return a JSON schema of any form as a JSON text. Raises InvalidRequest if that is impossible."""
    given: Any = schema
    if isinstance(given, str) and given:
        return given
    try:
        if isinstance(given, type) and hasattr(given, "model_json_schema"):
            given = given.model_json_schema()
        if isinstance(given, Mapping | bool):
            given = dict(given) if isinstance(given, Mapping) else given
            return json.dumps(given, allow_nan=False)
    except Exception as error:  # pydantic has error types of its own
        raise InvalidRequest(f"json_schema is not JSON: {error}") from error
    raise InvalidRequest(
        f"json_schema must be a dict, a JSON text or a pydantic model, got {shown(schema)}"
    )


def _texts(_: Limits | None, name: str, value: object) -> tuple[str, ...]:
    """Return a text, or texts, as a tuple; raise InvalidRequest if one is empty or no text."""
    texts = (value,) if isinstance(value, str) and name == "stop" else value
    if not isinstance(texts, list | tuple | set | frozenset):
        raise InvalidRequest(f"{name} must be a list of texts, got {shown(value)}")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise InvalidRequest(f"{name} must be of non-empty texts, got {shown(text)}")
        _check_encodable(name, text)
    return tuple(texts)


def _check_encodable(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{name}: there is a lone surrogate at character {error.start}, which no text that is drawn "
            "can have: take it out"
        ) from error


def _logit_bias(limits: Limits, name: str, value: object) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{name} must map token ids to numbers, got {shown(value)}")
    pairs = [
        (check_int(f"a token id of {name}", token, 0), check_float(name, bias, -100.0, 100.0))
        for token, bias in value.items()
    ]
    limits.token_ids([token for token, _ in pairs], allow_empty=True, name=name)
    return tuple(sorted(pairs))


_CHECKS: dict[str, Check] = {
    # A higher one gives the same distribution in float32, or makes the logits of masked tokens NaN.
    "temperature": lambda _, name, value: min(check_float(name, value, 0.0), 2.0**100),
    "top_p": _top_p,
    "top_k": _top_k,
    "min_p": _number(0.0, 1.0),
    "stop_token_ids": _stop_token_ids,
    "max_tokens": _integer(1, optional=True),
    "stop": _texts,
    "include_stop_str_in_output": _flag,
    "skip_special_tokens": _flag,
    "min_tokens": _integer(0),
    "presence_penalty": _number(-2.0, 2.0),
    "frequency_penalty": _number(-2.0, 2.0),
    "repetition_penalty": _number(0.01, 100.0),
    "bad_words": _texts,
    "logit_bias": _logit_bias,
    "ignore_eos": _flag,
    "logprobs_mode": _one_of(LogprobsMode),
    "sampling_mask": _one_of(MaskForm, optional=True),
    "split_reasoning": lambda _, name, value: None if value is None else check_bool(name, value),
    "logprobs": lambda limits, name, value: (
        None if value is None else check_int(name, value, 0, limits.vocab_size)
    ),
}
"""The check of each option, by its name; ``_structure_option`` checks the structures."""
