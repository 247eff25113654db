"""What a runtime on vLLM loads, listens on, and lets out: safetensors alone, the loopback interface
alone, and no prompt."""

from __future__ import annotations

import ipaddress
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import genrt
from genrt.errors import InvalidRequest, ModelNotFound
from tests import children

pytestmark = [pytest.mark.vllm, pytest.mark.promise(number=25)]


# -- what it loads --------------------------------------------------------------------------------


@pytest.fixture
def pickled(llama: Path, tmp_path: Path) -> Path:
    """A checkpoint that is right in all but the form of its weights."""
    checkpoint = tmp_path / "pickled"
    shutil.copytree(llama, checkpoint)
    torch.save(load_file(checkpoint / "model.safetensors"), checkpoint / "pytorch_model.bin")
    (checkpoint / "model.safetensors").unlink()
    return checkpoint


@pytest.mark.parametrize("load_format", [None, "auto", "hf"])
def test_pickled_weights_are_not_found(pickled: Path, load_format: str | None) -> None:
    options = {} if load_format is None else {"load_format": load_format}
    with pytest.raises(ModelNotFound, match="not loaded: convert them"):
        genrt.load(pickled, engine_options=options)


@pytest.mark.parametrize("load_format", ["pt", "npcache"])
def test_formats_that_unpickle_are_refused(pickled: Path, load_format: str) -> None:
    with pytest.raises(InvalidRequest, match="can run code"):
        genrt.load(pickled, engine_options={"load_format": load_format})


def test_code_in_a_checkpoint_is_not_run_by_vllm(llama: Path, tmp_path: Path) -> None:
    evil, ran = tmp_path / "evil", tmp_path / "ran"
    shutil.copytree(llama, evil)
    (evil / "configuration_evil.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    config = json.loads((evil / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_evil.EvilConfig"}
    config["model_type"] = "evil"
    (evil / "config.json").write_text(json.dumps(config))
    with pytest.raises(genrt.GenrtError, match=r"trust_remote_code|evil"):
        genrt.load(evil, engine_options={"max_num_seqs": 4})
    assert not ran.exists()


# -- what it listens on ---------------------------------------------------------------------------

LISTENS = """
import json, os
os.environ.pop("GLOO_SOCKET_IFNAME", None)
from torch.distributed import distributed_c10d
import genrt

told = []
class Told(distributed_c10d.ProcessGroupGloo):
    def __init__(self, *arguments, **options):
        told.append(os.environ.get("GLOO_SOCKET_IFNAME"))
        super().__init__(*arguments, **options)
distributed_c10d.ProcessGroupGloo = Told

before = dict(os.environ)
options = {"dtype": "float32", "max_num_seqs": 8, "kv_cache_memory_bytes": 2**24}
lm = genrt.load(model, engine_options=options)
lm.next_token_logprobs_sync([1, 2])
mine = {os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if entry.is_symlink()}
listening = []
for kind, state in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
    with open(f"/proc/self/net/{kind}") as table:
        for line in table.readlines()[1:]:
            fields = line.split()
            if fields[3] == state and f"socket:[{fields[9]}]" in mine:
                listening.append(fields[1].split(":")[0])
print("found:", json.dumps([told, listening, os.environ.get("GLOO_SOCKET_IFNAME")]))
"""


