"""Weights in place, on the exact engine: what fits answers, what does not changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import genrt
from genrt.engines.exact import ExactEngine, NGram
from genrt.engines.weights import TensorForm, check_complete, check_tensors, layout_of, weight_files
from genrt.errors import (
    EngineDied,
    EngineFailed,
    EngineUnsupported,
    InvalidRequest,
    InvalidWeights,
    StreamCut,
)
from genrt.lm import AsyncLM
from tests.inside import engine_of, thread_of, weight_copies_of
from tests.scripted import ScriptedEngine

OLD, NEW = (NGram.random(7, order=2, seed=seed, eos_token_id=0) for seed in (1, 2))
TABLE = NEW.table
CONTEXTS = [[1], [1, 2], [3, 4, 5]]


@pytest.fixture
def lm() -> Iterator[AsyncLM]:
    with genrt.load(OLD, engine="exact", restart="auto", seed=3) as runtime:
        yield runtime


def assert_answers(lm: AsyncLM, model: NGram) -> None:
    """Every context has the model's row, whether it was cached before or not."""
    for context in (*CONTEXTS, [6, 6, 6]):
        row = lm.next_token_logprobs_sync(context)
        assert torch.allclose(row, model.row(context), atol=1e-6)


def warm(lm: AsyncLM) -> None:
    """Have rows cached."""
    lm.batch_next_token_logprobs_sync(CONTEXTS)
    assert lm.statistics().cache.rows == len(CONTEXTS)


async def slowly(*chunks: Any, then: BaseException | None = None) -> AsyncIterator[Any]:
    for chunk in chunks:
        await asyncio.sleep(0)
        yield chunk
    if then is not None:
        raise then


# -- what is given ----------------------------------------------------------------------------


def at_a_path(directory: Path) -> Path:
    save_file({"table": TABLE}, directory / "model.safetensors")
    return directory


SOURCES: dict[str, Callable[[Path], Any]] = {
    "a mapping": lambda _: {"table": TABLE},
    "pairs": lambda _: [("table", TABLE)],
    "an iterator of pairs": lambda _: iter([("table", TABLE)]),
    "chunks": lambda _: [{"table": TABLE}],
    "chunks of pairs": lambda _: [[("table", TABLE)]],
    "chunks with an empty one": lambda _: [{}, {"table": TABLE}, {}],
    "an asynchronous iterator": lambda _: slowly({"table": TABLE}),
    "asynchronous pairs": lambda _: slowly(("table", TABLE)),
    "a generator": lambda _: ({name: TABLE} for name in ["table"]),
    "a directory": at_a_path,
    "its name": lambda directory: str(at_a_path(directory)),
    "a file": lambda directory: at_a_path(directory) / "model.safetensors",
    "another type": lambda _: {"table": TABLE.double()},
}


@pytest.mark.promise(number=34)
@pytest.mark.parametrize("options", [{}, {"check_finite": True}, {"keep": False}], ids=str)
@pytest.mark.parametrize("what", SOURCES)
async def test_new_weights_answer_and_nothing_of_the_old(
    lm: AsyncLM, tmp_path: Path, what: str, options: dict[str, Any]
) -> None:
    await asyncio.to_thread(warm, lm)
    assert await lm.update_weights(SOURCES[what](tmp_path), **options) == lm.weights_version == 1
    assert lm.statistics().cache.rows == 0
    await asyncio.to_thread(assert_answers, lm, NEW)


