"""NeMo-RL's generation interface: the cases of its public unit tests as data, on two engines."""

from __future__ import annotations

import asyncio
from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import genrt
from genrt.errors import Closed, EngineFailed, EngineUnsupported, InvalidRequest, TimedOut
from genrt.generation import rollout_sync, splice_turn
from genrt.interop.nemo_rl import NemoGeneration
from genrt.interop.trainers import WeightSyncClient
from genrt.lm import AsyncLM
from tests.generation.test_many import EOS, MODEL, Engine, nothing_left
from tests.inside import engine_of
from tests.interop.test_trainers import MODEL as RECEIVING
from tests.interop.test_trainers import OTHER
from tests.interop.test_trainers import Engine as ReceivingEngine
from tests.masks import check_places
from tests.runtime.test_pauses import SleepyEngine
from tests.waiting import until

ROOM = 32
PAD = EOS
CONFIG: dict[str, Any] = {
    "backend": "vllm",
    "model_name": "a/model",
    "max_new_tokens": 5,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": None,
    "val_temperature": 1.0,
    "val_top_p": 1.0,
    "val_top_k": None,
    "stop_token_ids": [EOS],
    "stop_strings": None,
    "vllm_cfg": {"async_engine": False, "tensor_parallel_size": 1, "precision": "bfloat16"},
    "colocated": {"enabled": False, "resources": {"gpus_per_node": None, "num_nodes": None}},
    "vllm_kwargs": {},
    "_pad_token_id": PAD,
}
"""The configuration of the reference's tests, as ``configure_generation_config`` returns it."""

DTYPES = {
    "output_ids": torch.int64,
    "logprobs": torch.float32,
    "generation_lengths": torch.int64,
    "unpadded_sequence_lengths": torch.int64,
    "truncated": torch.bool,
}


@pytest.fixture(scope="module")
def lm() -> Iterator[AsyncLM]:
    with genrt.load(MODEL, engine="exact", engine_options={"max_model_len": ROOM}) as opened:
        yield opened


def batch_of(
    prompts: Sequence[Sequence[int]], pad: int = PAD, width: int = 0
) -> UserDict[str, Any]:
    """A ``GenerationDatumSpec``, in a dictionary of another class, as ``BatchedDataDict`` is."""
    width = max(width, max(map(len, prompts), default=0))
    rows = [[*prompt, *[pad] * (width - len(prompt))] for prompt in prompts]
    ids = torch.tensor(rows, dtype=torch.int64).reshape(len(prompts), width)
    lengths = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32)
    return UserDict(input_ids=ids, input_lengths=lengths)


def joined(outputs: Sequence[Mapping[str, Tensor]], pad: int = PAD) -> dict[str, Tensor]:
    """Outputs of single samples as a batch: rows are padded, numbers are put together."""
    return {
        name: torch.cat([each[name] for each in outputs])
        if outputs[0][name].ndim == 1
        else pad_sequence(
            [each[name][0] for each in outputs],
            batch_first=True,
            padding_value={"output_ids": pad, "weights_versions": -1}.get(name, 0),
        )
        for name in outputs[0]
    }


def check_output(found: Mapping[str, Tensor], data: Mapping[str, Any], pad: int = PAD) -> None:
    """See that an output is right-padded, and that its lengths, dtypes and log-probabilities agree."""
    ids, lengths = data["input_ids"], data["input_lengths"]
    batch, width = found["output_ids"].shape
    assert batch == len(ids)
    assert found["logprobs"].shape == (batch, width)
    for name, dtype in DTYPES.items():
        assert found[name].dtype == dtype, name
        assert found[name].shape[0] == batch, name
    ends = found["unpadded_sequence_lengths"]
    assert torch.equal(ends, lengths + found["generation_lengths"])
    places = torch.arange(width)
    assert (found["output_ids"][places >= ends[:, None]] == pad).all()
    for row, length in enumerate(lengths.tolist()):
        assert torch.equal(found["output_ids"][row, :length], ids[row, :length])
    is_drawn = (places >= lengths[:, None]) & (places < ends[:, None])
    assert torch.equal(found["logprobs"] != 0, is_drawn)


# -- texts ---------------------------------------------------------------------------------------------

