"""The manifests in kubernetes/: by the schema of Kubernetes, and their commands by the program."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from tests.peers import LONG_PATIENCE, TOOLS, need_tool
from tests.processes import finished
from wdsfs.cli.mount_commands import mount

MANIFESTS = sorted((ROOT / "kubernetes").glob("*.yaml"))
VALIDATE = """
import json, sys
import kubernetes_validate
for text in sys.stdin:
    kubernetes_validate.validate(json.loads(text), kubernetes_validate.latest_version(), strict=True)
"""


def is_valid(manifest: Any) -> bool:
    command = TOOLS / "bin" / "python", "-c", VALIDATE
    return finished(*command, input=json.dumps(manifest), timeout=LONG_PATIENCE, code=None).returncode == 0


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.stem)
def test_a_manifest_is_what_kubernetes_takes(file: Path) -> None:
    need_tool("kubernetes_validate")
    manifest = yaml.safe_load(file.read_text())
    assert is_valid(manifest)
    manifest["spec"]["containers"][0]["volumeMount"] = []  # a misspelt field is found
    assert not is_valid(manifest)
    assert f"`{file.name}`" in (ROOT / "docs/how-to/containers.md").read_text()


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.stem)
def test_no_manifest_has_credentials(file: Path) -> None:
    spec = yaml.safe_load(file.read_text())["spec"]
    for container in spec.get("initContainers", []) + spec["containers"]:
        named = {variable["name"] for variable in container.get("env", []) if "value" in variable}
        assert named <= {"WDSFS_INDEX_DIR", "WDSFS_CACHE_SIZE", "AWS_REGION"}


def test_the_command_that_makes_the_secret_is_on_the_page() -> None:
    (secret,) = re.findall(
        r"kubectl create secret generic (\S+)", (ROOT / "docs/how-to/containers.md").read_text()
    )
    (sidecar,) = yaml.safe_load((ROOT / "kubernetes/sidecar-s3.yaml").read_text())["spec"]["initContainers"]
    assert sidecar["envFrom"] == [{"secretRef": {"name": secret}}]


@pytest.mark.parametrize("name", ["sidecar", "sidecar-s3"])
def test_the_sidecar_mounts_what_the_other_container_reads(name: str) -> None:
    spec = yaml.safe_load((ROOT / f"kubernetes/{name}.yaml").read_text())["spec"]
    (sidecar,), (training,) = spec["initContainers"], spec["containers"]
    words = shlex.split(re.sub(".*exec ", "", sidecar["args"][0], flags=re.DOTALL))
    assert words[:2] == ["wdsfs", "mount"]
    context = mount.make_context("mount", words[2:], resilient_parsing=True)
    assert context.params["foreground"]
    place = words[-1]
    assert place in sidecar["startupProbe"]["exec"]["command"]
    assert place in training["command"]
    shared = {
        one["mountPath"]: one["mountPropagation"] for one in sidecar["volumeMounts"] if "mountPropagation" in one
    }
    assert shared == {str(Path(place).parent): "Bidirectional"}
    assert training["volumeMounts"][0]["mountPath"] in shared
