"""The documentation is right: its commands run, its examples work, and what it names exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import queries
from deploy.composed import REPOSITORY, Composed
from gateway import settings
from gateway.policies import RequestFeatures
from workers.settings import read_settings

DOCS = sorted((REPOSITORY / "docs").glob("*.md"))
PAGES = [*(REPOSITORY / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")), *DOCS]
GITHUB = REPOSITORY / ".github"
SCHEMAS = {
    GITHUB / "workflows" / "ci.yml": "vendor.github-workflows",
    GITHUB / "ISSUE_TEMPLATE" / "bug.yml": "vendor.github-issue-forms",
    GITHUB / "ISSUE_TEMPLATE" / "feature.yml": "vendor.github-issue-forms",
    GITHUB / "ISSUE_TEMPLATE" / "config.yml": "vendor.github-issue-config",
}
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDS = {"docker", "kubectl", "linux", "worker"}  # what a command needs and a test does not have
WORD = re.compile(r"\w+")
TOP = {path.name for path in REPOSITORY.iterdir()}


@dataclass(frozen=True)
class Block:
    """A fenced block. `kind` are the words after its opening fence."""

    where: str
    kind: tuple[str, ...]
    text: str


BLOCKS = [
    Block(f"{doc.stem}-{number}", tuple(found[1].split()), found[2])
    for doc in DOCS
    for number, found in enumerate(FENCE.finditer(doc.read_text()), start=1)
]


def of(*kind: str) -> pytest.MarkDecorator:
    blocks = [block for block in BLOCKS if block.kind[: len(kind)] == kind]
    return pytest.mark.parametrize("block", blocks, ids=lambda block: block.where)


def test_every_block_has_a_checked_kind() -> None:
    known = {("text",), ("python",), ("yaml", "kvrelay"), ("sh", "run"), *(("sh", need) for need in NEEDS)}
    assert {block.kind for block in BLOCKS} <= known


@of("sh")
def test_commands_are_well_formed(block: Block) -> None:
    checked = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    for line in block.text.replace("\\\n", " ").splitlines():
        if line.startswith("kvrelay "):
            assert line.split()[1] in {"--help", *commands()}, f"there is no {line!r}"


def documented_commands() -> dict[str, set[str]]:
    """Return the `kvrelay` commands in fenced blocks of README and docs, with their options."""
    found: dict[str, set[str]] = {}
    for doc in (REPOSITORY / "README.md", *DOCS):
        for block in FENCE.finditer(doc.read_text()):
            for line in block[2].replace("\\\n", " ").splitlines():
                words = line.partition("#")[0].removeprefix(".venv/bin/").split()
                if words[:1] == ["kvrelay"] and words[1] != "--help":
                    options = {word.partition("=")[0] for word in words if word.startswith("--")}
                    found.setdefault(words[1], set()).update(options)
    return found


@pytest.mark.parametrize("command", sorted(documented_commands()))
def test_documented_options_exist(command: str) -> None:
    """In the source of the command's package: asking the command for its help would load torch."""
    package = REPOSITORY / commands()[command].partition(".")[0]
    sources = [path.read_text() for path in package.glob("commands/*.py")]
    known = set(re.findall(r'"(--[a-z][a-z0-9-]*)"', "".join(sources)))
    if command == "fit":  # which derives options from the fields of its settings
        names = re.findall(r"^    (\w+): .+ = _option\(", (package / "settings.py").read_text(), re.MULTILINE)
        known |= {f"--{name.replace('_', '-')}" for name in names}
    assert documented_commands()[command] - {"--help"} <= known


