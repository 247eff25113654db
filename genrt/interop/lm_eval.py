"""lm-evaluation-harness on a genrt runtime: its tasks run unchanged, many items at once.

::

    import lm_eval
    from genrt.interop.lm_eval import as_lm_eval

    with genrt.load("Qwen/Qwen2.5-0.5B-Instruct") as lm:
        results = lm_eval.simple_evaluate(as_lm_eval(lm), tasks=["hellaswag", "gsm8k"])

The interface is that of lm-evaluation-harness 0.4. Continuations with one context share its computation.
Texts beyond the model's context are scored by windows. Importing this file imports the harness. Raises
EngineNotInstalled without it (extra ``eval``).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import Any, cast

from genrt.errors import InvalidRequest
from genrt.generation.many import Item, generate_many_sync
from genrt.interop.foreign import importing
from genrt.lm import AsyncLM
from genrt.numbers import check_int, shown
from genrt.questions.completions import GenerateOptions
from genrt.questions.scores import greedy_joined, greedy_requests

with importing("eval"):
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import (
        handle_stop_sequences,
        has_bos_prefix,
        normalize_gen_kwargs,
        postprocess_generated_text,
    )
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

__all__ = ["GenrtEval", "as_lm_eval"]

MOST_TOGETHER = 2**22
"""The most token ids in one question."""


def as_lm_eval(
    lm: AsyncLM,
    *,
    adapter: str | None = None,
    max_gen_toks: int = 256,
    add_bos_token: bool | None = None,
) -> GenrtEval:
    """Return the runtime as a model of lm-evaluation-harness, for ``simple_evaluate`` and ``evaluate``.

    Any number of them share the runtime, and do not close it.

    Args:
        adapter: the name of the adapter to ask; by default the base model.
        max_gen_toks: the most tokens of a text, unless a task sets its own.
        add_bos_token: whether special tokens are put around texts; by default as the tokenizer does.

    Raises:
        InvalidRequest: ``lm`` is not a runtime, or has no tokenizer with an end-of-text token;
            UnknownAdapter.
    """
    if not isinstance(lm, AsyncLM):
        raise InvalidRequest(f"lm must be an AsyncLM, as genrt.load returns, got {shown(lm)}")
    if getattr(lm.tokenizer, "eos_token_id", None) is None:
        raise InvalidRequest("lm-evaluation-harness needs a tokenizer with an end-of-text token")
    if add_bos_token is not None and not isinstance(add_bos_token, bool):
        raise InvalidRequest(
            f"add_bos_token must be True, False or None, got {shown(add_bos_token)}"
        )
    lm._bound(adapter)
    check_int("max_gen_toks", max_gen_toks, 1)
    return GenrtEval(lm, adapter, int(max_gen_toks), add_bos_token)


class GenrtEval(TemplateLM):  # type: ignore[misc]
    """A genrt runtime with the methods of ``lm_eval.api.model.LM``. Made by ``as_lm_eval``. Texts have
    the same tokens as with the harness's ``hf`` backend, so that results can be compared."""

    def __init__(
        self, lm: AsyncLM, adapter: str | None, max_gen_toks: int, add_bos_token: bool | None
    ) -> None:
        super().__init__()
        self._lm = lm
        self._adapter = adapter
        self.tokenizer = lm.tokenizer
        self.max_gen_toks = max_gen_toks
        self._add_bos_token = add_bos_token
        self._device = lm.device

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._lm!r})"

    @property
    def eot_token_id(self) -> int:
        """The end-of-text token."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token after which a text without a context is scored."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    @property
    def max_length(self) -> int:
        """The most tokens of a context."""
        return self._lm.max_model_len

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name, for the keys of the harness's caches."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the token ids of a text. By default special tokens are added unless the text begins with
        one."""
        if add_special_tokens is None:
            begins = has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id))
            add_special_tokens = False if begins else self._add_bos_token
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **options))

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return a context's tokens and its continuation's. A continuation that adds no tokens to
        its context is encoded by itself; a context of blanks alone becomes the first special token."""
        before, after = super()._encode_pair(context, continuation)
        if not after and continuation:
            blanks = context[len(context.rstrip()) :]
            after = self.tok_encode(blanks + continuation, add_special_tokens=False)
        return before or [self.prefix_token_id], after

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as the tokenizer's chat template writes it."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether greedy decoding gives it. Contexts
        that are too long lose their first tokens."""
        lm, most = self._lm, self.max_length
        bound, in_one = lm._bound(self._adapter), lm._thread.capabilities.scores
        found: list[tuple[float, bool]] = []
        for part in _parts(requests):
            asked = []
            for _, context, after in part:
                room = max(1, most + 1 - len(after))  # the last token is not computed
                own = lm._limits, context[-room:], after, bound
                asked.append(greedy_requests(*own, in_one=in_one))
            results = iter(lm._ask_sync([*chain(*asked)]))
            for (text, _, after), each in zip(part, asked, strict=True):
                answer = greedy_joined([*islice(results, len(each))], after)
                found.append(answer)
                if text is not None:
                    self.cache_hook.add_partial("loglikelihood", text, answer)
        return found

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability of each text, by windows where it is too long for one."""
        texts = [request.args[0] for request in requests]
        windows = [
            [
                (None, *make_disjoint_window(window))
                for window in get_rolling_token_windows(
                    token_list=self.tok_encode(text),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
            ]
            for text in texts
        ]
        scores = iter(self._loglikelihood_tokens([*chain(*windows)]))
        totals = [sum(score for score, _ in islice(scores, len(each))) for each in windows]
        for text, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the text after each context, up to the first of its stop sequences."""
        end = self.tokenizer.decode(self.eot_token_id)
        asked, stops = [], []
        for request in requests:
            context, given = request.args
            options = normalize_gen_kwargs(given, self.max_gen_toks)
            until = handle_stop_sequences(options.pop("until", None), eos=end)
            asked.append(self._item(context, options, until))
            stops.append(until)
        texts: list[str] = []
        found = generate_many_sync(self._lm, asked, adapter=self._adapter, in_order=True)
        for request, until, (_, completion) in zip(requests, stops, found, strict=True):
            # A text that ends inside a character has the replacement character there, as ``hf`` decodes.
            ids = list(completion.token_ids)
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            texts.append(postprocess_generated_text(text, until, None))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def _item(self, context: str, options: dict[str, Any], until: list[str]) -> Item:
        most = options.pop("max_gen_toks")
        options.pop("do_sample", None)
        room = self.max_length - most
        if room < 1:
            raise InvalidRequest(
                f"a text of max_gen_toks={most} tokens does not fit into {self.max_length}"
            )
        given = options | {"max_tokens": most, "stop": [each for each in until if each]}
        prompt = self.tok_encode(context)[-room:]
        return Item(prompt=prompt, options=cast("GenerateOptions", given))


def _parts(requests: Sequence[Any]) -> list[Sequence[Any]]:
    """Return the requests in order, in parts of at most ``MOST_TOGETHER`` token ids."""
    parts: list[list[Any]] = []
    size = MOST_TOGETHER
    for request in requests:
        own = len(request[1]) + len(request[2])
        size += own
        if size > MOST_TOGETHER:
            parts.append([])
            size = own
        parts[-1].append(request)
    return [*parts]
