"""Structural tags as llguidance's Lark: free text, in which some tags have contents of some structure.

The forms are those of vLLM's front ends: ``{"structures": …, "triggers": …}``, and xgrammar's formats, by
which tool parsers ask for calls. Formats of single tokens and of XML parameters are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from genrt.errors import InvalidConstraint
from genrt.structures.json_grammar import schema_rules
from genrt.structures.regexes import character_code, parsed, regex_text

__all__ = ["lark_of_tags"]

_ANY = "/(?s:.*)/"


def lark_of_tags(text: str) -> str:
    """Return the grammar of the texts that a structural tag describes.

    Raises:
        InvalidConstraint: it is not one, or has a format that is not known.
    """
    try:
        given = json.loads(text)
        if "structures" in given:
            tags = [
                {
                    "begin": each["begin"],
                    "content": {"type": "json_schema", "json_schema": each["schema"]},
                    "end": each["end"],
                }
                for each in given["structures"]
            ]
            form = {"type": "triggered_tags", "triggers": given["triggers"], "tags": tags}
        else:
            form = given["format"]
        return _Tags().lark(form)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, InvalidConstraint):
            raise
        kind = type(error).__name__
        raise InvalidConstraint(f"the structural tag cannot be read: {kind}: {error}") from error


class _Tags:
    def __init__(self) -> None:
        self._lines: list[str] = []

    def lark(self, form: Any) -> str:
        start = self._form(form, is_last=True)
        return "\n".join([f"start: {start}", *self._lines])

    def _form(self, form: Any, *, is_last: bool = False) -> str:
        """Return a part of a rule; ``is_last``: nothing comes after it."""
        made: dict[str, Callable[[], str]] = {
            "const_string": lambda: _literal(form["value"]),
            "json_schema": lambda: self._schema(form),
            "regex": lambda: f"/{regex_text(parsed(form['pattern'], 'structural tag'))}/",
            "sequence": lambda: self._sequence(form["elements"], is_last),
            "or": lambda: self._rule(
                *(self._form(each, is_last=is_last) for each in form["elements"])
            ),
            "tag": lambda: self._tag(form, ""),
            "optional": lambda: f"({self._form(form['content'])})?",
            "plus": lambda: f"({self._form(form['content'])})+",
            "star": lambda: f"({self._form(form['content'])})*",
            "repeat": lambda: f"({self._form(form['content'])}){_times(form['min'], form['max'])}",
            "tags_with_separator": lambda: self._separated(form),
            "triggered_tags": lambda: self._triggered(form, is_last),
            "any_text": lambda: self._any_text(form, is_last),
        }
        if form["type"] not in made:
            raise InvalidConstraint(
                f"the structural tag has the format {form['type']!r}, which genrt cannot "
                "compile: give one of "
                f"{', '.join(made)}; vLLM's tool parsers ask for it unless "
                "VLLM_ENFORCE_STRICT_TOOL_CALLING=0"
            )
        return made[form["type"]]()

    def _rule(self, *options: str) -> str:
        name = f"g{len(self._lines)}"
        self._lines.append(f"{name}: {' | '.join(options)}")
        return name

    def _schema(self, form: Any) -> str:
        if form.get("style", "json") != "json" or form.get("excludes"):
            raise InvalidConstraint(
                f"the structural tag has a schema in the style {form.get('style')!r}, or "
                "that excludes texts: "
                "genrt compiles JSON alone; unset by VLLM_ENFORCE_STRICT_TOOL_CALLING=0"
            )
        prefix = f"s{len(self._lines)}"
        rules = schema_rules(form["json_schema"], "flexible", closed=True, prefix=prefix)
        self._lines += rules
        return prefix

    def _sequence(self, elements: list[Any], is_last: bool) -> str:
        last = len(elements) - 1
        return (
            " ".join(
                self._form(each, is_last=is_last and index == last)
                for index, each in enumerate(elements)
            )
            or '""'
        )

    def _any_text(self, form: Any, is_last: bool) -> str:
        if not is_last or form.get("max_chars") or form.get("max_tokens"):
            raise InvalidConstraint(
                "the structural tag has any_text that something follows: give it an end"
            )
        return self._text(form.get("excludes", ()))

    def _text(self, excluded: Any) -> str:
        """Return the terminal of any text without some texts."""
        name = f"G{len(self._lines)}"
        found = "|".join(regex_text(parsed(_escaped(each), "text")) for each in excluded)
        body = f"{_ANY} & ~/(?s:.*)(?:{found})(?s:.*)/" if excluded else _ANY
        self._lines.append(f"{name}: {body}")
        return name

    def _tag(self, tag: Any, trigger: str) -> str:
        """Return a tag, without the trigger with which it begins."""
        content, ends = tag["content"], tag["end"]
        ends = [ends] if isinstance(ends, str) else ends
        begin = _literal(tag["begin"][len(trigger) :])
        if content["type"] == "any_text":
            options = []
            for end in ends:
                if not end:
                    raise InvalidConstraint(
                        "the structural tag has any_text without an end: give it one"
                    )
                text = self._text(content.get("excludes", ()))
                name = f"g{len(self._lines)}"
                self._lines.append(f"{name}[lazy]: {text} {_literal(end)}")
                options.append(f"{begin} {name}")
            return self._rule(*options)
        inside = self._form(content)
        return self._rule(*(f"{begin} {inside} {_literal(end)}" for end in ends))

    def _separated(self, form: Any) -> str:
        tag = self._rule(*(self._tag(each, "") for each in form["tags"]))
        more = "" if form.get("stop_after_first") else f" ({_literal(form['separator'])} {tag})*"
        return self._rule(f"{tag}{more}", *([] if form.get("at_least_one") else ['""']))

    def _triggered(self, form: Any, is_last: bool) -> str:
        if not is_last:
            raise InvalidConstraint(
                "the structural tag has triggered_tags that something follows: make it last"
            )
        text = self._text(form.get("excludes", ()))
        later, first = [], []
        for tag in form["tags"]:
            trigger = next(
                (each for each in form["triggers"] if tag["begin"].startswith(each)), None
            )
            if not trigger:
                raise InvalidConstraint(
                    f"the structural tag {tag['begin']!r} begins with none of the triggers"
                )
            name = f"g{len(self._lines)}"
            self._lines.append(f"{name}[lazy]: {text} {_literal(trigger)}")
            later.append(f"{name} {self._tag(tag, trigger)}")
            first.append(self._tag(tag, ""))
        some = self._rule(*later)
        if form.get("at_least_one"):
            one = self._rule(*first)
            return one if form.get("stop_after_first") else self._rule(f"{one} {some}* {text}")
        end = text if not form.get("stop_after_first") else None
        return self._rule(f"{some}* {end}") if end else self._rule(some, text)


def _times(low: int, high: int) -> str:
    return f"{{{low},{'' if high < 0 else high}}}"


def _escaped(text: str) -> str:
    return "".join(map(character_code, text))


def _literal(text: str) -> str:
    return f"/{_escaped(text)}/" if text else '""'
