"""Stores that commits send shards to: real ones, and one that a test can let go wrong."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tests import servers
from tests.web_server import Request, Served, WebServer, right_answer

Answer = tuple[int, dict[str, str], bytes]


class FakeS3:
    """A store of S3's kind, also with the conditions of Google's, or below /s3 as AIStore has it.

    `faults` are for the next PUTs, one by one; what they return is the answer.
    """

    def __init__(self, web: WebServer) -> None:
        self.web = web
        self.puts: list[str] = []  # keys
        self.faults: deque[Callable[[str, bytes], Answer | None]] = deque()
        self.etag: Callable[[bytes], str] = lambda content: hashlib.md5(content).hexdigest()
        self.hangs: str | None = None  # a PUT of this key is never answered
        self.part_hangs: int | None = None  # parts from this number on are not answered before the `end`
        self.on_part: Callable[[str, int], object] = lambda key, number: None  # called when a part comes
        self.part_faults: deque[Answer] = deque()  # answers to the next parts
        self.hanging: list[str] = []  # keys of such PUTs
        self.end = threading.Event()
        self.uploads: dict[str, dict[int, bytes]] = {}  # parts by number, of uploads that have not ended
        self.begun = 0  # uploads in parts
        self.generation = 0  # of the last object that was written, in Google's words
        web.handler = self._answer

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.web.url,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": servers.KEY,
            "AWS_SECRET_ACCESS_KEY": servers.SECRET,
        }

    @property
    def objects(self) -> dict[str, bytes]:
        return {path.removeprefix("/bucket/"): one.content for path, one in self.web.objects.items()}

    def store(self, key: str, content: bytes) -> Served:
        self.generation += 1
        headers = {"x-goog-generation": str(self.generation)}
        return self.web.put(f"/bucket/{key}", content, etag=f'"{self.etag(content)}"', headers=headers)

    async def _answer(self, request: Request) -> Answer | None:
        path = unquote(request.path.removeprefix("/s3"))
        query = parse_qs(urlsplit(request.target).query, keep_blank_values=True)
        if "uploads" in query or "uploadId" in query:
            return await self._part(request, path.removeprefix("/bucket/"), query)
        served = self.web.objects.get(path)
        if request.method != "PUT":
            return None if served is None or path == request.path else right_answer(request, served)
        key = path.removeprefix("/bucket/")
        self.puts.append(key)
        answer = self.faults.popleft()(key, request.body) if self.faults else None
        if key == self.hangs:
            self.hanging.append(key)
            await asyncio.to_thread(self.end.wait)
            raise ConnectionResetError
        if answer is not None:
            return answer
        served = self.web.objects.get(path)
        generation = request.headers.get("x-goog-if-generation-match")
        wanted = request.headers.get("if-match") if generation in (None, "0") else generation
        found = served and (served.etag if generation is None else served.headers["x-goog-generation"])
        if found != wanted:
            return 412, {}, b"<Error><Code>PreconditionFailed</Code></Error>"
        assert wanted is not None or generation == "0" or request.headers["if-none-match"] == "*"
        return 200, {"ETag": str(self.store(key, request.body).etag)}, b""

    async def _part(self, request: Request, key: str, query: dict[str, list[str]]) -> Answer:
        """Answer a request of an upload in parts; it is a PUT to `puts` and `faults` when its parts are joined."""
        if "x-amz-copy-source" in request.headers:  # a copy within the store
            return 403, {}, b"<Error><Code>AccessDenied</Code></Error>"
        if "uploads" in query:
            self.begun += 1
            self.uploads[f"a+b/{self.begun}"] = {}
            begun = f"<Bucket>bucket</Bucket><Key>{key}</Key><UploadId>a+b/{self.begun}</UploadId>"
            return 200, {}, f"<InitiateMultipartUploadResult>{begun}</InitiateMultipartUploadResult>".encode()
        [upload] = query["uploadId"]
        if upload not in self.uploads:
            return 404, {}, b"<Error><Code>NoSuchUpload</Code></Error>"
        if request.method == "DELETE":
            del self.uploads[upload]
            return 204, {}, b""
        if request.method == "PUT":
            number = int(query["partNumber"][0])
            self.on_part(key, number)
            if self.part_hangs is not None and number >= self.part_hangs:
                self.hanging.append(key)
                await asyncio.to_thread(self.end.wait)
                if upload not in self.uploads:
                    return 404, {}, b"<Error><Code>NoSuchUpload</Code></Error>"
            if self.part_faults:
                return self.part_faults.popleft()
            self.uploads[upload][number] = request.body
            return 200, {"ETag": f'"{hashlib.md5(request.body).hexdigest()}"'}, b""
        parts = self.uploads[upload]
        content = b"".join(parts[number] for number in range(1, len(parts) + 1))
        sums = [hashlib.md5(parts[number]).digest() for number in range(1, len(parts) + 1)]
        assert request.body.count(b"<Part>") == len(parts)
        self.puts.append(key)
        answer = self.faults.popleft()(key, content) if self.faults else None
        if answer is not None:
            return answer
        del self.uploads[upload]
        etag = f'"{hashlib.md5(b"".join(sums)).hexdigest()}-{len(sums)}"'
        self.web.put(f"/bucket/{key}", content, etag=etag)
        return joined_parts(key, etag)


def joined_parts(key: str, etag: str) -> Answer:
    """The answer to a request that joins parts."""
    tag = etag.replace('"', "&quot;")
    done = f"<Location>/{key}</Location><Bucket>bucket</Bucket><Key>{key}</Key><ETag>{tag}</ETag>"
    return 200, {}, f"<CompleteMultipartUploadResult>{done}</CompleteMultipartUploadResult>".encode()


@pytest.fixture
def s3() -> Iterator[FakeS3]:
    with WebServer().running() as server:
        store = FakeS3(server)
        yield store
        store.end.set()