def address(hexadecimal: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """As ``/proc/net`` writes them: words of 32 bits in this machine's order, which is little-endian."""
    packed = bytes.fromhex(hexadecimal)
    words = [packed[start : start + 4][::-1] for start in range(0, len(packed), 4)]
    return ipaddress.ip_address(b"".join(words))


# -- what it lets out -----------------------------------------------------------------------------

SECRET = "the patient's name is"
PROMPT = [300 - 7 * n % 211 for n in range(60)]
"""Sixty different token ids of three digits, by which a part of the prompt is known anywhere."""

TELLS = """
import asyncio, json, logging, os, traceback
import vllm.logger
os.environ["VLLM_LOGGING_LEVEL"] = "DEBUG"
vllm.logger._configure_vllm_root_logger()
logging.basicConfig(level=logging.DEBUG)
import genrt
from genrt.questions.rows import LogprobsRequest
from genrt.questions.completions import SampleRequest
from genrt.engines.vllm.capture import RowStore
from tests.inside import core_of, engine_of

options = {"dtype": "float32", "max_num_seqs": 8, "kv_cache_memory_bytes": 2**24}
lm = genrt.load(model, engine_options=options)
engine = engine_of(lm)
runner = core_of(engine).model_executor.driver_worker.worker.model_runner
errors = []

def attempt(call):
    try:
        call()
    except Exception as error:
        errors.append(type(error).__name__)
        traceback.print_exception(error)
        print(repr(error), error.args)

def failing(place, name, replacement, call):
    original = getattr(place, name)
    setattr(place, name, replacement)
    attempt(call)
    setattr(place, name, original)

def fails(*_, **__):
    raise RuntimeError("scripted failure")

put = RowStore.put
poison = lambda store, tickets, logits: put(store, tickets, logits * float("nan"))
ask = lambda *more: lm.next_token_logprobs_sync([*prompt, *more])

ask()
lm.sample_sync(prompt, max_tokens=3)
lm.draw_sync(prompt, mask=[1, 2])
attempt(lambda: ask(-1))
attempt(lambda: ask(10**6))
attempt(lambda: ask("x"))
attempt(lambda: ask(*prompt * 20))
attempt(lambda: lm.sample_sync(prompt, max_tokens=10**6))
attempt(lambda: lm.sample_sync(prompt, max_tokens=2, min_p=2.0))
attempt(lambda: lm.next_token_logprobs_sync(prompt, adapter="unheard of"))
attempt(lambda: lm.next_token_logprobs_sync(secret))
attempt(lambda: lm.batch_next_token_logprobs_sync(secret))
attempt(lambda: lm.batch_next_token_logprobs_sync([secret]))
attempt(lambda: lm.decode(secret))
attempt(lambda: lm.encode([secret]))
failing(runner, "_model_forward", fails, lambda: ask(1))
failing(runner, "_model_forward", fails, lambda: lm.sample_sync(prompt, max_tokens=2))
failing(RowStore, "put", poison, lambda: ask(2))

async def pending():
    tasks = [asyncio.create_task(lm.sample(prompt, max_tokens=50)) for _ in range(3)]
    await asyncio.sleep(0)
    print(lm, lm.statistics(), tasks)
    lm.close()
    for end in await asyncio.gather(*tasks, return_exceptions=True):
        print(repr(end))

for request in (LogprobsRequest(prompt), SampleRequest(tuple(prompt), max_tokens=2)):
    print(request, [request])
asyncio.run(pending())
attempt(ask)
print("found:", json.dumps(errors))
"""


@pytest.fixture(scope="module")
def ends(llama: Path) -> dict[str, children.End]:
    programs = {"listens": LISTENS, "tells": TELLS}
    return children.run(programs, model=str(llama), prompt=PROMPT, secret=SECRET)


def found_by(end: children.End) -> list[Any]:
    """What a program found, between the lines that vLLM writes."""
    [line] = [line for line in end.out.splitlines() if line.startswith("found: ")]
    found: list[Any] = json.loads(line.removeprefix("found: "))
    return found


def parts_of_the_prompt(text: str) -> list[str]:
    """Three neighbouring tokens of it, however they are separated: what no one needs to see."""
    numbers = re.findall(r"\d+", text)
    triples = set(zip(numbers, numbers[1:], numbers[2:], strict=False))
    prompt = list(map(str, PROMPT))
    found = triples & set(zip(prompt, prompt[1:], prompt[2:], strict=False))
    return [" ".join(triple) for triple in found] + [SECRET] * (SECRET in text)


@pytest.mark.proof
def test_nothing_listens_on_a_network(ends: dict[str, children.End]) -> None:
    """Gloo, which looks for the address of the machine's name first, was told to take the loopback."""
    assert ends["listens"].status == 0, ends["listens"].err
    told, listening, afterwards = found_by(ends["listens"])
    assert set(told) == {"lo"}
    assert afterwards is None
    assert [each for each in listening if not address(each).is_loopback] == []


@pytest.mark.proof
def test_no_prompt_is_in_a_log_or_an_error(ends: dict[str, children.End]) -> None:
    end = ends["tells"]
    assert end.status == 0, end.err
    assert found_by(end) == [
        *["InvalidRequest"] * 3,
        *["ContextTooLong"] * 2,
        "InvalidRequest",
        "UnknownAdapter",
        *["InvalidRequest"] * 5,
        *["EngineFailed"] * 2,
        "NotFinite",
        "Closed",
    ]
    assert " DEBUG " in end.out, "vLLM logs all that it ever does"
    assert "[… 58 tokens, " in end.out
    assert parts_of_the_prompt(end.out) == []
    assert parts_of_the_prompt(end.err) == []