BATCHES: dict[str, UserDict[str, Any]] = {
    "two prompts, padded to 20": batch_of([[0, 1, 2, 3], [3, 1, 0]], width=20),
    "one prompt of padding": batch_of([[0]]),
    "a prompt of one width": batch_of([[0, 1], [2, 3]]),
    "no prompt": batch_of([]),
}


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("data", BATCHES.values(), ids=BATCHES.keys())
async def test_a_batch_has_the_fields_of_the_reference_sample_by_sample_too(
    lm: AsyncLM, data: UserDict[str, Any], greedy: bool
) -> None:
    whole = NemoGeneration(lm, CONFIG, seed=3).generate(data, greedy=greedy)
    check_output(whole, data)
    assert whole.keys() >= DTYPES.keys()
    count, width = data["input_ids"].shape
    assert whole["output_ids"].shape[1] == width + max(whole["generation_lengths"].tolist() or [0])
    one_by_one, policy = [], NemoGeneration(lm, CONFIG, seed=3)
    for row in range(count):
        single = {name: each[row : row + 1] for name, each in data.items()}
        async for number, found in policy.generate_async(single, greedy=greedy):
            assert number == 0
            check_output(found, single)
            assert found["output_ids"].shape[1] == found["unpadded_sequence_lengths"][0]
            one_by_one.append(found)
    again = NemoGeneration(lm, CONFIG, seed=3)
    at_once = {number: each async for number, each in again.generate_async(data, greedy=greedy)}
    assert sorted(at_once) == [*range(count)]
    if count:
        for outputs in (one_by_one, [at_once[number] for number in range(count)]):
            for name, each in joined(outputs).items():
                assert torch.equal(
                    each, whole[name][:, : each.shape[1]] if each.ndim == 2 else whole[name]
                )


def test_a_log_probability_stands_at_its_token_and_zeros_elsewhere(lm: AsyncLM) -> None:
    """One token after two of a prompt that is padded to three."""
    data = batch_of([[0, 1]], width=3)
    found = NemoGeneration(lm, CONFIG | {"max_new_tokens": 1}).generate(data)
    [drawn] = found["output_ids"][0, 2:3].tolist()
    assert found["output_ids"].tolist() == [[0, 1, drawn, PAD]]
    logprob = float(lm.next_token_logprobs_sync([0, 1])[drawn])
    assert found["logprobs"][0].tolist() == pytest.approx([0.0, 0.0, logprob, 0.0], abs=1e-5)


@pytest.mark.parametrize("mode", [None, "raw_logprobs", "processed_logprobs"])
def test_log_probabilities_are_the_models_or_those_of_the_draws(lm: AsyncLM, mode: Any) -> None:
    config = CONFIG | {"temperature": 0.7, "top_k": 2, "vllm_cfg": {"logprobs_mode": mode}}
    data = batch_of([[0, 1]] * 8)
    found = NemoGeneration(lm, config, seed=1).generate(data)
    for row in range(8):
        end = int(found["unpadded_sequence_lengths"][row])
        ids = found["output_ids"][row, :end].tolist()
        for place in range(2, end):
            law = lm.next_token_logprobs_sync(ids[:place])
            if mode == "processed_logprobs":
                best = law.topk(2).indices
                kept = torch.full_like(law, -torch.inf)
                kept[best] = law[best] / 0.7
                law = kept.log_softmax(-1)
            expected = float(law[ids[place]])
            assert float(found["logprobs"][row, place]) == pytest.approx(expected, abs=1e-4)


ROOMS = [(20, ROOM - 7, 7), (3, ROOM - 7, 3), (20, ROOM - 1, 1), (20, ROOM, 0)]


@pytest.mark.parametrize(("most", "length", "expected"), ROOMS)
async def test_new_tokens_end_with_the_context(
    lm: AsyncLM, most: int, length: int, expected: int
) -> None:
    policy = NemoGeneration(
        lm, CONFIG | {"max_new_tokens": most, "ignore_eos": True, "stop_token_ids": None}
    )
    data = batch_of([[0] * length])
    single = [each async for _, each in policy.generate_async(data)]
    for found in (policy.generate(data), *single):
        assert found["generation_lengths"].tolist() == [expected]
        assert found["truncated"].tolist() == [
            expected > 0
        ]  # nothing was cut off where nothing fits


