"""The byte trie against brute force."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from genrt.errors import InvalidRequest
from genrt.interop import byte_trie as trie_module
from genrt.interop.byte_trie import ByteTrie

TOKENS = st.lists(st.sampled_from(list(b"ab\xff")), max_size=5).map(bytes)
VOCABULARIES = st.lists(TOKENS, max_size=24)
PROBABLE = st.floats(-80, 0, width=32)
IMPROBABLE = st.floats(-4000, 0, width=32)


def rows_of(draw: st.DrawFn, vocab_size: int, values: st.SearchStrategy[float]) -> torch.Tensor:
    value = st.just(-math.inf) | values
    row = st.lists(value, min_size=vocab_size, max_size=vocab_size)
    rows = draw(st.lists(row, min_size=1, max_size=3))
    return torch.tensor(rows, dtype=torch.float32).reshape(len(rows), vocab_size)


def log_sum(values: Sequence[float]) -> float:
    peak = max(values, default=-math.inf)
    if peak == -math.inf:
        return peak
    return peak + math.log(math.fsum(math.exp(value - peak) for value in values))


@given(tokens=VOCABULARIES, absent=TOKENS)
@settings(deadline=None)
def test_the_nodes_are_the_prefixes_of_the_tokens(tokens: list[bytes], absent: bytes) -> None:
    trie = ByteTrie(tokens)
    prefixes = sorted({b"", *(t[:n] for t in tokens for n in range(len(t) + 1))})
    assert [trie.prefix(node) for node in range(trie.num_nodes)] == prefixes
    for node, prefix in enumerate(prefixes):
        assert trie.node(prefix) == node
        assert trie.tokens(node) == tuple(i for i, t in enumerate(tokens) if t and t == prefix)
        longer = [p for p in prefixes if len(p) == len(prefix) + 1 and p.startswith(prefix)]
        assert trie.children(node) == {p[-1]: prefixes.index(p) for p in longer}
    nodes = [prefixes.index(t) if t else -1 for t in tokens]
    assert trie.token_node.tolist() == nodes
    assume(absent not in prefixes)
    assert trie.node(absent) is None


SUMS: dict[str, tuple[st.SearchStrategy[float], Callable[[list[float]], float]]] = {
    "mass": (PROBABLE, lambda values: math.fsum(map(math.exp, values))),
    "log_mass": (IMPROBABLE, log_sum),
    "weight_max": (
        st.floats(width=32, allow_nan=False),
        lambda values: max(values, default=-math.inf),
    ),
}


@pytest.mark.parametrize("name", SUMS)
@given(data=st.data(), tokens=VOCABULARIES)
@settings(deadline=None)
def test_a_sum_is_over_the_tokens_with_each_prefix(
    name: str, data: st.DataObject, tokens: list[bytes]
) -> None:
    values, total = SUMS[name]
    rows = data.draw(st.composite(rows_of)(len(tokens), values))
    trie = ByteTrie(tokens)
    prefixes = [trie.prefix(node) for node in range(trie.num_nodes)]
    expected = [
        [
            total([v for v, t in zip(row, tokens, strict=True) if t and t.startswith(p)])
            for p in prefixes
        ]
        for row in rows.tolist()
    ]
    found = getattr(trie, name)(rows)
    assert found.shape == (len(rows), trie.num_nodes)
    wanted = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(
        found.double(), wanted, rtol=3e-6, atol=1e-5 if name == "log_mass" else 0.0
    )
    torch.testing.assert_close(getattr(trie, name)(rows[0]), found[0], rtol=1e-6, atol=1e-6)


def many_tokens() -> tuple[list[bytes], torch.Tensor]:
    """Enough for many levels of sums: 5,000 tokens of 1 to 6 of 4 bytes, and 7 rows over 60 nats."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 7, (5000,), generator=generator).tolist()
    tokens = [bytes(torch.randint(97, 101, (n,), generator=generator).tolist()) for n in lengths]
    logits = 60 * torch.rand(7, 5000, generator=generator, dtype=torch.float64)
    return tokens, torch.log_softmax(logits, -1)


def test_small_masses_beside_large_ones_keep_their_digits() -> None:
    tokens, rows = many_tokens()
    trie = ByteTrie(tokens)
    exact, rounded = trie.mass(rows), trie.mass(rows.float().double()).float()
    assert exact.dtype == torch.float64
    assert float(exact[exact > 0].min()) < 1e-24
    torch.testing.assert_close(exact[:, 0], torch.ones(7, dtype=torch.float64))
    torch.testing.assert_close(trie.mass(rows.float()), rounded, rtol=3e-6, atol=0.0)
    torch.testing.assert_close(trie.log_mass(rows), exact.log(), rtol=1e-12, atol=1e-12)


def test_the_mass_of_a_row_does_not_depend_on_its_neighbours_or_on_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens, rows = many_tokens()
    trie = ByteTrie(tokens)
    mass = trie.mass(rows.float())
    assert torch.equal(torch.stack([trie.mass(row) for row in rows.float()]), mass)
    monkeypatch.setattr(trie_module, "_CPU_CHUNK", 0)
    assert torch.equal(trie.mass(rows.float()), mass)


def test_half_precision_is_summed_in_float32_and_rows_are_left_alone() -> None:
    trie = ByteTrie([bytes([byte]) for byte in range(256)])
    rows = torch.full((2, 256), -math.log(256), dtype=torch.bfloat16, requires_grad=True)
    mass = trie.mass(rows)
    assert mass.dtype == torch.float32
    assert not mass.requires_grad
    torch.testing.assert_close(mass[:, 0], 256 * rows.detach().float().exp()[:, 0])


def test_no_rows_and_no_tokens() -> None:
    assert ByteTrie([b"a", b"b"]).mass(torch.zeros(0, 2)).shape == (0, 3)
    empty = ByteTrie([b"", b""])
    assert (empty.num_nodes, empty.node(b""), empty.node(b"a")) == (1, 0, None)
    assert (empty.prefix(0), empty.children(0), empty.tokens(0)) == (b"", {}, ())
    assert empty.mass(torch.zeros(3, 2)).tolist() == [[0.0]] * 3
    assert empty.log_mass(torch.zeros(2)).tolist() == [-math.inf]
    assert ByteTrie([]).mass(torch.zeros(2, 0)).tolist() == [[0.0]] * 2
    assert empty.weight_max(torch.ones(3, 2)).tolist() == [[-math.inf]] * 3


@pytest.mark.parametrize(
    "rows",
    [torch.zeros(4), torch.zeros(1, 1, 3), torch.tensor(0.0), torch.zeros(3, dtype=torch.int64)],
)
def test_rows_that_do_not_fit_are_refused(rows: torch.Tensor) -> None:
    trie = ByteTrie([b"a", b"b", b"c"])
    for read in (trie.mass, trie.log_mass, trie.weight_max):
        with pytest.raises(InvalidRequest, match="rows"):
            read(rows)


@pytest.mark.parametrize("node", [-1, 4, "a", None, 1.0, 2**70])
def test_numbers_that_are_no_nodes_are_refused(node: Any) -> None:
    trie = ByteTrie([b"a", b"b", b"c"])
    for ask in (trie.prefix, trie.children, trie.tokens):
        with pytest.raises(InvalidRequest, match="not a node"):
            ask(node)
