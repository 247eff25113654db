"""A job's fingerprint: what its output depends on, part by part, so that a change can be named."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from genrt.errors import InvalidRequest
from genrt.lm import AsyncLM

__all__ = ["Fingerprint", "changes", "fingerprint", "model_of", "model_part"]

log = logging.getLogger("genrt.generation")

Fingerprint: TypeAlias = dict[str, dict[str, Any]]
"""For each part, by its name, a ``digest``, and where that may be shown the ``value``."""

MOST_SHOWN = 80
"""The longest value, in characters of JSON, that is kept and shown."""

PRIVATE = frozenset({"prompt_template", "system_message", "chat_template_kwargs", "validate"})
"""Parts that may say what prompts say."""

KINDS = frozenset((".json", ".safetensors", ".jinja", ".model", ".txt"))
"""The endings of files that decide a model's answers."""

TOLD_BYTES = 2**32
"""From so many bytes of weights on, reading them takes seconds and is logged."""

HARMLESS = frozenset(
    """
    block_size cpu_offload_gb disable_log_stats distributed_executor_backend download_dir
    enable_chunked_prefill enable_prefix_caching enforce_eager gpu_memory_utilization
    kv_cache_memory_bytes load_format max_batch_size max_loras max_lora_rank max_num_batched_tokens
    max_num_seqs max_parallel_loading_workers num_gpu_blocks_override pipeline_parallel_size
    scheduling_policy swap_space tensor_parallel_size use_tqdm_on_load
    """.split()  # noqa: SIM905
)
"""Engine options that may change between two runs of a job: what is drawn is the same law."""


def fingerprint(parts: Mapping[str, Any]) -> Fingerprint:
    """Return the fingerprint of values that can be written as JSON."""
    found: Fingerprint = {}
    for name, value in parts.items():
        text = json.dumps(value, sort_keys=True)
        found[name] = {"digest": _digest(text.encode())}
        if len(text) <= MOST_SHOWN and name not in PRIVATE:
            found[name]["value"] = value
    return found


def changes(before: Fingerprint, now: Fingerprint) -> Iterator[str]:
    """Yield what has changed, named, with its values where they may be shown. Parts that only one of the
    two knows are passed over."""
    for name, part in now.items():
        if name not in before or before[name].get("digest") == part["digest"]:
            continue
        old, new = before[name].get("value"), part.get("value")
        if "value" in part and "value" in before[name] and old != new:
            yield f"{name} (was {json.dumps(old)}, is {json.dumps(new)})"
        else:
            yield name


def model_of(lm: AsyncLM) -> str | None:
    """Return the checkpoint's directory or name, as the tokenizer tells it, if it does."""
    try:
        name = getattr(lm.tokenizer, "name_or_path", None)
    except InvalidRequest:
        return None
    return name if isinstance(name, str) and name else None


def model_part(model: str) -> dict[str, Any]:
    """Return the part of a model or an adapter: of a directory by what is in it, wherever it lies."""
    path = Path(model)
    if not path.is_dir():
        return {"digest": _digest(model.encode(errors="replace")), "value": model}
    files = sorted(each for each in path.iterdir() if each.suffix in KINDS and each.is_file())
    states = [file.stat() for file in files]
    if (total := sum(each.st_size for each in states)) >= TOLD_BYTES:
        log.info("reading %s, %.0f GB, to know it again", path, total / 1e9)
    with ThreadPoolExecutor() as readers:  # hashing lets go of the interpreter
        identities = ((each.st_size, each.st_mtime_ns, each.st_ino) for each in states)
        digests = readers.map(lambda file, identity: _sha256(file, *identity), files, identities)
        found = {file.name: digest for file, digest in zip(files, digests, strict=True)}
    return {"digest": _digest(json.dumps(found).encode()), "value": model}


@lru_cache(1024)
def _sha256(file: Path, size: int, mtime_ns: int, inode: int) -> str:
    """Return the digest of a file's whole content; read once as long as the file is the same."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