STOPS: list[tuple[dict[str, Any], Any]] = [
    ({"stop_strings": ["c"]}, None),
    ({"stop_strings": None}, [["c"], ["c"]]),
    ({"stop_strings": ["c"]}, [None, None]),
    ({"stop_token_ids": [2]}, None),
]


@pytest.mark.parametrize(("entries", "stops"), STOPS, ids=str)
async def test_texts_end_with_their_stop_which_is_a_part_of_them(
    lm: AsyncLM, entries: dict[str, Any], stops: Any
) -> None:
    config = CONFIG | {
        "ignore_eos": True,
        "max_new_tokens": 16,
        "bad_words": ["b"],
        "stop_token_ids": None,
    }
    config |= entries
    prompts = ["ab", "da"]
    data: Any = batch_of([lm.encode(each) for each in prompts])
    if stops is not None:
        data["stop_strings"] = stops
    found = NemoGeneration(lm, config, seed=2).generate(data)
    texts: list[str] = []
    for row, prompt in enumerate(prompts):
        end = int(found["unpadded_sequence_lengths"][row])
        texts.append(lm.decode(found["output_ids"][row, :end].tolist()).removeprefix(prompt))
        assert texts[row].endswith(" c")
        assert "c" not in texts[row][:-1]
        assert "b" not in texts[row]
    assert found["truncated"].tolist() == [False, False]
    asked = {"prompts": prompts, "stop_strings": stops}
    assert NemoGeneration(lm, config, seed=2).generate_text(asked) == {"texts": texts}
    policy = NemoGeneration(lm, config, seed=2)
    single = {number: each async for number, each in policy.generate_text_async(asked)}
    assert single == {number: {"texts": [text]} for number, text in enumerate(texts)}


async def test_no_prompts_have_no_texts(lm: AsyncLM) -> None:
    policy = NemoGeneration(lm, CONFIG)
    assert policy.generate_text({"prompts": []}) == {"texts": []}
    assert [each async for each in policy.generate_text_async({"prompts": []})] == []


def test_samples_differ_and_equal_seeds_give_equal_samples(lm: AsyncLM) -> None:
    data = batch_of([[0, 1]] * 8)
    policy = NemoGeneration(lm, CONFIG | {"ignore_eos": True}, seed=5)
    first, second = (policy.generate(data)["output_ids"] for _ in range(2))
    assert not torch.equal(first, second)
    assert len({tuple(row) for row in first.tolist()}) > 1
    options: dict[str, Any] = {"pad_value": PAD, "max_new_tokens": 5, "ignore_eos": True}
    options["stop_token_ids"] = [EOS]
    for seed, found in ((5, first), (13, second)):  # samples are counted over calls
        again = rollout_sync(lm, data["input_ids"], data["input_lengths"], seed=seed, **options)
        assert torch.equal(again.output_ids, found)


@pytest.mark.parametrize("form", ["ids", "bits"])
async def test_sampling_masks_are_those_of_rollouts(lm: AsyncLM, form: Any) -> None:
    """A trainer's own logits, normalized over a set, are the log-probability of the draw."""
    config = CONFIG | {"top_p": 0.8, "top_k": 3, "temperature": 0.7, "stop_token_ids": None}
    data, masked = batch_of([[0, 1], [2]]), {"seed": 4, "sampling_mask": form}
    found = NemoGeneration(lm, config, **masked).generate(data)
    options: dict[str, Any] = {"top_p": 0.8, "top_k": 3, "temperature": 0.7, **masked}
    ids, lengths = data["input_ids"], data["input_lengths"]
    whole = rollout_sync(lm, ids, lengths, pad_value=PAD, max_new_tokens=5, **options)
    assert found.keys() == whole.as_dict().keys()
    assert all(torch.equal(found[name], each) for name, each in whole.as_dict().items())
    for text in whole.completions:
        check_places(
            text, options, lambda c: lm.next_token_logprobs_sync([*c]).numpy(), tolerance=1e-5
        )
    again = NemoGeneration(lm, config, **masked)
    async for number, each in again.generate_async(data):
        assert each.keys() == found.keys()
        drawn = found["logprobs"][number] != 0
        own = each["sampling_logprobs"][each["logprobs"] != 0]
        assert torch.equal(own, found["sampling_logprobs"][number][drawn])


