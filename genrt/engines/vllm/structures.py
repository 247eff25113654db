"""A backend for vLLM's structured outputs that uses genrt's guides, as all other engines do.

It replaces vLLM's own backends, which read the same structures differently, for front ends too.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.structured_output.backend_types import (
    StructuredOutputBackend,
    StructuredOutputGrammar,
    StructuredOutputOptions,
)
from vllm.v1.structured_output.request import get_structured_output_key

from genrt.errors import InvalidRequest
from genrt.structures.guides import Guide, Guides, Structure, compact_schema, texts_of_choice

NAME = "guidance"  # vLLM's name of the backend on llguidance

_OPTIONS = {
    StructuredOutputOptions.JSON: "json_schema",
    StructuredOutputOptions.REGEX: "regex",
    StructuredOutputOptions.GRAMMAR: "grammar",
    StructuredOutputOptions.CHOICE: "choice",
    StructuredOutputOptions.STRUCTURAL_TAG: "structural_tag",
}


def check_structures_config(config: VllmConfig) -> None:
    """Raise InvalidRequest if the configuration names another backend."""
    options = config.structured_outputs_config
    if options.backend not in ("auto", NAME):
        raise InvalidRequest(
            f"structured_outputs_config names the backend {options.backend!r}: give 'auto' or "
            f"{NAME!r}, since genrt compiles all structures by llguidance"
        )


class GuidedStructures(StructuredOutputBackend):  # type: ignore[misc]
    """Compiles the structures of one engine's texts."""

    def __init__(self, llm_engine: LLMEngine) -> None:
        config = llm_engine.vllm_config
        manager = cast("Any", llm_engine.engine_core).engine_core.structured_output_manager
        super().__init__(config, manager.tokenizer, config.model_config.get_vocab_size())
        self._guides = Guides(self.tokenizer, self.vocab_size)
        self._is_compact = config.structured_outputs_config.disable_any_whitespace
        # Without a backend, vLLM would open the one that the first request names.
        manager.backend = self

    def to_params(self, structure: Structure, *, compact: bool = False) -> StructuredOutputsParams:
        """Return a structure in vLLM's form, ``compact`` for a JSON text without white space. Raise
        InvalidRequest if it does not compile, or no text satisfies it."""
        name, value = structure
        if (compact or self._is_compact) and name == "json_schema":
            structure = name, value = name, compact_schema(str(value))
        self._guides.check(structure)
        wanted: Any = list(value) if isinstance(value, tuple) else value
        params = StructuredOutputsParams(**{"json" if name == "json_schema" else name: wanted})
        params._backend = NAME
        return params

    def of_front_end(self, params: StructuredOutputsParams) -> StructuredOutputsParams:
        """Return the structure of a front end's text in the same form; raises as ``to_params``."""
        if params.whitespace_pattern is not None:
            raise InvalidRequest("whitespace_pattern: genrt has no such option, leave it out")
        try:
            structure = _structure_of_key(*get_structured_output_key(params))
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"structured_outputs: {error}") from error
        return self.to_params(structure, compact=params.disable_any_whitespace)

    def compile_grammar(
        self,
        request_type: StructuredOutputOptions,
        grammar_spec: str,
        stop_token_ids: set[int] | None = None,
    ) -> StructuredOutputGrammar:
        structure = _structure_of_key(request_type, grammar_spec)
        return _GuidedGrammar(self._guides.begin(structure, stop_token_ids or ()))

    def allocate_token_bitmask(self, max_num_seqs: int) -> Tensor:
        return torch.full((max_num_seqs, -(-self.vocab_size // 32)), -1, dtype=torch.int32)

    def destroy(self) -> None:
        pass


class _GuidedGrammar(StructuredOutputGrammar):  # type: ignore[misc]
    def __init__(self, guide: Guide) -> None:
        self._guide = guide

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return all(map(self._guide.took, tokens))

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        count = 0
        for token in tokens:
            if not self._may_follow(token):
                break
            self._guide.took(token)
            count += 1
        self._guide.take_back(count)
        return tokens[:count]

    def _may_follow(self, token: int) -> bool:
        """Return whether a token may come next, without taking it: a wrong one would end the guide."""
        if self._guide.is_over:
            return True
        try:
            return bool(int(self._guide.words()[token // 32]) >> token % 32 & 1)
        except InvalidRequest:
            return False

    def rollback(self, num_tokens: int) -> None:
        self._guide.take_back(num_tokens)

    def fill_bitmask(self, bitmask: Tensor, batch_index: int) -> None:
        try:
            words = self._guide.words()
        except InvalidRequest:
            # An empty mask fails this request alone; an error here would fail the step.
            words = torch.zeros_like(bitmask[batch_index])
        bitmask[batch_index] = words

    def is_terminated(self) -> bool:
        return self._guide.is_over

    def reset(self) -> None:
        self._guide.begin_again()


def _structure_of_key(kind: StructuredOutputOptions, text: Any) -> Structure:
    if kind == StructuredOutputOptions.JSON_OBJECT:
        return "json_schema", '{"type": "object"}'
    is_choice = kind == StructuredOutputOptions.CHOICE
    return _OPTIONS[kind], texts_of_choice(text) if is_choice else text
