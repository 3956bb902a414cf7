"""The Hugging Face hub: which commit a revision is, which files are in it, and from where they are downloaded.

This uses huggingface_hub (the extra `wdsfs[hf]`), whose calls block and so run in threads; obstore fetches the
files themselves. The hub limits requests, and has locked out loaders that asked file by file. So a whole directory
is listed at once, and the answer is kept for some seconds. The signed address to which the hub redirects a
download is asked for once and used until it is refused.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import os
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import unquote

from wdsfs.door.pins import Listing, Pin
from wdsfs.door.urls import Url
from wdsfs.errors import DeniedObject, MissingObject, ObjectChanged, ShardError, Unreachable
from wdsfs.remote.answers import THROTTLING, of_status, seconds_of
from wdsfs.remote.retries import Clock, Result, Transient, blocking
from wdsfs.remote.settings import pace
from wdsfs.wings import install_command

FRESH = 10.0  # seconds that a listing answers for
PAGE = 1000  # entries of a listing that are asked for at a time
_COMMIT = re.compile(r"[0-9a-f]{40}")


class RepositoryFiles(NamedTuple):
    """The files below a directory of a repository, and its folders."""

    commit: str
    pins: dict[str, Pin]  # by key
    folders: list[str]
    read: float


class Hub:
    """The repositories of the hub as one process sees them."""

    def __init__(self, clock: Clock, now: Callable[[], float]) -> None:
        self._clock = clock
        self._now = now  # seconds of the Unix era
        self._trees: dict[tuple[str, str, bool], RepositoryFiles] = {}
        self._locks: defaultdict[tuple[str, str, bool], asyncio.Lock] = defaultdict(asyncio.Lock)
        self._places: dict[tuple[str, str], str] = {}

    async def head(self, url: Url, options: dict[str, str]) -> Pin:
        """Return the pin of a file. Raises ShardError, Transient."""
        tree = await self._tree(url, os.path.dirname(url.key), False, options, FRESH)
        if url.key not in tree.pins:
            raise MissingObject(f"{url}: there is no such file in this revision")
        return tree.pins[url.key]

    async def list(self, prefix: Url, options: dict[str, str], *, deep: bool) -> Listing:
        """Return the files whose key starts with that of `prefix`: see `StoreReader.list`.

        Raises ShardError, Transient.
        """
        tree = await self._tree(prefix, os.path.dirname(prefix.key), deep, options, FRESH)
        files = sorted(item for item in tree.pins.items() if item[0].startswith(prefix.key))
        folders = [key for key in tree.folders if key.startswith(prefix.key)]
        return Listing([(prefix._replace(key=key), pin) for key, pin in files], [] if deep else folders)

    async def location(self, url: Url, pin: Pin, options: dict[str, str]) -> tuple[str, dict[str, str]]:
        """Return where the pinned file can be downloaded now, and with which headers.

        Raises ShardError, Transient.
        """
        place = self._places.get((url.shown, pin.etag))
        headers = self._headers(options)
        endpoint = self._endpoint(options)
        if place is None:
            commit = await self._commit_with(url, pin, options)
            hub = _library(url)
            repository, _ = _repository(url)
            named = {"repo_type": "dataset", "revision": commit, "endpoint": endpoint}
            target = hub.hf_hub_url(repository, url.key, **named)
            about = await self._ask(
                url, options, lambda: hub.get_hf_file_metadata(target, token=_token(options), endpoint=endpoint)
            )
            if about.etag and f'"{about.etag}"' != pin.etag:
                raise ObjectChanged(f"{url}: it has been replaced")
            place = self._places[url.shown, pin.etag] = about.location
        return place, headers if place.startswith(endpoint + "/") else {}

    def knows(self, url: Url, pin: Pin) -> bool:
        """Return True if `location` answers without asking the hub."""
        return (url.shown, pin.etag) in self._places

    def forget(self, url: Url, pin: Pin) -> None:
        """Forget a location, so that `location` asks the hub the next time."""
        self._places.pop((url.shown, pin.etag), None)

    async def _commit_with(self, url: Url, pin: Pin, options: dict[str, str]) -> str:
        """Return a commit in which the file is as pinned: that of the last listing, or of one made now."""
        for age in (float("inf"), FRESH):
            tree = await self._tree(url, os.path.dirname(url.key), False, options, age)
            if tree.pins.get(url.key) == pin:
                return tree.commit
        raise ObjectChanged(f"{url}: it has been replaced")

    async def _tree(
        self, url: Url, directory: str, deep: bool, options: dict[str, str], age: float
    ) -> RepositoryFiles:
        key = url.store, directory, deep
        async with self._locks[key]:
            tree = self._trees.get(key)
            if tree is None or self._clock.now() - tree.read > age:
                tree = self._trees[key] = await self._read_tree(url, directory, deep, options)
            return tree

    async def _read_tree(self, url: Url, directory: str, deep: bool, options: dict[str, str]) -> RepositoryFiles:
        repository, revision = _repository(url)
        read = self._clock.now()
        interface = _library(url).HfApi(endpoint=self._endpoint(options), token=_token(options))
        commit = revision
        if not _COMMIT.fullmatch(revision):
            about = await self._ask(
                url, options, lambda: interface.repo_info(repository, revision=revision, repo_type="dataset")
            )
            commit = about.sha
        entries = interface.list_repo_tree(
            repository, directory or None, recursive=deep, revision=commit, repo_type="dataset"
        )
        pins, folders = dict[str, Pin](), list[str]()
        while some := await self._ask(url, options, lambda: list(itertools.islice(entries, PAGE))):
            pins.update((entry.path, _pin(entry)) for entry in some if hasattr(entry, "blob_id"))
            folders += [f"{entry.path}/" for entry in some if not hasattr(entry, "blob_id")]
        return RepositoryFiles(commit, pins, folders, read)

    async def _ask(self, url: Url, options: dict[str, str], question: Callable[[], Result]) -> Result:
        """Return the result of a call of huggingface_hub. Raises ShardError, Transient."""
        errors = importlib.import_module("huggingface_hub.errors")
        try:
            return await blocking(question, pace(options).total)
        except (errors.HfHubHTTPError, errors.HTTPError, OSError, ValueError) as error:
            failed = self._failure(url, error)
        raise failed

    def _failure(self, url: Url, error: Exception) -> ShardError | Transient:
        errors = importlib.import_module("huggingface_hub.errors")
        answer = getattr(error, "response", None)
        if isinstance(error, errors.GatedRepoError):
            return DeniedObject(f"{url}: this data set is gated: ask for access on its page, and set HF_TOKEN")
        if isinstance(error, errors.RepositoryNotFoundError):
            return DeniedObject(f"{url}: there is no such data set, or it is private: set HF_TOKEN")
        if isinstance(error, errors.RevisionNotFoundError):
            return MissingObject(f"{url}: there is no such revision")
        if isinstance(error, errors.EntryNotFoundError):
            return MissingObject(f"{url}: there is no such file in this revision")
        if answer is None:
            return Transient("the hub cannot be connected to")
        failed = of_status(answer.status_code, "", url)
        if isinstance(failed, Transient) and answer.status_code in THROTTLING:
            failed.wait = seconds_of(answer.headers.get("Retry-After", ""), self._now())
        return failed

    def _endpoint(self, options: dict[str, str]) -> str:
        said = options.get("endpoint") or os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
        return said.rstrip("/")

    def _headers(self, options: dict[str, str]) -> dict[str, str]:
        token = _token(options)
        if token is None:
            token = importlib.import_module("huggingface_hub").get_token()
        return {"Authorization": f"Bearer {token}"} if token else {}


def _library(url: Url) -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError:
        raise Unreachable(f"{url}: hf:// needs huggingface_hub; type: {install_command('hf')}") from None


def _token(options: dict[str, str]) -> str | bool | None:
    """Return the token for huggingface_hub; None: the one that it finds by its own conventions."""
    return False if options.get("anonymous") == "true" else options.get("token")


def _repository(url: Url) -> tuple[str, str]:
    """Return the name of the repository, and the revision."""
    name, _, revision = url.store.removeprefix("hf://datasets/").partition("@")
    return name, unquote(revision) or "main"


def _pin(file: Any) -> Pin:
    """Return a pin made of the checksum of the content: a commit that does not change a file keeps its pin."""
    return Pin(file.size, 0, f'"{file.lfs.sha256 if file.lfs else file.blob_id}"', "")
