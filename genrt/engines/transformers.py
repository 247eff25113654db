"""Hugging Face transformers as an engine: runs where vLLM cannot, and is the oracle in tests.

Every step is one plain forward over whole contexts, padded on the right. No state remains between steps.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from genrt.engines.adapters import WEIGHTS_NAME
from genrt.engines.stepping import SteppedEngine, SteppedModel
from genrt.engines.weights import Layout, NamedTensors, TensorForm
from genrt.errors import (
    EngineNotInstalled,
    EngineUnsupported,
    InvalidAdapter,
    InvalidRequest,
    ModelNotFound,
    OutOfMemory,
)
from genrt.models import offline_advice
from genrt.questions.arguments import Adapter

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)

_HARMLESS_STARTS = ("gaussian", "eva", "orthogonal")
"""Initialisations of LoRA training, other than the default, that leave the base weights alone."""


def open_transformers(
    model: str | os.PathLike[str], *, options: dict[str, Any]
) -> TransformersEngine:
    """Open a checkpoint directory, or a model name that transformers knows.

    Args:
        options: ``max_batch_size`` (32) and ``max_model_len`` (by default the model's own) are the
            engine's; all others go to ``AutoModelForCausalLM.from_pretrained``. Weights are read from
            safetensors only. Code that comes with a model runs only with ``trust_remote_code=True``.
            Without ``device_map`` the model goes to the GPU, if there is one.

    Raises:
        EngineNotInstalled: transformers is missing, or a package that this model needs.
        ModelNotFound: no such directory or name, or one without safetensors weights.
        InvalidRequest: an option is out of range.
        EngineUnsupported: transformers cannot build the model, or it does not work as needed here.
        OutOfMemory: the weights don't fit the device.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise EngineNotInstalled(
            "engine 'transformers' needs the package: pip install transformers"
        ) from error
    given = {"trust_remote_code": False, **options}
    sizes = {name: given.pop(name) for name in ("max_batch_size", "max_model_len") if name in given}
    if given.setdefault("use_safetensors", True) is not True:
        raise InvalidRequest(
            "use_safetensors must stay True: other weight files can run code; convert them"
        )
    name = os.fspath(model)
    if os.path.isdir(name) and not os.path.isfile(os.path.join(name, "config.json")):
        raise ModelNotFound(f"{name} has no config.json: give a directory with a whole checkpoint")
    with _translated(name):
        network = AutoModelForCausalLM.from_pretrained(name, **given)
        if "device_map" not in given:
            network = network.to("cuda" if torch.cuda.is_available() else "cpu")
        tokenizer = None
        if not os.path.isdir(name) or any(Path(name, file).exists() for file in _TOKENIZER_FILES):
            tokenizer = AutoTokenizer.from_pretrained(
                name, trust_remote_code=given["trust_remote_code"]
            )
    return TransformersEngine(network, tokenizer=tokenizer, **sizes)


class TransformersEngine(SteppedEngine):
    """The Engine protocol over a causal language model of transformers.

    A step runs one forward for each adapter among its requests. The row of a request is that of the
    request computed alone, up to the rounding of differently shaped matrix products.

    Args:
        network: a ``PreTrainedModel`` with a language-model head, on its device. The engine owns it from
            now on: adapters change its modules in place.
        tokenizer: transformers' tokenizer, if the checkpoint has one.
        max_model_len: the longest context; by default the length in the model's configuration.
        max_batch_size: the most requests of a step.

    Raises:
        InvalidRequest: ``max_model_len`` is unknown, or longer than the model takes.
        EngineUnsupported: the network does not take ``logits_to_keep``.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        tokenizer: Any = None,
        max_model_len: int | None = None,
        max_batch_size: int = 32,
    ) -> None:
        super().__init__(
            _Network(network, tokenizer),
            max_model_len=_length(cast(Any, network).config, max_model_len),
            max_batch_size=max_batch_size,
            ends=_ends(network),
        )


class _Network(SteppedModel):
    """The SteppedModel of a network; adapters are layers in it, by keys of their own."""

    def __init__(self, network: nn.Module, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._network = cast(Any, network.eval())
        self._keys: dict[Adapter, str] = {}
        self._new_keys = map("adapter{}".format, count())
        # By the names of the checkpoint: layers of adapters change the names in the network.
        self._parameters = dict(network.named_parameters(remove_duplicate=False))
        self._input_device = self._network.get_input_embeddings().weight.device
        with _translated(type(network).__name__):
            probe = self.logits([(0,), (0, 0, 0)], None)
        self.vocab_size, self.device = probe.shape[-1], probe.device

    def __repr__(self) -> str:
        return f"{type(self._network).__name__} on {self.device}"

    def load_adapter(self, adapter: Adapter, path: Path) -> None:
        """Load a LoRA adapter. Raises also EngineNotInstalled, without peft."""
        key = next(self._new_keys)
        try:
            _inject(self._network, key, path)
        except (EngineNotInstalled, InvalidAdapter):
            raise
        except Exception as error:
            _eject(self._network, key)
            raise InvalidAdapter(f"{path} does not fit the model: {error}") from error
        self._keys[adapter] = key

    def unload_adapter(self, adapter: Adapter) -> None:
        _eject(self._network, self._keys.pop(adapter))

    def layout(self) -> Layout:
        """Return the parameters, of any floating-point type that they can be copied from."""
        first: dict[int, str] = {}
        return {
            name: TensorForm(
                tuple(each.shape),
                tuple(dict.fromkeys([each.dtype, torch.float32, torch.bfloat16, torch.float16])),
                None if (known := first.setdefault(id(each), name)) == name else known,
            )
            for name, each in self._parameters.items()
        }

    @torch.no_grad()
    def load(self, tensors: NamedTensors) -> None:
        for name, tensor in tensors:
            self._parameters[name].copy_(tensor)

    def close(self) -> None:
        self._network = None
        self._parameters.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def logits(self, contexts: Sequence[Sequence[int]], adapter: Adapter | None) -> Tensor:
        if self._keys:
            _activate(self._network, None if adapter is None else self._keys[adapter])
        lengths = torch.tensor([len(context) for context in contexts])
        token_ids = pad_sequence([torch.tensor(context) for context in contexts], batch_first=True)
        attention_mask = (torch.arange(token_ids.shape[1]) < lengths[:, None]).long()
        # The head computes the last positions alone: all of them would take too much memory.
        positions, places = torch.unique(lengths - 1, return_inverse=True)
        with torch.no_grad():
            logits: Tensor = self._network(
                input_ids=token_ids.to(self._input_device),
                attention_mask=attention_mask.to(self._input_device),
                use_cache=False,
                logits_to_keep=positions.to(self._input_device),
            ).logits
        if logits.shape[1] != len(positions):
            raise EngineUnsupported(
                f"{type(self._network).__name__} ignores logits_to_keep: use engine 'vllm' for it"
            )
        return logits[torch.arange(len(contexts), device=logits.device), places.to(logits.device)]


@contextmanager
def _translated(name: str) -> Iterator[None]:
    """Translate the errors of transformers while it opens ``name``."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"{name} does not fit the device's memory: choose a smaller model or dtype"
        ) from error
    except ImportError as error:
        raise EngineNotInstalled(f"{name} needs a package that is missing: {error}") from error
    except OSError as error:
        raise ModelNotFound(
            f"{name} cannot be loaded: give a directory or a model name whose weights are "
            f"safetensors ({error}){offline_advice()}"
        ) from error
    except Exception as error:
        raise EngineUnsupported(f"transformers cannot open {name}: {error}") from error


