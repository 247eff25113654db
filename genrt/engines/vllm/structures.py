"""Structured texts in vLLM: each has the backend that does all that it asks for.

vLLM chooses a backend for every request, and opens that of the first one for all; what the others asked
for would be left out, or refused, depending on who came first. Here several are open. A JSON schema of
which xgrammar would leave out a part is prepared by genrt, and compiled by llguidance, as on every other
engine.
"""

from __future__ import annotations

import json
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from cachetools import LRUCache
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.structured_output.backend_types import (
    StructuredOutputBackend,
    StructuredOutputGrammar,
    StructuredOutputOptions,
)
from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features

from genrt.errors import InvalidConstraint, InvalidRequest
from genrt.structures.guides import Guides, Structure
from genrt.structures.schemas import with_required_named
from genrt.structures.unheeded import mistaken, unheeded

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["StructureCompilers"]

WHERE = "vllm.v1.structured_output.backend_"

COMPILERS = {
    "xgrammar": ("xgrammar", "XgrammarBackend"),
    "guidance": ("guidance", "GuidanceBackend"),
    "outlines": ("outlines", "OutlinesBackend"),
    "lm-format-enforcer": ("lm_format_enforcer", "LMFormatEnforcerBackend"),
}
"""The modules and classes of vLLM's backends, by the names that it calls them by."""

MOST_READ = 64
"""How many schemas stay read, the last ones that were asked for."""


class _Schema(NamedTuple):
    """A JSON schema's text for vLLM, and whether the backend that vLLM chooses does all of it."""

    text: str
    is_heeded: bool


class StructureCompilers(StructuredOutputBackend):  # type: ignore[misc]
    """The backends of one engine, as one of vLLM's, which opens no other then."""

    def __init__(self, llm_engine: LLMEngine) -> None:
        config = llm_engine.vllm_config
        manager = cast("Any", llm_engine.engine_core).engine_core.structured_output_manager
        super().__init__(config, manager.tokenizer, config.model_config.get_vocab_size())
        self._named = config.structured_outputs_config.backend
        self._guides = Guides(self.tokenizer, self.vocab_size)
        self._schemas: LRUCache[object, _Schema] = LRUCache(MOST_READ)
        self._opened: dict[str, StructuredOutputBackend] = {}
        manager.backend, manager._create_grammar = self, self._compiled

    def asked(self, structure: Structure) -> StructuredOutputsParams:
        """Return a structure as vLLM takes it; with ``_backend`` where that is not for vLLM to choose.

        Raises:
            InvalidRequest: a schema is none, or no text has it.
        """
        name, value = structure
        if name != "json_schema":
            wanted: Any = list(value) if isinstance(value, tuple) else value
            return StructuredOutputsParams(**{name: wanted})
        schema = self._schemas.get(value)
        if schema is None:
            schema = self._schemas[value] = self._read(value)
        if schema.is_heeded:
            return StructuredOutputsParams(json=schema.text)
        prepared = StructuredOutputsParams(grammar=self._guides.check(structure))
        prepared._backend = "guidance"
        return prepared

    def _read(self, text: object) -> _Schema:
        try:
            schema = with_required_named(text)
        except InvalidConstraint as error:
            raise InvalidRequest(f"json_schema: {error}") from error
        passed_over = unheeded(schema)
        if self._named.startswith("xgrammar") and passed_over is not None:
            raise InvalidRequest(
                f"json_schema: xgrammar passes over {passed_over}: write the schema without it, or "
                "load without this structured_outputs_config"
            )
        is_heeded = self._named != "auto" or not (
            passed_over is not None
            or has_xgrammar_unsupported_json_features(schema)
            or mistaken(schema)
        )
        return _Schema(json.dumps(schema), is_heeded)

    def open(self, name: str) -> None:
        """Have this backend for the requests that come. Raises InvalidRequest if it is not installed, or
        fits none that is open."""
        if name in self._opened:
            return
        module, kind = COMPILERS[name]
        try:
            made = getattr(import_module(WHERE + module), kind)(
                self.vllm_config, self.tokenizer, self.vocab_size
            )
        except ImportError as error:
            raise InvalidRequest(f"this structure needs vLLM's backend {name}: {error}") from error
        if self._named == "auto" and name == "guidance":
            made.disable_additional_properties = True  # as xgrammar has it
        for other in self._opened.values():
            if _width(other) != _width(made):  # a step fills one tensor with the masks of all
                raise InvalidRequest(
                    f"this structure needs vLLM's backend {name}, which cannot be open beside the one of "
                    "earlier structures: the tokenizer has more tokens than the model"
                )
        self._opened[name] = made

    def _compiled(self, request: Request) -> StructuredOutputGrammar:
        """Return the structure of a request, compiled; called in threads of vLLM's."""
        asked, params = cast("Any", request.structured_output_request), request.sampling_params
        compiler = self._opened[asked.params._backend]
        stops = None if params is None else params.all_stop_token_ids
        return compiler.compile_grammar(*asked.structured_output_key, stop_token_ids=stops)

    def compile_grammar(
        self,
        request_type: StructuredOutputOptions,
        grammar_spec: str,
        stop_token_ids: set[int] | None = None,
    ) -> StructuredOutputGrammar:
        raise NotImplementedError("the request says which backend compiles")

    def allocate_token_bitmask(self, max_num_seqs: int) -> Any:
        return next(iter(self._opened.values())).allocate_token_bitmask(max_num_seqs)

    def destroy(self) -> None:
        for compiler in self._opened.values():
            compiler.destroy()
        self._opened.clear()


def _width(compiler: StructuredOutputBackend) -> int:
    """Return how many words the mask of a text has."""
    return int(compiler.allocate_token_bitmask(1).shape[1])
