"""An imitation of the Hugging Face hub's interface, as far as huggingface_hub and downloads need it.

Large files are at another server, where a signed place lets one download them, as on the hub.
"""

from __future__ import annotations

import hashlib
import json
from urllib.parse import parse_qs, unquote, urlsplit

from tests.web_server import Request, WebServer

Answer = tuple[int, dict[str, str], bytes]


class HubServer:
    """One repository, `me/set`, with commits; `hub` is where its interface is, `cdn` where large files are."""

    def __init__(self, hub: WebServer, cdn: WebServer) -> None:
        self.hub, self.cdn = hub, cdn
        self.commits: dict[str, dict[str, bytes]] = {}
        self.branch = ""
        self.signature = "first"  # of places at the other server: others are refused; none: all are
        self.token: str | None = None  # that is asked for
        hub.handler = self._answer
        cdn.handler = self._download

    def commit(self, **files: bytes) -> str:
        """A new commit of the branch `main`, which adds or replaces these files; returns its number."""
        changed = {name.replace("__", "/").replace("_tar", ".tar"): content for name, content in files.items()}
        content = {**self.commits.get(self.branch, {}), **changed}
        self.branch = hashlib.sha1(repr((self.branch, sorted(content.items()))).encode()).hexdigest()
        self.commits[self.branch] = content
        return self.branch

    async def _answer(self, request: Request) -> Answer | None:
        if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
            return 401, {"X-Error-Code": "RepoNotFound"}, b"{}"
        path = unquote(request.path)
        for start, answer in (
            ("/api/datasets/me/set/revision/", self._revision),
            ("/api/datasets/me/set/tree/", self._tree),
            ("/datasets/me/set/resolve/", self._resolve),
        ):
            if path.startswith(start):
                revision, _, rest = path.removeprefix(start).partition("/")
                commit = self.branch if revision == "main" else revision
                if commit not in self.commits:
                    return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
                return answer(request, commit, rest)
        return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"

    def _revision(self, request: Request, commit: str, rest: str) -> Answer:
        return _json({"id": "me/set", "sha": commit, "siblings": [], "tags": [], "private": False})

    def _tree(self, request: Request, commit: str, directory: str) -> Answer:
        deep = parse_qs(urlsplit(request.target).query).get("recursive") in (["True"], ["true"])
        start = directory + "/" if directory else ""
        below = {name: content for name, content in self.commits[commit].items() if name.startswith(start)}
        if directory and not below:
            return 404, {"X-Error-Code": "EntryNotFound"}, b"{}"
        listed = []
        for name, content in sorted(below.items()):
            if deep or "/" not in name.removeprefix(start):
                lfs = {"oid": _sum(content), "size": len(content), "pointerSize": 134}
                listed.append({"type": "file", "path": name, "oid": "0" * 40, "size": len(content), "lfs": lfs})
        folders = {name[: name.index("/", len(start))] for name in below if "/" in name.removeprefix(start)}
        listed += (
            [] if deep else [{"type": "directory", "path": name, "oid": "0" * 40} for name in sorted(folders)]
        )
        return _json(listed)

    def _resolve(self, request: Request, commit: str, name: str) -> Answer:
        content = self.commits[commit].get(name)
        if content is None:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b""
        headers = {
            "X-Repo-Commit": commit,
            "X-Linked-Size": str(len(content)),
            "X-Linked-Etag": f'"{_sum(content)}"',
        }
        place = f"{self.cdn.url}/{_sum(content)}?Signature={self.signature}"
        self.cdn.put(f"/{_sum(content)}", content, etag='"of-the-cdn"')
        return 302, {**headers, "Location": place}, b""

    async def _download(self, request: Request) -> Answer | None:
        refused = not self.signature or not request.target.endswith(f"?Signature={self.signature}")
        return (403, {}, b"Request has expired") if refused else None


def _sum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _json(value: object) -> Answer:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()