OWN_STOPS: list[Any] = [None, "b", ["b"], []]


@pytest.mark.parametrize("own", OWN_STOPS, ids=str)
def test_stops_of_the_configuration_and_of_a_batch_are_united(lm: AsyncLM, own: Any) -> None:
    entries = {"stop_strings": own, "ignore_eos": True, "temperature": 2.0, "stop_token_ids": None}
    policy, data = NemoGeneration(lm, CONFIG | entries, seed=5), batch_of([[0]] * 3)
    options: dict[str, Any] = {"pad_value": PAD, "ignore_eos": True, "temperature": 2.0}
    options |= {"max_new_tokens": 5, "include_stop_str_in_output": True}
    common = ["b"] if own else []
    theirs: list[tuple[Any, list[list[str]]]] = [
        (None, [[], [], []]),
        ([["a"], None, []], [["a"], [], []]),
        (["a"], [["a"]] * 3),
        ("a", [["a"]] * 3),
    ]
    for number, (stops, each) in enumerate(theirs):
        found = policy.generate({**data, "stop_strings": stops})
        options |= {"seed": 5 + 3 * number, "stop_strings": [[*common, *more] for more in each]}
        expected = rollout_sync(lm, data["input_ids"], data["input_lengths"], **options)
        assert torch.equal(found["output_ids"], expected.output_ids)


SPLICES = [
    ([], [9, 2], [9, 2, 33, 44], [9, 2, 33, 44]),
    ([100, 2], [9, 2, 9, 2], [9, 2, 9, 2, 77, 88], [100, 2, 77, 88]),
    (
        [11, 12, 99, 99, 99, 55, 2],
        [11, 12, 88, 88, 88, 56, 2],
        [11, 12, 56, 2, 70, 71, 2, 40, 41],
        [11, 12, 99, 99, 99, 55, 2, 70, 71, 2, 40, 41],
    ),
]


@pytest.mark.parametrize(("model", "prefix", "template", "expected"), SPLICES)
def test_a_turn_after_tools_keeps_the_drawn_tokens(
    model: list[int], prefix: list[int], template: list[int], expected: list[int]
) -> None:
    assert splice_turn(model, prefix, template, 2) == expected
    with pytest.raises(InvalidRequest, match="no end token"):
        splice_turn([7, 2], [9, 9, 9], [9, 9, 9, 2, 10], 2)


async def test_leaving_early_or_late_leaves_nothing_behind() -> None:
    engine = Engine()
    config = CONFIG | {"max_new_tokens": 40, "ignore_eos": True}
    async with await genrt.aload(engine=lambda: engine) as lm:
        policy = NemoGeneration(lm, config)
        data, prompts = batch_of([[0], [1], [2]]), {"prompts": ["a", "b", "d"]}
        for samples in (policy.generate_async(data), policy.generate_text_async(prompts)):
            async with aclosing(samples):
                async for _ in samples:
                    break
            await nothing_left(lm, engine)
        late = NemoGeneration(lm, config, timeout=0)
        with pytest.raises(TimedOut):
            async for _ in late.generate_async(data):
                pass
        await nothing_left(lm, engine)
        cut = NemoGeneration(lm, config, timeout=0, on_timeout="truncate").generate(data)
        assert cut["generation_lengths"].tolist() == [0, 0, 0]


# -- what is refused -----------------------------------------------------------------------------------

WRONG: list[tuple[Any, str]] = [
    *(({"-": name}, f"no '{name}'") for name in ("max_new_tokens", "top_k", "_pad_token_id")),
    ({"top_k": 0}, "top_k must be None or -1"),
    ({"top_k": -2}, "top_k must be"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"max_new_tokens": 0}, "max_new_tokens"),
    ({"_pad_token_id": None}, "pad_value must be an int"),
    ({"vllm_cfg": {"max_model_len": 1024}}, f"1024; the runtime has {ROOM}"),
    ({"vllm_cfg": {"logprobs_mode": "cooked"}}, "logprobs_mode"),
    ({"vllm_cfg": {"expose_http_server": True}}, r"genrt\.serving"),
    ({"vllm_cfg": 3}, "vllm_cfg in config must be a mapping"),
    ({"vllm_kwargs": {"enable_return_routed_experts": True}}, "genrt returns none"),
    *(
        ({"refit_transport": each}, f"'{each}' must be None")
        for each in ("nixl", "vllm_zmq_sparse")
    ),
]


