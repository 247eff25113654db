"""Which directories may be loaded as LoRA adapters: safetensors and JSON, nothing that can run code."""

from __future__ import annotations

import json
from pathlib import Path

from genrt.errors import InvalidAdapter

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

_PICKLED = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"})


def check_adapter_directory(path: Path) -> None:
    """Refuse what no engine should open: every engine calls this before it reads an adapter.

    A pickled file beside the safetensors one is left unread and does no harm.

    Raises:
        InvalidAdapter: there is no such directory; its configuration is missing or is no JSON object;
            its weights are missing or only there as a pickle.
    """
    if not path.is_dir():
        raise InvalidAdapter(
            f"{path} is not a directory: give the one that holds {CONFIG_NAME} and {WEIGHTS_NAME}"
        )
    if not (path / WEIGHTS_NAME).is_file():
        pickled = sorted(file.name for file in path.iterdir() if file.suffix in _PICKLED)
        if pickled:
            raise InvalidAdapter(
                f"{path} holds its weights as {pickled[0]}, which can run code when it is loaded: "
                f"convert them to {WEIGHTS_NAME} (peft's save_pretrained writes it)"
            )
        raise InvalidAdapter(
            f"{path} has no {WEIGHTS_NAME}: save the adapter with peft's save_pretrained"
        )
    try:
        config = json.loads((path / CONFIG_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InvalidAdapter(
            f"{path} has no {CONFIG_NAME}: save the adapter with peft's save_pretrained"
        ) from error
    except (OSError, ValueError) as error:
        raise InvalidAdapter(f"{path / CONFIG_NAME} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise InvalidAdapter(f"{path / CONFIG_NAME} is not a JSON object: save the adapter again")