def _ends(network: Any) -> list[int]:
    """Return the end tokens of the checkpoint's ``generation_config.json``, as vLLM does."""
    found = getattr(getattr(network, "generation_config", None), "eos_token_id", None)
    return [found] if isinstance(found, int) else list(found or ())


def _length(config: Any, asked: int | None) -> int:
    known = getattr(config.get_text_config(), "max_position_embeddings", None)
    length = known if asked is None else asked
    if length is None:
        raise InvalidRequest("the model's configuration has no length: give max_model_len")
    if known is not None and length > known:
        raise InvalidRequest(f"max_model_len is {asked}, but the model takes {known} tokens")
    return int(length)


def _inject(network: Any, key: str, path: Path) -> None:
    """Put the adapter's layers into the network in place, and its weights into them."""
    try:
        from peft import PeftConfig
        from peft.functional import inject_adapter_in_model, set_peft_model_state_dict
    except ImportError as error:
        raise EngineNotInstalled(
            "adapters on engine 'transformers' need peft: pip install 'genrt[adapters]'"
        ) from error
    from safetensors.torch import load_file

    weights = load_file(path / WEIGHTS_NAME)
    config = PeftConfig.from_pretrained(str(path))
    _refuse_more_than_lora(config, path)
    config.inference_mode = True
    inject_adapter_in_model(config, network, key, low_cpu_mem_usage=True)
    loaded = set_peft_model_state_dict(network, weights, key, low_cpu_mem_usage=True)
    del network.peft_config
    missing = [name for name in loaded.missing_keys if f".{key}." in name]
    if missing or loaded.unexpected_keys:
        raise ValueError(
            f"{len(missing)} of its tensors are missing and {len(loaded.unexpected_keys)} have no "
            f"place, such as {(missing + loaded.unexpected_keys)[0]}"
        )


def _refuse_more_than_lora(config: Any, path: Path) -> None:
    """Raise InvalidAdapter for an adapter that would change the base model."""
    if config.peft_type != "LORA":
        raise InvalidAdapter(f"{path} is a {config.peft_type} adapter: only LoRA is taken")
    changes = [
        ("modules_to_save", not config.modules_to_save),
        ("trainable_token_indices", not config.trainable_token_indices),
        ("bias", config.bias == "none"),
        ("init_lora_weights", config.init_lora_weights in (True, False, *_HARMLESS_STARTS)),
    ]
    for name, harmless in changes:
        if not harmless:
            raise InvalidAdapter(
                f"{path} has {name}={getattr(config, name)!r}, which changes the base model: "
                "convert it to a plain LoRA adapter"
            )


def _eject(network: Any, key: str) -> None:
    """Remove an adapter's layers, also if only some are in."""
    from peft.functional import delete_adapter

    _activate(network, None)
    delete_adapter(network, key, prefix="lora_")
    if hasattr(network, "peft_config"):
        del network.peft_config


def _activate(network: Any, key: str | None) -> None:
    """Make the next forwards use this adapter's layers, or the base model alone."""
    from peft.functional import set_adapter

    set_adapter(network, [] if key is None else key, inference_mode=True)