@pytest.mark.parametrize(("entries", "message"), WRONG, ids=str)
def test_a_wrong_configuration_is_refused(lm: AsyncLM, entries: Any, message: str) -> None:
    config = CONFIG | entries
    config.pop(config.pop("-", ""), None)
    with pytest.raises(InvalidRequest, match=message):
        NemoGeneration(lm, config)


def test_wrong_arguments_are_refused(lm: AsyncLM) -> None:
    wrong: Any = 3
    with pytest.raises(InvalidRequest, match="config must be a mapping"):
        NemoGeneration(lm, wrong)
    with pytest.raises(InvalidRequest, match="lm must be an AsyncLM"):
        NemoGeneration(wrong, CONFIG)
    with pytest.raises(InvalidRequest, match="server_url must be an address"):
        NemoGeneration(lm, CONFIG, server_url="somewhere")
    with pytest.raises(InvalidRequest, match="no option 'sed'"):
        NemoGeneration(lm, CONFIG, sed=1)
    with pytest.raises(InvalidRequest, match="here are for all samples"):
        NemoGeneration(lm, CONFIG | {"stop_strings": [["a"], None]})


DATA = batch_of([[0, 1, 2], [3]])
WRONG_DATA: list[tuple[Any, str]] = [
    (3, "data must be a mapping"),
    ({"input_ids": DATA["input_ids"]}, "no 'input_lengths'"),
    ({**DATA, "input_lengths": torch.tensor([1, 1])}, "row 0, position 1 of input_ids"),
    ({**DATA, "input_lengths": torch.tensor([4, 1])}, "row 0: input_lengths says 4"),
    ({**DATA, "input_lengths": torch.tensor([3])}, "input_lengths has length 1, not 2"),
    ({**DATA, "input_ids": DATA["input_ids"][0]}, r"integers \[batch, time\]"),
    ({**DATA, "vllm_images": [[], [object()]]}, "take no vllm_images"),
]


@pytest.mark.parametrize(("data", "message"), WRONG_DATA, ids=[str(n) for n in range(7)])
async def test_wrong_data_are_refused(lm: AsyncLM, data: Any, message: str) -> None:
    policy = NemoGeneration(lm, CONFIG)
    with pytest.raises(InvalidRequest, match=message):
        policy.generate(data)
    with pytest.raises(InvalidRequest, match=message):
        async for _ in policy.generate_async(data):
            pass
    for texts in (3, {}, {"prompts": "a"}, {"prompts": [1]}):
        with pytest.raises(InvalidRequest, match="data must have 'prompts'"):
            policy.generate_text(texts)  # type: ignore[arg-type]
    empty = policy.generate({**DATA, "vllm_images": [[], []], "vllm_content": [None, None]})
    check_output(empty, DATA)


@pytest.mark.parametrize(
    "name", ["update_weights_via_ipc_zmq", "prepare_nccl_reshard_refit_info", "nccl_reshard_refit"]
)
def test_other_transfers_are_refused_by_name(lm: AsyncLM, name: str) -> None:
    with pytest.raises(EngineUnsupported, match=f"^{name} .* update_weights_from_collective"):
        getattr(NemoGeneration(lm, CONFIG), name)({})


# -- the engine ----------------------------------------------------------------------------------------


def test_a_colocated_engine_sleeps_between_two_generations() -> None:
    config = CONFIG | {"stop_token_ids": None, "_pad_token_id": 0, "colocated": {"enabled": True}}
    data = batch_of([[1, 2]], pad=0)
    with genrt.load(engine=SleepyEngine) as lm:
        policy, weights = NemoGeneration(lm, config, seed=1), engine_of(lm).weights
        assert policy.blocks_training()
        assert policy.prepare_for_generation()  # it is awake
        before = policy.generate(data)
        assert policy.finish_generation(release_gpu=False)
        assert not weights.levels
        for _ in range(2):
            assert policy.finish_generation()
            assert weights.levels == [1]
            with pytest.raises(EngineFailed, match="paused"):
                policy.generate(data)
        assert policy.prepare_for_generation(tags=["weights"])
        assert weights.asleep == {"kv_cache"}
        assert (
            policy.update_weights_from_tensors({"table": OTHER.table[:5, :5].log_softmax(-1)}) == 1
        )
        assert policy.prepare_for_generation(tags=["kv_cache"])
        assert policy.generate(data)["weights_versions"].amax(1).tolist() == [1]
        assert before["weights_versions"].amax(1).tolist() == [0]
        policy.sleep()
        policy.wake_up()
        assert not weights.asleep
        for _ in range(2):
            assert policy.shutdown()
        with pytest.raises(Closed):
            policy.generate(data)


