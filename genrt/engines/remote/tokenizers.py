"""A tokenizer as bytes: its files, of which none can hold code, or the list of its tokens."""

from __future__ import annotations

import base64
import io
import json
import zipfile
from pathlib import PurePosixPath
from typing import Any

from genrt.engines.folders import Folder
from genrt.errors import EngineFailed
from genrt.tokens.vocabulary import BytesTokenizer

__all__ = ["packed_tokenizer", "unpacked_tokenizer"]

KEPT = frozenset({".json", ".txt", ".jinja", ".model"})
"""The kinds of files that are sent and taken."""

MOST_BYTES = 2**28
"""The most that the files of a tokenizer take."""

MOST_FILES = 64

LIST = "bytes_tokenizer.json"


def packed_tokenizer(tokenizer: Any) -> bytes:
    """Return a tokenizer as a zip archive; an empty one for ``None``."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        if isinstance(tokenizer, BytesTokenizer):
            tokens = [base64.b64encode(each).decode() for each in tokenizer.byte_vocab]
            value = {"vocabulary": tokens, "eos_token_id": tokenizer.eos_token_id}
            archive.writestr(LIST, json.dumps(value))
        elif tokenizer is not None:
            with Folder("tokenizer") as directory:
                tokenizer.save_pretrained(directory)
                for path in sorted(directory.iterdir()):
                    if path.suffix in KEPT and path.is_file():
                        archive.write(path, path.name)
    return packed.getvalue()


def unpacked_tokenizer(data: bytes) -> Any:
    """Return the tokenizer of such an archive, ``None`` of an empty one.

    Raises:
        EngineFailed: it is no such archive, or transformers cannot read what it holds.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            files = archive.infolist()
            if not files:
                return None
            if sum(each.file_size for each in files) > MOST_BYTES or len(files) > MOST_FILES:
                raise ValueError(f"it has over {MOST_FILES} files, or {MOST_BYTES} bytes")
            if [each.filename for each in files] == [LIST]:
                return _listed(json.loads(archive.read(LIST)))
            with Folder("tokenizer") as directory:
                for each in files:
                    name = PurePosixPath(each.filename)
                    if len(name.parts) != 1 or name.suffix not in KEPT or "\\" in each.filename:
                        raise ValueError(f"{each.filename} is no file of a tokenizer")
                    (directory / name.name).write_bytes(archive.read(each))
                return _loaded(str(directory))
    except Exception as error:  # transformers raises whatever a file leads it to
        raise EngineFailed(f"the server's tokenizer cannot be read: {error}") from error


def _listed(value: dict[str, Any]) -> BytesTokenizer:
    tokens = [base64.b64decode(each) for each in value["vocabulary"]]
    return BytesTokenizer(tokens, eos_token_id=value["eos_token_id"])


def _loaded(directory: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
