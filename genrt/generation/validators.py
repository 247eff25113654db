"""Validators: a function, a JSON schema or a pydantic model that says whether a record is valid."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from genrt.errors import Closed, EngineDied, InvalidRequest
from genrt.generation.outputs import Schema
from genrt.numbers import named, shown

__all__ = ["Fault", "Judge", "Parse", "Validate"]

Validate: TypeAlias = Callable[[Any], Any] | Mapping[str, Any] | str | type
"""What says whether a record is valid.

A function, or a coroutine function, of the record, which returns its value, or raises. ``True`` stands
for the record itself, so that predicates are validators; ``False`` and ``None`` mean that it is invalid.
Or a JSON schema, as a dict or a JSON text: the value is what the JSON says. Or a pydantic model or
TypeAdapter: the value is its instance.
"""

Parse: TypeAlias = Callable[[str], Iterable[Any]]
"""Returns the records of a text, or yields them one after another."""

LONGEST_DETAIL = 500

THROUGH = (NameError, ImportError, MemoryError, Closed, EngineDied)
"""What a validator may raise that says nothing about the record: it is raised."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a record is invalid, or why a text has none.

    Attributes:
        category: a few words that many faults share, without anything of the text: the type of an error,
            or where in a schema something else was expected, and what.
        detail: what exactly was wrong; it may quote the text. Up to 500 characters.
    """

    category: str
    detail: str


class Judge:
    """Finds the valid records of texts.

    Args:
        validate, parse: see ``Validate`` and ``Parse``; without the latter a text is one record.

    Raises:
        InvalidRequest: one of them is no such thing, or the schema is none.
        ExtraNotInstalled: a schema is given, and jsonschema is missing.
    """

    def __init__(self, validate: Validate, parse: Parse | None = None) -> None:
        if parse is not None and not callable(parse):
            raise InvalidRequest(f"parse must be a function of a text, got {named(parse)}")
        known = _known(validate)
        self._validated: Callable[[Any], Any] = known or validate  # type: ignore[assignment]
        self._may_refuse = known is None  # a function; others return null and false of JSON
        self._parse = parse

    async def judge(self, text: str, values: list[Any], faults: list[Fault]) -> None:
        """Append the values of the text's valid records, one by one, and what is wrong with the others.

        Raises:
            InvalidRequest: ``parse`` returned no records.
        """
        records = self._records(text)
        found = False
        while True:
            try:
                record = next(records)
            except StopIteration:
                break
            except (*THROUGH, InvalidRequest):
                raise
            except Exception as error:  # of the user's parse
                faults.append(fault_of(error))
                return
            found = True
            try:
                value = self._validated(record)
                if inspect.isawaitable(value):
                    value = await value
            except THROUGH:
                raise
            except Exception as error:  # of the user's validate
                faults.append(fault_of(error))
                continue
            is_truth = self._may_refuse and isinstance(value, bool | np.bool_)
            if self._may_refuse and (value is None or (is_truth and not value)):
                faults.append(Fault("refused", f"validate returned {value}"))
            else:
                values.append(record if is_truth else value)
        if not found:
            faults.append(Fault("no record", "parse found no record in the text"))

    def _records(self, text: str) -> Iterator[Any]:
        if self._parse is None:
            yield text
            return
        records = self._parse(text)
        if isinstance(records, str | bytes | Mapping) or not isinstance(records, Iterable):
            raise InvalidRequest(f"parse must return records, as a list, got {shown(records)}")
        yield from records


def fault_of(error: Exception) -> Fault:
    """Return what an error says of a record."""
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
    return Fault(category, detail[:LONGEST_DETAIL])


def _known(validate: Any) -> Callable[[Any], Any] | None:
    """Return what a schema or a model stands for, ``None`` for a function."""
    for of_json, of_object in (
        ("model_validate_json", "model_validate"),  # a pydantic model
        ("validate_json", "validate_python"),  # a TypeAdapter
    ):
        if hasattr(validate, of_json):
            json_text, other = getattr(validate, of_json), getattr(validate, of_object)
            return lambda record: (json_text if isinstance(record, str) else other)(record)
    if isinstance(validate, Mapping | str):
        return Schema(validate).check
    if not callable(validate):
        raise InvalidRequest(
            f"validate must be a function, a JSON schema or a pydantic model, got {shown(validate)}"
        )
    return None
