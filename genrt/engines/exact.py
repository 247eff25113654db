"""A small LM with known probabilities, for proofs and fast tests."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from genrt.engines.adapters import WEIGHTS_NAME
from genrt.engines.stepping import SteppedEngine, SteppedModel
from genrt.engines.weights import Layout, NamedTensors, TensorForm
from genrt.errors import InvalidAdapter, InvalidRequest, ModelNotFound
from genrt.numbers import check_float, check_int
from genrt.questions.arguments import Adapter
from genrt.tokens.vocabulary import BytesTokenizer

_FILE_NAME = "ngram.safetensors"

__all__ = ["ExactEngine", "NGram"]


class NGram:
    """A Markov chain of order k over a vocabulary: the last k tokens decide the distribution.

    Contexts shorter than k are padded on the left with token 0. The end token is a token like any other,
    and others may follow it.

    Args:
        vocabulary: the bytes that each of the V tokens adds to a text.
        table: ``[V] * (k + 1)`` log-probabilities, the last k tokens first, the next token last; -inf for
            a token that never follows. The model normalizes the rows.
        eos_token_id: the end token, if there is one.

    Raises:
        InvalidRequest: shapes that don't fit, NaN, +inf, or a row that is all -inf.
    """

    def __init__(
        self, vocabulary: Sequence[bytes], table: Tensor, *, eos_token_id: int | None = None
    ) -> None:
        if not isinstance(table, Tensor):
            raise InvalidRequest(f"the table is a {type(table).__name__}: give a tensor")
        self.tokenizer = BytesTokenizer(vocabulary, eos_token_id=eos_token_id)
        self.eos_token_id = eos_token_id
        self.vocabulary = tuple(vocabulary)
        self.vocab_size = size = len(self.vocabulary)
        if size == 0 or table.dim() == 0 or set(table.shape) != {size}:
            raise InvalidRequest(
                f"the table is {list(table.shape)} for {size} tokens: every dimension must be {size}"
            )
        self._table = _normalised_table(table)
        self.order = table.dim() - 1

    @classmethod
    def random(
        cls,
        vocabulary: int | Sequence[bytes],
        *,
        order: int = 1,
        seed: int = 0,
        zeros: float = 0.0,
        eos_token_id: int | None = None,
    ) -> NGram:
        """Make a model of random rows: the softmax of independent normal logits of standard deviation 2.

        Args:
            vocabulary: the tokens' bytes, or their number: then they are ``a``, ``b``, …, all different,
                and the end token is empty.
            order: how many tokens of context count.
            zeros: the fraction of each row that is -inf, rounded down; at least one entry is finite.
        """
        check_int("order", order, 0)
        check_float("zeros", zeros, 0.0, 1.0)
        if isinstance(vocabulary, int):
            vocabulary = [
                b"" if token == eos_token_id else _name(token) for token in range(vocabulary)
            ]
        size = len(vocabulary)
        generator = torch.Generator().manual_seed(seed)
        table = 2 * torch.randn([size] * (order + 1), dtype=torch.float64, generator=generator)
        impossible = min(math.floor(zeros * size), size - 1)
        if impossible > 0:
            ranks = torch.rand(table.shape, generator=generator).argsort(-1).argsort(-1)
            table = table.masked_fill(ranks < impossible, -math.inf)
        return cls(vocabulary, table, eos_token_id=eos_token_id)

    @property
    def table(self) -> Tensor:
        """The normalized table, float32, ``[V] * (k + 1)``; a copy."""
        return self._table.clone()

    def __repr__(self) -> str:
        return (
            f"NGram({self.vocab_size} tokens, order={self.order}, eos_token_id={self.eos_token_id})"
        )

    def row(self, token_ids: Sequence[int]) -> Tensor:
        """Return a copy of the row after these tokens, float32 ``[V]``. Raises InvalidRequest for a token
        id outside the vocabulary."""
        size, order = self.vocab_size, self.order
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < size:
            raise InvalidRequest(f"a token id is outside 0 .. {size - 1}")
        tail = token_ids[-order:] if order else ()
        return self._table[(*[0] * (order - len(tail)), *tail)].clone()

    def with_table(self, table: Tensor) -> NGram:
        """Return the model with another table of the same shape. Raises InvalidRequest as the class."""
        if table.shape != self._table.shape:
            raise InvalidRequest(
                f"the table is {list(table.shape)}, the model's {list(self._table.shape)}"
            )
        return NGram(self.vocabulary, table, eos_token_id=self.eos_token_id)

    def enumerate(
        self, prompt: Sequence[int], max_tokens: int, *, unfinished: bool = False
    ) -> Iterator[tuple[tuple[int, ...], float]]:
        """Yield every possible text after ``prompt`` that ends within ``max_tokens`` tokens, in order of
        ids, with its log-probability. The end token is its last, and counts.

        Args:
            unfinished: yield also the texts of ``max_tokens`` tokens without an end token. All texts
                together then have probability 1.
        """
        stack: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
        while stack:
            text, logprob = stack.pop()
            if text and text[-1] == self.eos_token_id:
                yield text, logprob
            elif len(text) >= max_tokens:
                if unfinished:
                    yield text, logprob
            else:
                row = self.row([*prompt, *text]).tolist()
                stack += [
                    ((*text, token), logprob + row[token])
                    for token in reversed(range(self.vocab_size))
                    if row[token] > -math.inf
                ]

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write the model to a directory, which is made if needed, as one safetensors file."""
        from safetensors.torch import save_file

        os.makedirs(directory, exist_ok=True)
        eos = self.eos_token_id
        save_file(
            {
                "table": self._table.contiguous(),
                "vocabulary": torch.tensor(list(b"".join(self.vocabulary)), dtype=torch.uint8),
                "lengths": torch.tensor([len(token) for token in self.vocabulary]),
                "eos_token_id": torch.tensor([-1 if eos is None else eos]),
            },
            Path(directory, _FILE_NAME),
        )

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> NGram:
        """Return the model that ``save`` wrote. Raises ModelNotFound without one."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = Path(directory, _FILE_NAME)
        try:
            stored = load_file(path)
            joined, lengths = bytes(stored["vocabulary"].tolist()), stored["lengths"].tolist()
            table, eos = stored["table"], int(stored["eos_token_id"])
        except (OSError, SafetensorError, KeyError) as error:
            raise ModelNotFound(
                f"{path} holds no saved NGram: give a directory that NGram.save wrote"
            ) from error
        ends = torch.tensor(lengths).cumsum(0).tolist()
        vocabulary = [joined[end - length : end] for end, length in zip(ends, lengths, strict=True)]
        return cls(vocabulary, table, eos_token_id=None if eos < 0 else eos)


class ExactEngine(SteppedEngine):
    """An engine over an NGram, on the CPU. ``SteppedEngine`` runs it; ``_Tables.logits`` is its forward.

    An adapter is a directory with ``adapter_config.json`` and ``adapter_model.safetensors``: its tensor
    ``table`` replaces the model's. New weights are a ``table`` too. Raises InvalidRequest for a size
    below 1.
    """

    def __init__(
        self, model: NGram, *, max_model_len: int = 1024, max_batch_size: int = 64
    ) -> None:
        super().__init__(_Tables(model), max_model_len=max_model_len, max_batch_size=max_batch_size)


class _Tables(SteppedModel):
    """The SteppedModel of an NGram; every adapter is another one."""

    device = torch.device("cpu")

    def __init__(self, model: NGram) -> None:
        self._models: dict[Adapter | None, NGram] = {None: model}
        self.vocab_size = model.vocab_size
        self.tokenizer = model.tokenizer

    def __repr__(self) -> str:
        return repr(self._models[None])

    def logits(self, contexts: Sequence[Sequence[int]], adapter: Adapter | None) -> Tensor:
        return torch.stack([*map(self._models[adapter].row, contexts)])

    def load_adapter(self, adapter: Adapter, path: Path) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            table = load_file(path / WEIGHTS_NAME)["table"]
            self._models[adapter] = self._models[None].with_table(table)
        except (OSError, SafetensorError, KeyError, InvalidRequest) as error:
            raise InvalidAdapter(f"{path} does not fit the model: {error}") from error

    def unload_adapter(self, adapter: Adapter) -> None:
        del self._models[adapter]

    def layout(self) -> Layout:
        shape = (self.vocab_size,) * (self._models[None].order + 1)
        return {"table": TensorForm(shape, (torch.float32, torch.float64))}

    def load(self, tensors: NamedTensors) -> None:
        for _, table in tensors:
            self._models[None] = self._models[None].with_table(table)


def _name(token: int) -> bytes:
    """Return bytes that no other token has: letters for the first ones."""
    return bytes([(97 + token) % 256]) if token < 256 else token.to_bytes(4, "big")


def _normalised_table(table: Tensor) -> Tensor:
    """Return rows in float32, normalized in float64 so that they sum to 1 to a bit or two."""
    wide = table.detach().double()
    total = wide.logsumexp(-1, keepdim=True)
    if bool(wide.isnan().any()) or not bool(total.isfinite().all()):
        raise InvalidRequest(
            "the table has NaN, +inf, or a row of nothing but -inf: every context needs a distribution"
        )
    return (wide - total).float()
