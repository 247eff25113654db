"""Validators of generated texts: a function, a JSON schema or a pydantic model."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np

from genrt.errors import Closed, EngineDied, ExtraNotInstalled, InvalidRequest
from genrt.generation.tables import parse_json
from genrt.numbers import shown
from genrt.questions.completions import schema_text

Validate: TypeAlias = Callable[[Any], Any] | Mapping[str, Any] | str | type
"""Decides whether a text is valid, and returns its value.

A function or coroutine function returns the value of a text, or raises. ``True`` stands for the text
itself, so predicates are validators; ``False`` and ``None`` refuse it. A JSON schema, as a dict or a
JSON text, returns the parsed JSON. A pydantic model or TypeAdapter returns its instance.
"""

RAISED = (NameError, ImportError, MemoryError, Closed, EngineDied)
"""Errors of a validator that are raised: they do not depend on the text."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a text is invalid.

    Attributes:
        category: a short reason without any part of the text: the type of an error, or the place in a
            schema and the violated keyword.
        detail: the exact reason, up to 500 characters. It may quote the text.
    """

    category: str
    detail: str


class JSONSchema:
    """A JSON schema that validates texts. Raises InvalidRequest if it is none, and ExtraNotInstalled
    without jsonschema."""

    def __init__(self, schema: Mapping[str, Any] | str | type) -> None:
        try:
            import jsonschema
        except ImportError as error:
            raise ExtraNotInstalled(
                "judging texts by a schema needs jsonschema: pip install 'genrt[validation]'"
            ) from error
        text = schema_text(schema)
        try:
            given = parse_json(text)
        except ValueError as error:
            raise InvalidRequest(f"json_schema is not JSON: {error}") from error
        if not isinstance(given, dict):
            raise InvalidRequest(f"json_schema must be an object, got {shown(schema)}")
        self.schema: dict[str, Any] = given
        kind = jsonschema.validators.validator_for(given, jsonschema.Draft202012Validator)
        try:
            kind.check_schema(given)
        except jsonschema.SchemaError as error:
            raise InvalidRequest(f"json_schema is not a JSON schema: {error.message}") from error
        self._validator = kind(given, format_checker=kind.FORMAT_CHECKER)

    def check(self, text: str) -> Any:
        """Return the value of a text. Raises ValueError if it is not JSON, and jsonschema's
        ValidationError if it is invalid."""
        from jsonschema.exceptions import best_match

        value = parse_json(text)
        if (worst := best_match(self._validator.iter_errors(value))) is not None:
            raise worst
        return value


class RecordValidator:
    """Validates texts. Raises as ``JSONSchema``, and InvalidRequest for another type."""

    def __init__(self, validate: Validate) -> None:
        known = _of_schema(validate)
        self._validate: Callable[[Any], Any] = known or validate  # type: ignore[assignment]
        self._is_function = known is None  # schemas and models may return null and false

    async def validate(self, text: str) -> tuple[Any, Fault | None]:
        """Return the value of a valid text; ``None`` and the fault of another one."""
        try:
            value = self._validate(text)
            if inspect.isawaitable(value):
                value = await value
        except RAISED:
            raise
        except Exception as error:  # of the user's function
            return None, _fault_of(error)
        is_truth = self._is_function and isinstance(value, bool | np.bool_)
        if self._is_function and (value is None or (is_truth and not value)):
            return None, Fault("refused", f"validate returned {value}")
        return text if is_truth else value, None


def _fault_of(error: Exception) -> Fault:
    category, detail = type(error).__name__, str(error)
    if json.JSONDecodeError in (type(error), type(error.__cause__)):
        category = "no JSON"
    elif (schema_path := getattr(error, "absolute_schema_path", None)) is not None:  # jsonschema's
        path = list(schema_path)
        keys = [path[i + 1] for i, part in enumerate(path[:-1]) if part == "properties"]
        category = ": ".join([*filter(None, [".".join(map(str, keys))]), str(path[-1])])
        detail = f"{error.json_path}: {error.message}"  # type: ignore[attr-defined]
    elif callable(errors := getattr(error, "errors", None)) and (found := errors()):  # pydantic's
        keys = [key for key in found[0]["loc"] if isinstance(key, str)]
        category = ": ".join([*filter(None, [".".join(keys)]), str(found[0]["type"])])
    return Fault(category, detail[:500])


def _of_schema(validate: Any) -> Callable[[Any], Any] | None:
    """Return the function of a schema or a pydantic model, ``None`` for a function."""
    for of_json in ("model_validate_json", "validate_json"):  # of a pydantic model, a TypeAdapter
        if hasattr(validate, of_json):
            return cast("Callable[[Any], Any]", getattr(validate, of_json))
    if isinstance(validate, Mapping | str):
        return JSONSchema(validate).check
    if not callable(validate):
        raise InvalidRequest(
            f"validate must be a function, a JSON schema or a pydantic model, got {shown(validate)}"
        )
    return None
