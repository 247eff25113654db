"""Jobs for tests: a small exact model over letters, rows to ask it about, lines that were written."""

from __future__ import annotations

import json
import string
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from genrt.engines.exact import NGram
from genrt.generation.jobs import Job

VOCABULARY = [character.encode() for character in string.ascii_lowercase + " :"]
MODEL = NGram.random([*VOCABULARY, b""], order=1, seed=1, eos_token_id=len(VOCABULARY))


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write rows as JSONL and return the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows(number: int, *, first: int = 0) -> list[dict[str, Any]]:
    """Rows of texts that are all different, and a number each."""
    letters = string.ascii_lowercase
    texts = ((letters[i % 26] + letters[i // 26 % 26]) * (1 + i % 5) for i in range(first, number))
    return [{"text": text, "number": i} for i, text in enumerate(texts, first)]


def job(directory: Path, **options: Any) -> Job:
    """A job from ``in.jsonl`` to ``out.jsonl``, or another ``output``."""
    output = options.pop("output", "out.jsonl")
    given: dict[str, Any] = {"prompt_template": "say {text}", "max_tokens": 6}
    if "messages_column" in options:
        del given["prompt_template"]
    return Job(directory / "in.jsonl", directory / output, **(given | options))


def lines_of(directory: Path) -> list[dict[str, Any]]:
    """The lines that were written; each has to be whole, and of a row of its own."""
    text = (directory / "out.jsonl").read_text()
    assert text == "" or text.endswith("\n")
    lines = [json.loads(line) for line in text.splitlines()]
    assert len({line["index"] for line in lines}) == len(lines)
    return sorted(lines, key=lambda line: int(line["index"]))


def write_adapter(directory: Path, seed: int) -> Path:
    """An adapter of the exact engine: another table."""
    directory.mkdir()
    table = NGram.random(MODEL.vocabulary, order=1, seed=seed).table
    save_file({"table": table}, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({"r": 9, "peft_type": "LORA"}))
    return directory