def test_an_engine_of_its_own_stays_awake() -> None:
    config = CONFIG | {"stop_token_ids": None, "_pad_token_id": 0}
    with genrt.load(engine=SleepyEngine) as lm:
        policy = NemoGeneration(lm, config, server_url="http://localhost:8000")
        assert policy.finish_generation()
        assert policy.invalidate_kv_cache()
        assert policy.prepare_for_generation()
        assert not engine_of(lm).weights.levels
        assert not policy.blocks_training()
        assert policy.cfg is config
        assert policy.device_uuids == [policy.report_device_id()] == [["cpu"]]
        assert policy.dp_openai_server_base_urls == ["http://localhost:8000/v1"]
        whole = NemoGeneration(lm, config, server_url="http://localhost:8000/v1/")
        assert whole.dp_openai_server_base_urls == policy.dp_openai_server_base_urls
        assert NemoGeneration(lm, config).dp_openai_server_base_urls == [None]


# -- refits --------------------------------------------------------------------------------------------

INFO = {"table": (OTHER.table.shape, OTHER.table.dtype)}


def test_a_refit_is_received_as_noted_and_later_texts_are_the_new_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = CONFIG | {"stop_token_ids": None, "_pad_token_id": 0}
    data = batch_of([[1, 2]], pad=0)
    with genrt.load(engine=ReceivingEngine) as lm:
        policy, weights = NemoGeneration(lm, config), engine_of(lm).weights
        with pytest.raises(InvalidRequest, match="prepare_refit_info first"):
            policy.update_weights_from_collective()
        wrong: list[Any] = [None, {"table": 3}, {"table": ("x", torch.float32)}]
        for each in wrong:
            with pytest.raises(InvalidRequest, match=r"\(shape, dtype\) by name"):
                policy.prepare_refit_info(each)
        policy.prepare_refit_info(INFO)
        assert policy.init_collective("10.0.0.1", 29500, 3, train_world_size=2) == []
        spec = policy.get_collective_sender_spec()
        assert spec.nccl_peer == "vllm"
        assert weights.met == [
            {
                "master_address": "10.0.0.1",
                "master_port": 29500,
                "rank_offset": 2,
                "world_size": 3,
                "packed": True,
                "packed_num_buffers": spec.num_buffers,
                "packed_buffer_size_bytes": spec.buffer_size_bytes,
            }
        ]
        received: list[dict[str, Any]] = []
        take = weights.receive

        def receive(info: dict[str, Any]) -> None:
            received.append(info)
            take({"table": OTHER.table})

        monkeypatch.setattr(weights, "receive", receive)
        before = policy.generate(data, greedy=True)
        assert policy.update_weights_from_collective() == []
        after = policy.generate(data, greedy=True)
        assert not torch.equal(before["logprobs"][0, 2], after["logprobs"][0, 2])
        expected = rollout_sync(
            lm,
            data["input_ids"],
            data["input_lengths"],
            pad_value=0,
            max_new_tokens=5,
            temperature=0.0,
        )
        assert torch.equal(after["logprobs"], expected.logprobs)
        wrong_ranks: list[Any] = [
            {"ip": 1},
            {"port": 0},
            {"world_size": 1},
            {"train_world_size": 3},
        ]
        ranks: Any = {"ip": "10.0.0.1", "port": 29500, "world_size": 3, "train_world_size": 2}
        for each in wrong_ranks:
            with pytest.raises(InvalidRequest, match=f"^{next(iter(each))} must be"):
                policy.init_collective(**(ranks | each))
        with pytest.raises(InvalidRequest, match="a mapping of GPU UUIDs"):
            policy.update_weights_from_ipc_handles({"table": ()})
        wrong = [None, {}, {"tables": {}}]
        for each in wrong:
            with pytest.raises(InvalidRequest, match="names of prepare_refit_info"):
                policy.update_weights_from_ipc_handles(each)
        assert policy.update_weights_from_ipc_handles({"table": {"GPU-1": ()}}) == []
        named = {"names": ["table"], "shapes": [[6, 6]], "dtype_names": ["float32"]}
        assert received == [named, {**named, "ipc_handles": [{"1": ()}]}]
        assert lm.weights_version == 2


