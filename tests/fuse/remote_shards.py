"""A program whose shards are indexed as files, but read as objects of a store in memory (`fake_fetcher`)."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.remote import fake_fetcher
from wdsfs.door.pins import Pin
from wdsfs.door.urls import Url
from wdsfs.fuse.supervisor import Supervisor
from wdsfs.remote import client
from wdsfs.remote.client import FetcherClient, RemoteTar
from wdsfs.tree.content import Content
from wdsfs.tree.shard_set import ShardSet


def install(kind: str, shard: str, settings: dict[str, str], log: str) -> None:
    """Have the mount of this process read its shard from a store of this kind."""
    client._START = fake_fetcher.START
    url, pin = Url("s3://b", f"{kind}/o.tar"), Pin(os.stat(shard).st_size, 0, '"1"', "")
    plain_init, plain_content = Supervisor.__init__, ShardSet.content
    remotes: list[FetcherClient] = []
    tars: dict[int, RemoteTar] = {}

    def init(self: Supervisor, *arguments: Any) -> None:
        plain_init(self, *arguments)
        remotes.append(FetcherClient({**settings, "body": shard}, device=self.device, log=Path(log)))
        self.fetcher = remotes[-1]

    def content(self: ShardSet, number: int, tag: int, member: int) -> Content:
        found = plain_content(self, number, tag, member)
        if not remotes:
            return found
        tar = tars.setdefault(os.getpid(), remotes[-1].open(url, pin))
        record = self.record(number)
        sample = [record.extent(one) for one in record.entry_members(record.entry_of(member))]
        file = replace(found.file, shard=tar, source=tar)
        return replace(found, file=file, sample=lambda: [(at, at + size) for at, size in sample])

    Supervisor.__init__, ShardSet.content = init, content  # type: ignore[method-assign,assignment]