BAD: dict[str, Any] = {
    "unknown": {"tabel": TABLE},
    "one too many": {"table": TABLE, "other": TABLE},
    "none": {},
    "no chunks": [],
    "an empty chunk": [{}],
    "a wrong shape": {"table": TABLE[1:]},
    "a dimension more": {"table": TABLE[None]},
    "a scalar": {"table": torch.tensor(1.0)},
    "transposed halves": {"table": TABLE.reshape(7, 49)},
    "empty": {"table": torch.empty(0)},
    "integers": {"table": TABLE.int()},
    "half precision": {"table": TABLE.half()},
    "bfloat16": {"table": TABLE.bfloat16()},
    "complex": {"table": TABLE.to(torch.complex64)},
    "bools": {"table": TABLE > 0},
    "sparse": {"table": TABLE.to_sparse()},
    "without numbers": {"table": TABLE.to("meta")},
    "no tensor": {"table": [1.0]},
    "None for a tensor": {"table": None},
    "a number for a name": {1: TABLE},
    "given twice": [("table", TABLE), ("table", TABLE)],
    "given twice in chunks": [[("table", TABLE), ("table", TABLE)]],
    "pairs and others": [("table", TABLE), "table"],
    "chunks of numbers": [1, 2],
    "a chunk of three": [[("table", TABLE, 1)]],
    "a bare name": [["table"]],
}


@pytest.mark.promise(number=34)
@pytest.mark.parametrize("what", BAD)
def test_what_does_not_fit_changes_nothing(lm: AsyncLM, what: str) -> None:
    warm(lm)
    engine = engine_of(lm)
    with pytest.raises(InvalidWeights):
        lm.update_weights_sync(BAD[what])
    assert lm.weights_version == 0
    assert engine_of(lm) is engine
    assert lm.statistics().cache.rows == len(CONTEXTS)
    assert_answers(lm, OLD)
    assert lm.update_weights_sync({"table": TABLE}) == 1


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_not_finite_are_refused_by_choice(
    lm: AsyncLM, tmp_path: Path, value: float
) -> None:
    table = TABLE.clone()
    table[1, 2, 3] = value
    save_file({"table": table}, tmp_path / "model.safetensors")
    for source in ({"table": table}, [{"table": table}], tmp_path):
        with pytest.raises(InvalidWeights, match="NaN or infinity"):
            lm.update_weights_sync(source, check_finite=True)
    assert_answers(lm, OLD)
    assert lm.weights_version == 0


@pytest.mark.parametrize(
    "source", [None, 1, 1.5, b"x", TABLE, object()], ids=lambda x: type(x).__name__
)
def test_what_is_no_source_is_refused(lm: AsyncLM, source: Any) -> None:
    with pytest.raises(InvalidRequest, match="weights must be"):
        lm.update_weights_sync(source)


@pytest.mark.parametrize(
    "options",
    [{"pending": "later"}, {"pending": None}, {"check_finite": 1}, {"keep": "no"}],
    ids=str,
)
def test_options_that_are_none_are_refused(lm: AsyncLM, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(options))):
        lm.update_weights_sync({"table": TABLE}, **options)


def test_files_that_are_no_weights_are_refused(lm: AsyncLM, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"\x05\0\0\0\0\0\0\0nope!")
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "model.safetensors.index.json").write_text(
        '{"weight_map": {"table": "../broken/model.safetensors"}}', encoding="utf-8"
    )
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "model.safetensors.index.json").write_text("[]", encoding="utf-8")
    (tmp_path / "pickle").mkdir()
    (tmp_path / "pickle" / "pytorch_model.bin").touch()
    for name in ("broken", "index", "list", "pickle", "nowhere"):
        with pytest.raises(InvalidWeights, match=r"safetensors|checkpoint"):
            lm.update_weights_sync(tmp_path / name)
    assert_answers(lm, OLD)


def test_an_engine_that_cannot_says_so() -> None:
    with (
        genrt.load(engine=ScriptedEngine) as lm,
        pytest.raises(EngineUnsupported, match="Scripted"),
    ):
        lm.update_weights_sync({"table": TABLE})


# -- layouts ----------------------------------------------------------------------------------

names = st.sampled_from("abcdef")