async def test_a_refit_in_flight_leaves_its_texts_in_progress() -> None:
    """NeMo-RL's asynchronous GRPO refits while samples are drawn."""
    config = CONFIG | {"stop_token_ids": None, "_pad_token_id": 0, "max_new_tokens": 500}
    of = {0: RECEIVING, 1: OTHER}
    with genrt.load(engine=ReceivingEngine) as lm:
        policy = NemoGeneration(lm, config | {"ignore_eos": True}, pending="continue", seed=1)
        samples = policy.generate_async(batch_of([[1, 2], [3]], pad=0))
        first = asyncio.ensure_future(anext(samples))
        await until(lambda: lm.statistics().engine.sampled_tokens, lm)
        source = {"table": OTHER.table}
        assert await asyncio.to_thread(policy.update_weights_from_tensors, source) == 1
        found = [await first, *[each async for each in samples]]
        assert sorted(number for number, _ in found) == [0, 1]
        for _, each in found:
            [ids], [versions] = each["output_ids"].tolist(), each["weights_versions"].tolist()
            assert set(versions) == {-1, 0, 1}
            for place in range(versions.index(0), len(ids)):
                wanted = float(of[versions[place]].row(ids[:place])[ids[place]])
                assert float(each["logprobs"][0, place]) == pytest.approx(wanted, abs=1e-5)
    with pytest.raises(InvalidRequest, match="pending"):
        NemoGeneration(lm, config, pending="go on")  # type: ignore[arg-type]


def test_a_refit_that_fails_is_abandoned_and_raises() -> None:
    config = CONFIG | {"stop_token_ids": None, "_pad_token_id": 0}
    with genrt.load(engine=ReceivingEngine, restart="auto") as lm:
        policy = NemoGeneration(lm, config)
        policy.prepare_refit_info(INFO)
        with pytest.raises(genrt.errors.EngineDied, match="could not be replaced"):
            policy.update_weights_from_collective()  # the stub finds no table
        found = policy.generate(batch_of([[1, 2]], pad=0))
        assert found["weights_versions"].amax(1).tolist() == [0]
    with genrt.load(MODEL, engine="exact") as lm:
        policy = NemoGeneration(lm, CONFIG)
        policy.prepare_refit_info(INFO)
        with pytest.raises(EngineUnsupported, match=r"lm\.update_weights"):
            policy.update_weights_from_collective()


def test_an_interrupted_refit_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two parts of it, where nothing else would end it."""
    config = CONFIG | {"stop_token_ids": None, "_pad_token_id": 0}

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with genrt.load(engine=ReceivingEngine) as lm:
        policy, before = NemoGeneration(lm, config), lm.next_token_logprobs_sync([1])
        policy.prepare_refit_info(INFO)
        monkeypatch.setattr(WeightSyncClient, "update_weights", interrupt)
        with pytest.raises(KeyboardInterrupt):
            policy.update_weights_from_collective()
        lm.clear_cache()
        assert torch.equal(lm.next_token_logprobs_sync([1], timeout=60), before)
        assert lm.weights_version == 0


# -- vLLM ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sending_backend() -> str:
    """A backend of vLLM's weight transfer with the messages of NCCL's, without a GPU."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    class Sending(WeightTransferEngine):  # type: ignore[misc]
        init_info_cls, update_info_cls = NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo

        def parse_update_info(self, info: dict[str, Any]) -> Any:
            kind = IPCWeightTransferUpdateInfo if "ipc_handles" in info else self.update_info_cls
            return kind(**info)

        def init_transfer_engine(self, init_info: Any) -> None:
            SENT["init"] = init_info

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        @torch.no_grad()
        def receive_weights(self, update_info: Any) -> None:
            for name, shape, dtype in zip(
                update_info.names, update_info.shapes, update_info.dtype_names, strict=True
            ):
                tensor = SENT["tensors"][name]
                assert [*tensor.shape] == shape
                assert tensor.dtype == getattr(torch, dtype)
                self.model.load_weights([(name, tensor)])

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None: ...

    WeightTransferEngineFactory.register_engine("sending", Sending)
    return "sending"


