"""Validators of generated texts: a function, a JSON schema or a pydantic model."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from genrt.errors import Closed, EngineDied, ExtraNotInstalled, InvalidRequest
from genrt.generation.tables import parse_json
from genrt.numbers import named, shown
from genrt.questions.completions import schema_text

Validate: TypeAlias = Callable[[Any], Any] | Mapping[str, Any] | str | type
"""Decides whether a record is valid, and returns its value.

A function or coroutine function returns the value of a record, or raises. ``True`` stands for the record
itself, so predicates are validators; ``False`` and ``None`` refuse it. A JSON schema, as a dict or a
JSON text, returns the parsed JSON. A pydantic model or TypeAdapter returns its instance.
"""

Parse: TypeAlias = Callable[[str], Iterable[Any]]
"""Returns or yields the records of a text."""

RAISED = (NameError, ImportError, MemoryError, Closed, EngineDied)
"""Errors of a validator that are raised: they do not depend on the record."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a record is invalid, or why a text has no record.

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

    def check(self, record: Any) -> Any:
        """Return a record, parsed if it is a text. Raises ValueError if it is not JSON, and jsonschema's
        ValidationError if it is invalid."""
        from jsonschema.exceptions import best_match

        value = parse_json(record) if isinstance(record, str) else record
        if (worst := best_match(self._validator.iter_errors(value))) is not None:
            raise worst
        return value


class RecordValidator:
    """Finds the valid records of texts. Without ``parse`` a text is one record. Raises as ``JSONSchema``,
    and InvalidRequest for arguments of other types."""

    def __init__(self, validate: Validate, parse: Parse | None = None) -> None:
        if parse is not None and not callable(parse):
            raise InvalidRequest(f"parse must be a function of a text, got {named(parse)}")
        known = _of_schema(validate)
        self._validate: Callable[[Any], Any] = known or validate  # type: ignore[assignment]
        self._is_function = known is None  # schemas and models may return null and false
        self._parse = parse

    async def validate(self, text: str, values: list[Any], faults: list[Fault]) -> None:
        """Append the values of the valid records of a text, one by one, and the faults of the others.

        Raises:
            InvalidRequest: ``parse`` returned something else than records.
        """
        records = self._records(text)
        has_record = False
        while True:
            try:
                record = next(records)
            except StopIteration:
                break
            except (*RAISED, InvalidRequest):
                raise
            except Exception as error:  # of the user's parse
                faults.append(_fault_of(error))
                return
            has_record = True
            try:
                value = self._validate(record)
                if inspect.isawaitable(value):
                    value = await value
            except RAISED:
                raise
            except Exception as error:  # of the user's validate
                faults.append(_fault_of(error))
                continue
            is_truth = self._is_function and isinstance(value, bool | np.bool_)
            if self._is_function and (value is None or (is_truth and not value)):
                faults.append(Fault("refused", f"validate returned {value}"))
            else:
                values.append(record if is_truth else value)
        if not has_record:
            faults.append(Fault("no record", "parse found no record in the text"))

    def _records(self, text: str) -> Iterator[Any]:
        if self._parse is None:
            yield text
            return
        records = self._parse(text)
        if isinstance(records, str | bytes | Mapping) or not isinstance(records, Iterable):
            raise InvalidRequest(f"parse must return records, as a list, got {shown(records)}")
        yield from records


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
    for of_json, of_object in (
        ("model_validate_json", "model_validate"),  # a pydantic model
        ("validate_json", "validate_python"),  # a TypeAdapter
    ):
        if hasattr(validate, of_json):
            json_text, other = getattr(validate, of_json), getattr(validate, of_object)
            return lambda record: (json_text if isinstance(record, str) else other)(record)
    if isinstance(validate, Mapping | str):
        return JSONSchema(validate).check
    if not callable(validate):
        raise InvalidRequest(
            f"validate must be a function, a JSON schema or a pydantic model, got {shown(validate)}"
        )
    return None