@given(st.dictionaries(names, st.tuples(st.integers(0, 3))), st.lists(names, max_size=8))
def test_a_layout_takes_what_it_lists_once_and_all_of_it(
    shapes: dict[str, tuple[int]], order: list[str]
) -> None:
    layout = {name: TensorForm(shape, (torch.float32,)) for name, shape in shapes.items()}
    given_ = [(name, torch.zeros(shapes.get(name, (1,)))) for name in order]
    if len(set(order)) < len(order) or not set(order) <= set(shapes):
        with pytest.raises(InvalidWeights):
            check_tensors(layout, given_)
        return
    found = check_tensors(layout, given_)
    assert [*found] == order
    if set(order) == set(shapes):
        check_complete(layout, found)
    else:
        missing = [name for name in shapes if name not in found]
        count = "^a tensor is" if len(missing) == 1 else f"^{len(missing)} tensors are"
        with pytest.raises(
            InvalidWeights, match=f"{count} missing, '{missing[0]}' first: give all"
        ):
            check_complete(layout, found)


def test_tied_weights_may_come_with_their_twin_and_no_other_way(tmp_path: Path) -> None:
    weight = torch.randn(4, 3)
    save_file({"model.embed_tokens.weight": weight}, tmp_path / "model.safetensors")
    layout = layout_of(weight_files(tmp_path), [torch.bfloat16], tied=True)
    whole = [("model.embed_tokens.weight", weight), ("lm_head.weight", weight)]
    assert [*check_tensors(layout, whole)] == ["model.embed_tokens.weight"]
    assert [*check_tensors(layout, whole[:1])] == ["model.embed_tokens.weight"]
    for wrong in (whole[1:], [whole[0], ("lm_head.weight", weight + 1)]):
        with pytest.raises(InvalidWeights, match="tied"):
            check_tensors(layout, wrong)
    check_tensors(layout, [(name, each.bfloat16()) for name, each in whole])


# -- errors in the middle ---------------------------------------------------------------------


class InParts(ExactEngine):
    """An exact engine whose table is given as one tensor for each first token."""

    def __init__(self, model: NGram = OLD, broken_at: int = -1) -> None:
        super().__init__(model)
        whole, parts = self.weights, dict[str, torch.Tensor]()
        row = TensorForm((7, 7), (torch.float32,))
        self.loaded = parts

        class Weights:
            layout = staticmethod(lambda: {f"table.{n}": row for n in range(7)})
            checkpoint = staticmethod(whole.checkpoint)
            begin = staticmethod(whole.begin)

            @staticmethod
            def load(tensors: Any) -> None:
                for name, tensor in tensors:
                    if len(parts) == broken_at:
                        raise RuntimeError("the device has gone")
                    parts[name] = tensor

            @staticmethod
            def finish() -> None:
                table = torch.stack([parts[f"table.{n}"] for n in range(7)])
                whole.load([("table", table)])
                parts.clear()

        self.weights: Any = Weights


PARTS = [{f"table.{n}": TABLE[n]} for n in range(7)]


@pytest.mark.promise(number=34)
@pytest.mark.parametrize("restart", ["auto", None])
@pytest.mark.parametrize("k", range(8))
async def test_an_error_at_any_chunk_leaves_the_last_whole_weights(k: int, restart: Any) -> None:
    async with genrt.load(engine=InParts, restart=restart) as lm:
        await asyncio.to_thread(warm, lm)
        first = engine_of(lm)
        with pytest.raises(OSError, match="the trainer"):
            await lm.update_weights(slowly(*PARTS[:k], then=OSError("the trainer has gone")))
        if k == 0:  # nothing was loaded
            assert engine_of(lm) is first
        elif restart is None:
            with pytest.raises(EngineDied):
                await lm.next_token_logprobs([6, 6])  # which is not cached
            await lm.arestart()
        await asyncio.to_thread(assert_answers, lm, OLD)
        assert (engine_of(lm) is first) == (k == 0)
        assert await lm.update_weights(slowly(*PARTS)) == 1
        await asyncio.to_thread(assert_answers, lm, NEW)
        with pytest.raises(InvalidWeights, match=r"missing|there are no weights"):
            await lm.update_weights(slowly(*PARTS[: min(k, 6)]), pending="restart")
        if restart is None and k > 0:
            await lm.arestart()
        await asyncio.to_thread(assert_answers, lm, NEW)
        assert lm.weights_version == 1