SENT: dict[str, Any] = {}
"""The messages and the tensors of a trainer."""


@pytest.mark.vllm
async def test_vllm_passes_the_cases_of_the_reference(
    llama: Path, tmp_path: Path, sending_backend: str
) -> None:
    from safetensors.torch import load_file

    from tests.small_models import make_llama

    options = {"weight_transfer_config": {"backend": sending_backend}, "max_model_len": 64}
    with genrt.load(llama, engine_options=options) as lm:
        end = lm.tokenizer.eos_token_id
        config = CONFIG | {
            "_pad_token_id": end,
            "stop_token_ids": [end],
            "vllm_cfg": {"max_model_len": 64},
        }
        policy = NemoGeneration(lm, config)
        prompts = ["Hello, my name is", "The capital of France is"]
        data = batch_of([lm.encode(each) for each in prompts], pad=end, width=20)
        greedy = policy.generate(data, greedy=True)
        check_output(greedy, data, pad=end)
        drawn = policy.generate(data)
        check_output(drawn, data, pad=end)
        for row in range(2):
            first, last = (
                int(data["input_lengths"][row]),
                int(drawn["unpadded_sequence_lengths"][row]),
            )
            ids = drawn["output_ids"][row, :last].tolist()
            scores = lm.score_sync(ids[:first], ids[first:])
            assert torch.allclose(drawn["logprobs"][row, first:last], scores, atol=1e-4)
        single = {n: each async for n, each in policy.generate_async(data, greedy=True)}
        for name, each in joined([single[0], single[1]], end).items():
            whole = greedy[name]
            assert torch.allclose(each, whole[:, : each.shape[1]] if each.ndim == 2 else whole)

        # A text of the first prompt stops at its third token, or at its first character.
        start = int(data["input_lengths"][0])
        *before, third = greedy["output_ids"][0, start : start + 3].tolist()
        assert third not in before
        stopping = NemoGeneration(lm, config | {"stop_token_ids": [third]})
        found = stopping.generate(data, greedy=True)
        assert found["generation_lengths"][0] == 3
        assert not found["truncated"][0]
        texts = policy.generate_text({"prompts": prompts}, greedy=True)["texts"]
        stop = texts[0][0]
        by_string = NemoGeneration(lm, config | {"stop_strings": [stop]})
        for asked in ({}, {"stop_strings": [[stop], None]}):
            again = by_string.generate({**data, **asked}, greedy=True)
            assert again["generation_lengths"][0] < greedy["generation_lengths"][0]
            assert not again["truncated"][0]
        stopped = by_string.generate_text({"prompts": prompts}, greedy=True)["texts"]
        assert stopped[0] == stop
        assert texts[1].startswith(stopped[1])

        # A refit: the same prefixes have the log-probabilities of the new weights.
        other = make_llama(tmp_path / "model", seed=7)
        SENT["tensors"] = load_file(other / "model.safetensors")
        policy.prepare_refit_info(
            {name: (each.shape, each.dtype) for name, each in SENT["tensors"].items()}
        )
        policy.init_collective("127.0.0.1", 29500, 2, train_world_size=1)
        assert (SENT["init"].rank_offset, SENT["init"].packed) == (1, True)
        old = policy.generate(data, greedy=True)["logprobs"]
        assert torch.allclose(old, greedy["logprobs"], atol=1e-5)
        policy.update_weights_from_collective()
        after = policy.generate(data, greedy=True)
        assert after["weights_versions"].amax(1).tolist() == [1, 1]
        law = lm.next_token_logprobs_sync(data["input_ids"][0, :start].tolist())
        assert float(after["logprobs"][0, start]) == pytest.approx(float(law.max()), abs=1e-4)
        assert abs(float(after["logprobs"][0, start] - old[0, start])) > 1e-3
        policy.update_weights_from_ipc_handles({name: {} for name in SENT["tensors"]})
        assert lm.weights_version == 2
        assert policy.update_weights_from_tensors(SENT["tensors"]) == 3
        assert policy.shutdown()
