"""The demo: what it prints is what inference found, and errors are one line."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from genrt.__main__ import main
from genrt.engines.exact import NGram

PATTERN = "(a|b){2,4}"
MODEL = NGram.random([b"a", b"b", b"\x1b[2J", b""], seed=5, eos_token_id=3)


@pytest.fixture
def model(tmp_path: Path) -> str:
    MODEL.save(tmp_path / "model")
    return str(tmp_path / "model")


def run(*options: str) -> int:
    return main(["demo", *options])


def run_exact(model: str, *options: str) -> int:
    return run(
        "--engine", "exact", "--model", model, "--prompt", "a", "--max-tokens", "5", *options
    )


def printed_posterior(out: str) -> dict[str, float]:
    return {text: float(weight) for weight, text in re.findall(r"(?m)^ +(\d\.\d{4})  (.*)$", out)}


def figure(out: str, name: str) -> float:
    found = re.search(rf"(?m)^{name} +(\S+)  ", out)
    if found is None:
        raise LookupError(f"no {name} in\n{out}")
    return float(found[1].replace(",", ""))


def test_the_table_is_the_posterior(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_exact(model, "--pattern", PATTERN, "--particles", "2000") == 0
    out = capsys.readouterr().out
    law: dict[str, float] = {}
    for token_ids, logprob in MODEL.enumerate(MODEL.tokenizer.encode("a"), 5):
        text = MODEL.tokenizer.decode(token_ids)
        if re.fullmatch(PATTERN, text):
            law[text] = law.get(text, 0.0) + math.exp(logprob)
    evidence = sum(law.values())
    posterior = printed_posterior(out)
    assert sum(posterior.values()) == pytest.approx(1, abs=0.01)
    assert figure(out, "log evidence") == pytest.approx(math.log(evidence), abs=0.2)
    # Five standard errors at ESS >= 500, and the rounding.
    assert figure(out, "ESS") > 500
    for text, weight in posterior.items():
        if not text.startswith("("):
            assert weight == pytest.approx(law[text] / evidence, abs=5 * 0.5 / 500**0.5)


def test_the_runtimes_figures_add_up(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_exact(model, "--pattern", PATTERN, "--particles", "50") == 0
    captured = capsys.readouterr()
    asked, joined, hits, draws, rows = (
        figure(captured.out, name)
        for name in ("questions", "deduplicated", "cache hits", "draws", "engine rows")
    )
    assert asked == joined + hits + draws
    assert 50 <= asked <= 250
    assert rows <= 1 + 2 + 4 + 8 + 16
    assert 1 <= figure(captured.out, "engine steps") <= 5
    assert re.search(r"going=\d+/50, ESS=\d", captured.err)
    assert "Loading" in captured.err


def test_a_run_in_which_all_particles_die_says_so(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_exact(model, "--pattern", "a{9}", "--particles", "4") == 0
    out = capsys.readouterr().out
    assert "Every particle died" in out
    assert figure(out, "log evidence") == -math.inf


def test_control_characters_do_not_reach_the_terminal(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_exact(model, "--pattern", r"(a|\x1b\[2J)+", "--particles", "50") == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert r"\x1b[2J" in "".join(printed_posterior(out))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--pattern", "a", "--max-tokens", "5000"), "max_model_len|context"),
        (("--pattern", "a", "--prompt", "?"), "spell"),
        (("--pattern", "a", "--model", "/nowhere/at/all"), "/nowhere/at/all"),
    ],
)
def test_errors_are_one_line(
    model: str, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    assert run_exact(model, *options) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = [line for line in captured.err.splitlines() if line.startswith("genrt demo: ")]
    assert re.search(message, line)
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--pattern", "("), "unterminated subpattern"),
        (("--particles", "0"), "--particles is 0"),
        (("--max-tokens", "-3"), "--max-tokens is -3"),
        (("--seed", "-1"), "--seed is -1"),
        (("--prompt", ""), "--prompt is empty"),
        (("--engine", "exact"), "--engine exact has no model of its own: give --model"),
        (("--replicas", "0"), "replicas must be from 1"),
        (("--cluster", "auto"), "say how many with replicas=…"),
    ],
)
def test_mistakes_are_told_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    assert run(*options) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    assert line.startswith("genrt demo: ")
    assert message in line
