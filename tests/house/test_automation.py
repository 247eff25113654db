"""Workflows, issue forms, hooks and containers parse, and name targets, paths and extras that exist."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

import genrt

ROOT = Path(__file__).resolve().parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted((GITHUB / "ISSUE_TEMPLATE").glob("[!c]*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
PRODUCED = {"site", "dist"}
"""Folders that targets of the Makefile write."""
WRITES = {"docs": {"pages", "id-token"}, "release": {"id-token"}}
"""The rights to write that a workflow's last job may have."""


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def jobs_of(workflow: Path) -> dict[str, dict[str, Any]]:
    jobs: dict[str, dict[str, Any]] = read(workflow)["jobs"]
    return jobs


def steps_of(workflow: Path) -> Iterator[dict[str, Any]]:
    for job in jobs_of(workflow).values():
        yield from job.get("steps", ())


def targets_of(commands: str) -> list[str]:
    """The targets of every call of make in these commands."""
    calls = re.findall(r"\bmake ((?:[a-z]+ ?)+)", commands)
    return [target for call in calls for target in call.split()]


def paths_of(workflow: Path) -> Iterator[str]:
    """The paths that a workflow names: for its actions, its caches and pip."""
    text = workflow.read_text(encoding="utf-8")
    yield from re.findall(r"github\.workspace \}\}/(\S+)", text)
    yield from re.findall(r"uses: \./(\S+)", text)
    yield from re.findall(r"^ +(?:path|cache-dependency-path): (\S+)", text, re.M)


def commands_of(workflow: Path) -> str:
    return "\n".join(step.get("run", "") for step in steps_of(workflow))


def test_there_are_workflows_and_forms() -> None:
    assert [path.stem for path in WORKFLOWS] == ["docs", "release", "test"]
    assert [path.stem for path in FORMS] == ["bug", "feature", "question"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_names_what_exists(workflow: Path) -> None:
    assert read(workflow)["name"] == workflow.stem
    assert set(targets_of(commands_of(workflow))) <= TARGETS
    missing = {path for path in paths_of(workflow) if not (ROOT / path).exists()}
    assert missing <= PRODUCED
    for job in jobs_of(workflow).values():
        needs = job.get("needs", [])
        assert {needs} if isinstance(needs, str) else set(needs) <= jobs_of(workflow).keys()


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_few_rights_and_ends(workflow: Path) -> None:
    assert read(workflow)["permissions"] == {"contents": "read"}
    *others, last = jobs_of(workflow).values()
    assert not any("permissions" in job for job in others)
    assert last.get("permissions", {}).keys() == WRITES.get(workflow.stem, set())
    assert all("timeout-minutes" in job or "uses" in job for job in (*others, last))
    assert "${{" not in commands_of(workflow)  # it would run text that strangers write
    actions = [step["uses"] for step in steps_of(workflow) if "uses" in step]
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[\w/.]+", action) for action in actions)


def test_the_tests_of_the_workflow_are_those_of_ci() -> None:
    [listed] = re.findall(r"^for command in (.*);", (ROOT / ".ci/run").read_text("utf-8"), re.M)
    workflow = GITHUB / "workflows/test.yml"
    assert targets_of(commands_of(workflow)) == listed.split()
    pythons = jobs_of(workflow)["test"]["strategy"]["matrix"]["python"]
    prefix = "Programming Language :: Python :: "
    classified = [each.removeprefix(prefix) for each in PROJECT["classifiers"] if prefix in each]
    assert pythons == [each for each in classified if "." in each]


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_has_the_parts_that_forms_need(form: Path) -> None:
    found = read(form)
    assert {"name", "description", "body"} <= found.keys()
    for part in found["body"]:
        needed = "value" if part["type"] == "markdown" else "label"
        assert part["attributes"][needed]
    named = re.findall(r"[\w/]+\.md\b", form.read_text(encoding="utf-8"))
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_hooks_run_the_tools_of_the_environment() -> None:
    tools = {re.split(r"[^\w-]", each)[0] for each in PROJECT["optional-dependencies"]["test"]}
    assert "pre-commit" in tools
    for repository in read(ROOT / ".pre-commit-config.yaml")["repos"]:
        for hook in repository["hooks"]:
            assert hook["entry"].split()[0].removeprefix(".venv/bin/") in tools


def test_the_version_is_the_same_everywhere() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["version"] == PROJECT["version"] == genrt.__version__
    assert citation["license"] == PROJECT["license"]
    assert citation["abstract"] == PROJECT["description"]


def test_the_lock_names_one_version_of_each_package_and_no_place() -> None:
    lines = (ROOT / "requirements/ci.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.!]+", line)] == []
    names = {re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in lines}
    assert len(names) == len(lines)
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *extras["cpu"], *extras["test"]]
    needed = {re.split(r"[^\w-]", each)[0].lower() for each in wanted} - {"genrt"}
    assert needed <= names


def stages_of_the_dockerfile() -> dict[str, str]:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    stages = re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM|\Z)", text, re.M | re.S)
    return dict(stages)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_container_serves_without_rights_and_keeps_its_cache(target: str) -> None:
    stages = stages_of_the_dockerfile()
    stage = stages[target]
    assert re.findall(r"^USER (\S+)", stage, re.M) == ["genrt"]
    [volume] = re.findall(r"^VOLUME (\S+)", stage, re.M)
    assert f"HF_HOME={volume}/" in stage
    entry = json.loads(re.findall(r"^ENTRYPOINT (.*)", stage, re.M)[0])
    assert entry[:2] == ["genrt", "serve"]
    extras = re.findall(r"/src\[([\w,]+)\]", stages[f"{target}-install"])[0].split(",")
    assert extras == [target, "serve"]
    assert set(extras) <= PROJECT["optional-dependencies"].keys()


def test_a_container_is_built_from_the_files_that_the_build_needs() -> None:
    text = (ROOT / ".dockerignore").read_text(encoding="utf-8")
    kept = re.findall(r"^!(.*)", text, re.M)
    assert [path for path in kept if not (ROOT / path).exists()] == []
    needed = {"pyproject.toml", PROJECT["readme"], *PROJECT["license-files"], "genrt"}
    assert needed <= set(kept)
    ignored = [line for line in text.splitlines() if line and line[0] not in "!#*"]
    assert not any(fnmatch(path, pattern) for path in kept for pattern in ignored)


def test_the_development_container_sets_up_by_the_makefile() -> None:
    text = (ROOT / ".devcontainer/devcontainer.json").read_text(encoding="utf-8")
    assert set(targets_of(json.loads(text)["postCreateCommand"])) == {"setup"}
