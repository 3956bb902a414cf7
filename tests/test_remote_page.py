"""docs/how-to/stores.md: each command is typed in, against a server of the store that it is about."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import servers, tars
from tests.conftest import ROOT, Program, need_fuse
from tests.hub_server import HubServer
from tests.processes import finished
from tests.remote.conftest import FOREIGN
from tests.servers import BUCKET, Server
from tests.web_server import WebServer

_TEXT = (ROOT / "docs/how-to/stores.md").read_text()
_PARTS = re.split(r"^##+ (.*)\n", _TEXT, flags=re.MULTILINE)
SECTIONS = {"": _PARTS[0], **dict(zip(_PARTS[1::2], _PARTS[2::2], strict=True))}
COMMANDS = {name: re.findall(r"^    (\S.*)$", text, re.MULTILINE) for name, text in SECTIONS.items()}
NOT_RUN = {"AIStore"}  # there is no server of it here; the page says so
SHARD = tars.tar(*(tars.member(b"%c.txt" % key, b"content of " + bytes([key])) for key in b"ab"))
SHARDS = {f"train/train-00000{number}.tar": SHARD for number in range(2)}


class Place:
    """A user's machine: variables and a configuration file to be filled, and what the page's words stand for."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.words: dict[str, str] = {"/mnt/train": str(program.mountpoint)}
        for name in list(program.environment):  # of who runs the tests
            if name.lower().endswith("_proxy") or name.startswith(FOREIGN):
                del program.environment[name]

    def configure(self, prefix: str, options: dict[str, str]) -> None:
        file = Path(self.program.environment["XDG_CONFIG_HOME"]) / "wdsfs" / "config.toml"
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = [f'{name} = "{value}"' for name, value in options.items()]
        file.write_text("\n".join([f'[store."{prefix}"]', *lines, ""]))
        file.chmod(0o600)

    def type_in(self, command: str) -> str:
        """Return the output of a command, which has to succeed."""
        for word, meaning in self.words.items():
            command = command.replace(word, meaning)
        typed = f'wdsfs() {{ {sys.executable} -m wdsfs "$@"; }}; {command}'
        return str(finished("bash", "-c", typed, env=self.program.environment, cwd=self.program.home).stdout)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    program = Program(tmp_path)
    program.environment.setdefault("XDG_CONFIG_HOME", str(program.home / "config"))
    program.environment["WDSFS_CACHE_DIR"] = str(program.directory("cache"))
    yield Place(program)
    if os.path.ismount(program.mountpoint):
        program.run("umount", "--lazy", program.mountpoint, code=None)


def fill(server: Server, scheme: str) -> None:
    put, _ = servers.writing(server, scheme)
    for key, content in SHARDS.items():
        put(key, content)


def s3(place: Place, server: Server) -> None:
    fill(server, "s3")
    place.configure("s3://", {"endpoint": server.options["endpoint"]})
    place.program.environment.update(
        AWS_ACCESS_KEY_ID=server.options["access_key_id"],
        AWS_SECRET_ACCESS_KEY=server.options["secret_access_key"],
        AWS_REGION=server.options["region"],
        SIGNED_URL=servers.sign(server, "train/train-000000.tar"),
    )
    place.words["http://minio:9000"] = server.url


def other_s3(place: Place, server: Server) -> None:
    s3(place, server)
    place.configure("s3://", {"endpoint": "http://127.0.0.1:9"})


def gs(place: Place, server: Server) -> None:
    fill(server, "gs")
    place.configure("gs://", server.options)


def az(place: Place, server: Server) -> None:
    fill(server, "az")
    place.configure("az://", server.options)
    place.words["az://container"] = f"az://{BUCKET}"


def web(place: Place, server: Server) -> None:
    for key, content in SHARDS.items():
        for top in (server.directory, place.program.home):
            (top / key).parent.mkdir(exist_ok=True)
            (top / key).write_bytes(content)
    place.configure("https://", server.options)
    place.program.environment["CURL_CA_BUNDLE"] = server.options["certificates"]
    place.words["https://data.example"] = server.url


@pytest.fixture
def hub_server() -> Iterator[HubServer]:
    with WebServer().running() as first, WebServer().running() as second:
        yield HubServer(first, second)


def hub(place: Place, server: HubServer) -> None:
    server.commit(**{key.replace("/", "__").replace(".tar", "_tar"): content for key, content in SHARDS.items()})
    place.program.environment["HF_ENDPOINT"] = server.hub.url


# The fixture of the server that a section is about, and how the place gets to know it.
RUN_AT: dict[str, tuple[str, Callable[[Place, Any], None]]] = {
    "": ("seaweedfs", s3),
    "The stores": ("seaweedfs", s3),
    "S3": ("seaweedfs", s3),
    "S3 from others": ("seaweedfs", other_s3),
    "Google Cloud Storage": ("fake_gcs", gs),
    "Azure": ("azurite", az),
    "The web": ("nginx", web),
    "Signed URLs": ("seaweedfs", s3),
    "The Hugging Face hub": ("hub_server", hub),
    "Commands": ("nginx", web),
    "The standard input": ("nginx", web),
    "The cache": ("seaweedfs", s3),
    "Recipe: training from S3": ("seaweedfs", s3),
    "Recipe: browsing a set of the hub": ("hub_server", hub),
}


@pytest.mark.parametrize("section", RUN_AT)
def test_the_commands_of_a_section_work(section: str, place: Place, request: pytest.FixtureRequest) -> None:
    commands = COMMANDS[section]
    if any(" mount " in command for command in commands):
        need_fuse()
    server, prepare = RUN_AT[section]
    prepare(place, request.getfixturevalue(server))
    for command in commands:
        said = place.type_in(command)
        if re.search(r"\bcat\b.*/(a/txt|a\.txt)", command):
            assert said == "content of a", command
        if "wdsfs ls" in command:
            assert said.startswith("train-00000"), command


def test_every_command_is_typed_in() -> None:
    assert {name for name, commands in COMMANDS.items() if commands} == set(RUN_AT) | NOT_RUN