# -- restarts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 2])
async def test_a_restart_has_the_last_weights(lm: AsyncLM, times: int, tmp_path: Path) -> None:
    for _ in range(times):
        await lm.update_weights(at_a_path(tmp_path))
        (tmp_path / "model.safetensors").unlink()
        await lm.arestart()
        await asyncio.to_thread(assert_answers, lm, NEW)
        assert (await lm.draw([1])).weights_version == lm.weights_version
    assert len(weight_copies_of(thread_of(lm))) == 1  # the copies before are gone


async def test_weights_that_were_not_kept_are_not_replaced_by_others(lm: AsyncLM) -> None:
    await lm.update_weights({"table": TABLE}, keep=False)
    with pytest.raises(EngineFailed, match="keep=True"):
        await lm.arestart()
    with pytest.raises(EngineFailed):
        await lm.next_token_logprobs([1])


@pytest.mark.parametrize("what", ["kept", "changed", "gone"])
async def test_a_path_is_copied_only_where_a_restart_is_not_asked_for(
    tmp_path: Path, what: str
) -> None:
    path = at_a_path(tmp_path) / "model.safetensors"
    async with genrt.load(OLD, engine="exact") as lm:
        await lm.update_weights({"table": OLD.table})  # which are nowhere else
        assert len(weight_copies_of(thread_of(lm))) == 1
        await lm.update_weights(path)
        assert weight_copies_of(thread_of(lm)) == []
        await lm.arestart() if what == "kept" else None
        await asyncio.to_thread(assert_answers, lm, NEW)
        if what == "kept":
            await lm.update_weights(path, keep=True)
            path.unlink()
            await lm.arestart()
            await asyncio.to_thread(assert_answers, lm, NEW)
            return
        path.unlink()
        if what == "changed":
            save_file({"table": OLD.table}, path)
        with pytest.raises(EngineFailed, match=r"model\.safetensors, which has changed"):
            await lm.arestart()


async def test_copies_of_refused_weights_go(lm: AsyncLM) -> None:
    with pytest.raises(InvalidWeights):
        await lm.update_weights(slowly({"table": TABLE}, {"other": TABLE}))
    assert weight_copies_of(thread_of(lm)) == []


# -- what was asked before --------------------------------------------------------------------


async def test_a_stream_that_has_told_something_is_never_of_two_versions() -> None:
    async with genrt.load(OLD, engine="exact") as lm:
        stream = lm.stream([1], max_tokens=900, seed=1, ignore_eos=True)
        async with stream:
            await anext(stream)
            await lm.update_weights({"table": TABLE}, pending="restart")
            with pytest.raises(StreamCut, match="weights"):
                async for _ in stream:
                    pass
        whole = lm.stream([1], max_tokens=9, seed=1)
        async for _ in whole:
            assert whole.partial.weights_version == 1
        assert whole.completion is not None
        assert whole.completion.weights_version == 1


# -- laws -------------------------------------------------------------------------------------


@pytest.mark.promise(number=34)
async def test_transformers_takes_new_weights_beside_an_adapter(
    llama: Path, loras: tuple[Path, Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    from tests.small_models import make_llama

    other = make_llama(tmp_path / "other", seed=7)
    async with (
        await genrt.aload(llama, engine="transformers") as lm,
        await genrt.aload(other, engine="transformers") as wanted,
    ):
        for each in (lm, wanted):
            await each.add_adapter("a", loras[0])
        assert await lm.update_weights(load_file(other / "model.safetensors")) == 1
        for adapter in (None, "a"):
            row = await lm.next_token_logprobs([5, 6], adapter=adapter)
            same = await wanted.next_token_logprobs([5, 6], adapter=adapter)
            assert torch.allclose(row, same, atol=1e-4)
        with pytest.raises(InvalidWeights, match="missing"):
            await lm.update_weights({"lm_head.weight": torch.zeros(320, 128)})
