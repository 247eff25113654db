"""Prompts of rows: a template with the names of columns in it, or a column of messages."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from genrt.errors import InvalidRequest, UnknownColumn
from genrt.generation.tables import Row, parse_json
from genrt.numbers import check_bool, named, shown

__all__ = ["Prompt", "Prompts", "Template", "default_columns", "value_of"]

Prompt: TypeAlias = str | list[dict[str, Any]]
"""A text, or a conversation."""

_MARK = re.compile(r"\{\{|\}\}|\{(?P<name>[^{}]*)\}|[{}]")

MOST_NAMED = 20
"""How many columns a message names."""


class Template:
    """A text in which ``{column}`` stands for a row's value; ``{{`` and ``}}`` are braces.

    A name is looked up among the columns as it is: nothing in a template reaches into values, calls or
    formats. A value that is no str is written as JSON.
    """

    def __init__(self, text: str) -> None:
        """Raise InvalidRequest if the text is no template, or names no column."""
        if not isinstance(text, str):
            raise InvalidRequest(f"a template must be a str, got {shown(text)}")
        self.text = text
        self._parts: list[tuple[str, str | None]] = []
        end = 0
        for found in _MARK.finditer(text):
            mark, name = found[0], found["name"]
            if name == "" or mark in ("{", "}"):
                raise InvalidRequest(
                    f"the template has {'{}' if name == '' else mark} at character {found.start()}: "
                    "write a column's name in braces, and {{ and }} for braces that are text"
                )
            literal = text[end : found.start()] + (mark[0] if name is None else "")
            self._parts.append((literal, name))
            end = found.end()
        self._parts.append((text[end:], None))
        self.columns = tuple(dict.fromkeys(name for _, name in self._parts if name))
        if not self.columns:
            raise InvalidRequest(
                "the template names no column, so that all rows would be asked the same: write one as "
                "{column}"
            )

    def fill(self, columns: Mapping[str, Any]) -> str:
        """Return the text for a row. Raises UnknownColumn if the row lacks a column."""
        return "".join(
            literal if name is None else literal + _written(value_of(columns, name))
            for literal, name in self._parts
        )


class Prompts:
    """Makes the prompt or the conversation of each row.

    Args:
        template: a prompt, by the names of columns; with ``chat`` or a ``system_message``, what the user
            says in a conversation.
        messages_column: the column that has a conversation: a list, or the JSON text of one.
    """

    def __init__(
        self,
        template: str | None,
        messages_column: str | None,
        *,
        chat: bool,
        system_message: str | None,
    ) -> None:
        """Raise InvalidRequest unless one of the two is given, and fits the others."""
        if (template is None) == (messages_column is None):
            raise InvalidRequest(
                "give one of prompt_template (--prompt-template) and messages_column "
                "(--messages-column)"
            )
        if messages_column is not None and (
            not isinstance(messages_column, str) or not messages_column
        ):
            raise InvalidRequest(f"messages_column must be a name, got {named(messages_column)}")
        if system_message is not None and not isinstance(system_message, str):
            raise InvalidRequest(f"system_message must be a str, got {shown(system_message)}")
        self._template = None if template is None else Template(template)
        self._messages_column = messages_column
        self._system_message = system_message
        self._is_chat = check_bool("chat", chat) or system_message is not None

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that it needs."""
        return self._template.columns if self._template else (str(self._messages_column),)

    @property
    def parts(self) -> dict[str, Any]:
        """All that decides the prompts beside the rows, by the names of a job's arguments."""
        return {
            "prompt_template": self._template and self._template.text,
            "messages_column": self._messages_column,
            "system_message": self._system_message,
            "chat": self._is_chat,
        }

    def of(self, columns: Mapping[str, Any]) -> Prompt:
        """Return what is asked about a row.

        Raises:
            UnknownColumn: the row lacks a column.
            InvalidRequest: the column of messages has none.
        """
        if self._template is None:
            messages = _messages(str(self._messages_column), columns)
        else:
            text = self._template.fill(columns)
            if not self._is_chat:
                return text
            messages = [{"role": "user", "content": text}]
        if self._system_message is not None:
            messages = [{"role": "system", "content": self._system_message}, *messages]
        return messages


def default_columns(first: Row | None) -> tuple[str | None, str | None]:
    """Return the template and the column of messages for rows like this one.

    Raises:
        InvalidRequest: the row has no column of the names ``prompt`` and ``messages``, or both.
    """
    columns = {} if first is None else first.columns
    found = [name for name in ("prompt", "messages") if name in columns]
    if len(found) != 1:
        among = "both 'prompt' and 'messages'" if found else f"the columns {_listed(columns)}"
        raise InvalidRequest(
            "say what is asked: give --prompt-template (prompt_template=) or --messages-column "
            f"(messages_column=); the rows have {among}"
        )
    [name] = found
    is_conversation = name == "messages" or isinstance(columns[name], list)
    return (None, name) if is_conversation else (f"{{{name}}}", None)


def value_of(columns: Mapping[str, Any], name: str) -> Any:
    """Return a row's value. Raises UnknownColumn if it has none, and says which columns there are."""
    if name not in columns:
        raise UnknownColumn(f"there is no column {name!r}: there are {_listed(columns)}")
    return columns[name]


def _listed(columns: Mapping[str, Any]) -> str:
    names = ", ".join(map(repr, itertools.islice(columns, MOST_NAMED)))
    more = f" and {len(columns) - MOST_NAMED} more" if len(columns) > MOST_NAMED else ""
    return f"{names or 'none'}{more}"


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _messages(name: str, columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    value = value_of(columns, name)
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError as error:
            raise InvalidRequest(f"column {name!r} is not a JSON text: {error}") from error
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(each, dict) and "role" in each for each in value)
    ):
        raise InvalidRequest(
            f"column {name!r} has no conversation: it must be a list like "
            "[{'role': 'user', 'content': 'Hello!'}]"
        )
    return value
