"""The network that benchmarks and other tests put in between: it passes on every byte, and not too early.

The one thing that is measured by time here is that nothing comes too early, which no load of the machine changes.
"""

from __future__ import annotations

import time

from tests import slow_proxy
from tests.remote.apart import Apart
from tests.web_server import WebServer

CONTENT = bytes(range(256)) * 20_000


def test_it_takes_its_time_and_passes_on_every_byte(apart: Apart, web: WebServer) -> None:
    web.put("/x.tar", CONTENT)
    with slow_proxy.running("127.0.0.1", web.port, latency=0.05, rate=50e6) as port:
        url = f"http://127.0.0.1:{port}/x.tar"
        begun = time.monotonic()
        pin = apart.head(url)
        assert time.monotonic() - begun >= 0.05
        begun = time.monotonic()
        assert apart.get(url, pin, 0, len(CONTENT)) == CONTENT
        assert time.monotonic() - begun >= 0.05 + (len(CONTENT) - (1 << 19)) / 50e6 - 0.005
        calls = [("get", url, pin, at, at + 1000) for at in range(0, 100_000, 1000)]
        assert apart.together(*calls) == [CONTENT[at : at + 1000] for *_, at, _ in calls]
