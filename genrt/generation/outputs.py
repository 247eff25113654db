"""Texts judged by a JSON schema: their values, and whether these are valid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from genrt.errors import ExtraNotInstalled, InvalidRequest
from genrt.generation.tables import parse_json
from genrt.numbers import shown
from genrt.questions.completions import schema_text

__all__ = ["Schema"]


class Schema:
    """A JSON schema, by which texts are judged.

    Attributes:
        schema: as a dict, in the order in which it was given.
    """

    def __init__(self, schema: Mapping[str, Any] | str | type) -> None:
        """Take a schema as ``json_schema=`` does: a dict, a JSON text, or a pydantic model.

        Raises:
            InvalidRequest: it is not a JSON schema.
            ExtraNotInstalled: jsonschema is missing.
        """
        try:
            import jsonschema
        except ImportError as error:
            raise ExtraNotInstalled(
                "judging texts by a schema needs jsonschema: pip install 'genrt[validation]'"
            ) from error
        try:
            given = parse_json(schema_text(schema))
        except InvalidRequest:
            raise
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
        """Return a record, or what it says if it is a JSON text. Raises ValueError if it is not JSON, and
        jsonschema's ValidationError of what is most wrong with it."""
        from jsonschema.exceptions import best_match

        value = parse_json(record) if isinstance(record, str) else record
        if (worst := best_match(self._validator.iter_errors(value))) is not None:
            raise worst
        return value
