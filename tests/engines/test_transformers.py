"""The transformers engine against plain forwards of transformers and peft, one context at a time."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from genrt.engines.transformers import TransformersEngine, open_transformers
from genrt.errors import (
    EngineNotInstalled,
    EngineUnsupported,
    GenrtError,
    InvalidAdapter,
    InvalidRequest,
    ModelNotFound,
)
from genrt.questions.arguments import Adapter
from genrt.questions.request import Request, Result
from genrt.questions.rows import LogprobsRequest
from genrt.testing import check_engine
from tests.small_models import make_llama, make_lora

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def loras(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [make_lora(tmp_path_factory.mktemp("lora"), llama, seed=seed) for seed in (1, 2)]


@pytest.fixture
def engine(llama: Path) -> Iterator[TransformersEngine]:
    opened = open_transformers(llama, options={"max_batch_size": 8})
    yield opened
    opened.close()


def contexts(*lengths: int, vocab_size: int = 320) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(0)
    return [
        tuple(torch.randint(vocab_size, (length,), generator=generator).tolist())
        for length in lengths
    ]


def ask(engine: TransformersEngine, requests: list[Request]) -> list[Result | GenrtError | None]:
    engine.submit(requests)
    ends: dict[Request, Result | GenrtError | None] = {}
    while len(ends) < len(requests):
        ends |= {end.request: end.error or end.result for end in engine.step()}
    return [ends[request] for request in requests]


def rows_of(
    engine: TransformersEngine, asked: list[tuple[int, ...]], adapter: Adapter | None = None
) -> list[Tensor]:
    rows = ask(engine, [LogprobsRequest(context, adapter) for context in asked])
    assert all(isinstance(row, Tensor) for row in rows)
    return [row for row in rows if isinstance(row, Tensor)]


def plain_row(network: Any, context: tuple[int, ...]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = network(input_ids=torch.tensor([context])).logits
    return logits[0, -1].float().log_softmax(-1)


def plain_network(path: Path, lora: Path | None = None) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(path)
    return (network if lora is None else PeftModel.from_pretrained(network, lora)).eval()


def expect_close(rows: list[Tensor], wanted: list[Tensor]) -> None:
    for row, other in zip(rows, wanted, strict=True):
        torch.testing.assert_close(row, other, atol=TOLERANCE, rtol=0.0)


def test_the_engine_keeps_the_protocol(llama: Path, loras: list[Path]) -> None:
    check_engine(
        lambda: open_transformers(llama, options={"max_batch_size": 8}), adapter_paths=loras
    )


def test_rows_of_mixed_lengths_are_those_of_plain_forwards(
    llama: Path, engine: TransformersEngine
) -> None:
    asked = contexts(1, 2, 3, 17, 64, 200, 512, 5, 1, 33)
    network = plain_network(llama)
    expect_close(rows_of(engine, asked), [plain_row(network, context) for context in asked])


def small_gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=90, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    )


def small_gemma2() -> Any:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=90,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            sliding_window=8,
            final_logit_softcapping=0.05,
            max_position_embeddings=64,
        )
    )


@pytest.mark.parametrize("make", [small_gpt2, small_gemma2], ids=["learned positions", "soft cap"])
def test_other_architectures_compute_their_own_logits(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    network = make().eval()
    asked = contexts(1, 4, 9, 30, 64, vocab_size=90)
    wanted = [plain_row(network, context) for context in asked]
    engine = TransformersEngine(network)
    assert (engine.vocab_size, engine.max_model_len) == (90, 64)
    expect_close(rows_of(engine, asked), wanted)


def test_the_head_sees_the_last_positions_alone(llama: Path) -> None:
    network = plain_network(llama)
    engine = TransformersEngine(network)
    shapes: list[torch.Size] = []
    network.lm_head.register_forward_hook(lambda _module, _inputs, out: shapes.append(out.shape))
    rows_of(engine, contexts(3, 50, 7, 50))
    assert shapes == [(4, 3, 320)]


@pytest.mark.promise(number=24)
def test_a_network_that_computes_all_logits_or_takes_no_such_option_is_refused(llama: Path) -> None:
    network = plain_network(llama)
    forward = network.forward
    for other, message in (
        (lambda logits_to_keep, **inputs: forward(**inputs), "ignores logits_to_keep"),
        (lambda input_ids, attention_mask, use_cache: None, "unexpected keyword argument"),
    ):
        network.forward = other
        with pytest.raises(EngineUnsupported, match=message):
            TransformersEngine(network)


def test_adapters_give_the_rows_of_peft_and_leave_the_base_alone(
    llama: Path, loras: list[Path], engine: TransformersEngine
) -> None:
    asked = contexts(1, 6, 40)
    bound = [Adapter("a.b/c", 1), Adapter("a.b/c", 2)]
    for adapter, path in zip(bound, loras, strict=True):
        engine.add_adapter(adapter, path)
    mixed: list[Request] = [LogprobsRequest(c, who) for c in asked for who in (None, *bound)]
    found = ask(engine, mixed)
    for index, lora in enumerate([None, *loras]):
        network = plain_network(llama, lora)
        rows = [row for row in found[index::3] if isinstance(row, Tensor)]
        expect_close(rows, [plain_row(network, context) for context in asked])


def test_removed_adapters_leave_nothing_behind(llama: Path, loras: list[Path]) -> None:
    network = plain_network(llama)
    engine = TransformersEngine(network)
    names = {name for name, _ in network.named_parameters() if "lora" in name}
    for version in (1, 2):
        for index, path in enumerate(loras):
            engine.add_adapter(Adapter(str(index), version), path)
        for index in range(len(loras)):
            engine.remove_adapter(Adapter(str(index), version))
    assert {name for name, _ in network.named_parameters() if "lora" in name} == names == set()


def damaged(source: Path, target: Path, **changes: Any) -> Path:
    """A copy of an adapter with a changed configuration."""
    shutil.copytree(source, target)
    config = target / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    return target


@pytest.mark.filterwarnings("ignore:Unexpected keyword arguments")
def test_adapters_that_do_not_fit_are_refused_and_change_nothing(
    loras: list[Path], tmp_path: Path, engine: TransformersEngine
) -> None:
    other = make_llama(tmp_path / "other", hidden_size=32, layers=3)
    fewer = damaged(loras[0], tmp_path / "fewer")
    weights = load_file(fewer / "adapter_model.safetensors")
    save_file(dict(list(weights.items())[:-2]), fewer / "adapter_model.safetensors")
    pickled = damaged(loras[0], tmp_path / "pickled")
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    torn = damaged(loras[0], tmp_path / "torn")
    (torn / "adapter_model.safetensors").write_bytes(b"torn")
    wrong = [
        make_lora(tmp_path / "other model", other, seed=1),
        damaged(loras[0], tmp_path / "rank", r=4),
        damaged(loras[0], tmp_path / "nothing", target_modules=["no_such_module"]),
        damaged(loras[0], tmp_path / "kind", peft_type="IA3"),
        damaged(loras[0], tmp_path / "saved", modules_to_save=["lm_head"]),
        damaged(loras[0], tmp_path / "bias", bias="all"),
        damaged(loras[0], tmp_path / "start", init_lora_weights="pissa"),
        fewer,
        pickled,
        torn,
        tmp_path / "nowhere",
    ]
    asked = contexts(1, 9)
    before = rows_of(engine, asked)
    for path in wrong:
        with pytest.raises(InvalidAdapter, match=path.name):
            engine.add_adapter(Adapter("a", 1), path)
        expect_close(rows_of(engine, asked), before)
    engine.add_adapter(Adapter("a", 1), loras[0])
    with pytest.raises(InvalidAdapter, match="already"):
        engine.add_adapter(Adapter("a", 1), loras[0])
    fitting = rows_of(engine, asked, Adapter("a", 1))
    assert not torch.allclose(fitting[0], before[0], atol=0.1)


def test_missing_packages_are_named_with_what_to_install(
    llama: Path, loras: list[Path], engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [each for each in sys.modules if each.split(".")[0] in ("peft", "transformers")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(EngineNotInstalled, match=r"genrt\[adapters\]"):
        engine.add_adapter(Adapter("a", 1), loras[0])
    with pytest.raises(EngineNotInstalled, match="pip install transformers"):
        open_transformers(llama, options={})


@pytest.mark.promise(number=25)
def test_missing_checkpoints_are_not_found(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    pickled = tmp_path / "pickled"
    shutil.copytree(llama, pickled)
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    for path in (tmp_path / "nowhere", tmp_path / "empty", pickled):
        with pytest.raises(ModelNotFound, match=path.name):
            open_transformers(path, options={})


@pytest.mark.promise(number=25)
def test_code_that_comes_with_a_model_is_not_run(llama: Path, tmp_path: Path) -> None:
    evil = tmp_path / "evil"
    shutil.copytree(llama, evil)
    (evil / "modeling_evil.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass EvilModel: pass\n"
    )
    config = json.loads((evil / "config.json").read_text())
    config["model_type"] = "evil"
    config["auto_map"] = {
        "AutoConfig": "modeling_evil.EvilConfig",
        "AutoModelForCausalLM": "modeling_evil.EvilModel",
    }
    (evil / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineUnsupported, match="trust_remote_code"):
        open_transformers(evil, options={})
    assert not (tmp_path / "ran").exists()


def test_options_are_the_engines_or_from_pretrained_s(llama: Path) -> None:
    options = {"max_batch_size": 3, "max_model_len": 20, "dtype": "bfloat16"}
    given = dict(options)
    engine = open_transformers(str(llama), options=options)
    assert (engine.max_batch_size, engine.max_model_len, options) == (3, 20, given)
    [row] = rows_of(engine, [(1, 2, 3)])
    assert row.dtype == torch.float32
    rounding = (row - plain_row(plain_network(llama), (1, 2, 3))).abs().max()
    assert TOLERANCE < rounding < 1.0


@pytest.mark.parametrize(
    "options", [{"use_safetensors": False}, {"max_model_len": 513}, {"max_batch_size": 0}]
)
def test_options_that_cannot_be_are_refused(llama: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(options))):
        open_transformers(llama, options=options)


def test_the_tokenizer_is_the_checkpoints(engine: TransformersEngine, tmp_path: Path) -> None:
    text = "The capital of Zwölf is 東京."
    assert engine.tokenizer.decode(engine.tokenizer.encode(text)) == text
    bare = open_transformers(make_llama(tmp_path / "bare", tokenizer=False), options={})
    assert bare.tokenizer is None