def test_documented_make_targets_exist() -> None:
    text = "".join((REPOSITORY / name).read_text() for name in ("README.md", "CONTRIBUTING.md"))
    targets = set(re.findall(r"^make ([a-z-]+)", text, re.MULTILINE)) | set(re.findall(r"`make ([a-z-]+)", text))
    (phony,) = re.findall(r"^\.PHONY: (.+)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert len(targets) > 3 and targets <= set(phony.split())


@pytest.mark.slow
@of("sh", "run")
def test_commands_run(block: Block) -> None:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    ran = subprocess.run(["bash", "-e"], input=block.text, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert "usage" in ran.stdout


@of("python")
def test_examples_work(block: Block) -> None:
    names: dict[str, Any] = {"__name__": block.where}
    exec(compile(block.text, block.where, "exec"), names)  # our own documentation
    if "LongOnes" in names:
        policy = names["LongOnes"]()
        short, long = (policy.decide(("small", "large"), RequestFeatures(num_chars=count)) for count in (1, 9000))
        assert (short.tier, long.tier) == ("small", "large")
    else:
        assert names["Mean"]().name == "mean"


@of("yaml", "kvrelay")
def test_configurations_are_valid(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "kvrelay.yaml"
    path.write_text(block.text)
    for worker in settings.load(path).workers:
        read_settings(path, worker)


@pytest.mark.parametrize("doc", PAGES, ids=lambda doc: doc.stem)
def test_named_files_and_tests_exist(doc: Path) -> None:
    named = [name for name in re.findall(r"`([\w./-]+(?:::\w+)?)`", doc.read_text()) if name.split("/")[0] in TOP]
    for name in named:
        path, _, test = name.partition("::")
        assert (REPOSITORY / path).exists(), name
        assert not test or f"def {test}(" in (REPOSITORY / path).read_text(), name


def test_names_in_the_guide_to_adding_parts_exist() -> None:
    folders = ("gateway", "workers", "mappers", "tools", "tests")
    sources = [path.read_text() for folder in folders for path in (REPOSITORY / folder).rglob("*.py")]
    code = {word for source in sources for word in WORD.findall(source)}
    guide = FENCE.sub("", (REPOSITORY / "docs" / "extend.md").read_text())
    named = {word for name in re.findall(r"`([A-Za-z_][\w.]*)`", guide) for word in WORD.findall(name)}
    assert named - code == set()


@pytest.mark.parametrize("doc", PAGES, ids=lambda doc: doc.stem)
def test_links_between_pages_resolve(doc: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", doc.read_text())):
        path, _, anchor = target.partition("#")
        if ":" in target:
            continue
        page = (doc.parent / path).resolve() if path else doc
        assert page.is_file(), target
        assert not anchor or anchor in anchors(page), target


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.stem)
def test_workflows_and_issue_forms_fit_their_schemas(path: Path) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", SCHEMAS[path], str(path)]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_ci_runs_the_same_checks_as_contributors() -> None:
    steps = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text())["jobs"]["test"]["steps"]
    assert any(step.get("run") == "bash .ci/run" for step in steps)
    pinned = [step["uses"] for step in steps if "uses" in step]
    assert pinned and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", use) for use in pinned)


def test_every_threat_has_a_test() -> None:
    lines = (REPOSITORY / "docs" / "security.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| ")][1:]
    assert len(rows) > 10
    assert all("::test_" in row.rsplit("|", 2)[1] for row in rows)


def test_documented_services_and_alerts_exist(composed: Composed) -> None:
    text = (REPOSITORY / "docs" / "operate.md").read_text()
    listed = {name for row in re.findall(r"^\| ([a-z, -]+) \|", text, re.MULTILINE) for name in row.split(", ")}
    assert {service.name for service in composed.started_with("cpu")} <= listed
    alerts = {query.where.removeprefix("alert ") for query in queries.of_rules("alert")}
    assert set(re.findall(r"^\| (Kvrelay\w+) \|", text, re.MULTILINE)) == alerts


def commands() -> dict[str, str]:
    """Of pyproject.toml, with what runs them: those that are registered with an installation may be older."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    registered: dict[str, str] = project["entry-points"]["kvrelay.commands"]
    return registered


def test_yaml_of_deploy_is_yaml() -> None:
    for path in (REPOSITORY / "deploy").rglob("*.y*ml"):
        assert list(yaml.safe_load_all(path.read_text())), path
