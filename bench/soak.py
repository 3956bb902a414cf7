"""A soak: readers, edits, commits, a set that grows, remote shards and kills at once, for as long as is said.

    python -m bench.soak SECONDS DIRECTORY

Every byte that is read is compared. Memory, descriptors and threads of the processes of a mount are sampled, into
`samples.csv`, and drawn, into `soak.svg`. Ends with 1 if anything was wrong, left over, or has grown.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import http.server
import io
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.systems import descendants

WDSFS = str(Path(sys.executable).with_name("wdsfs"))
SHARDS, SAMPLES, SIZE = 12, 150, 3000
GROWTH = 1.25  # of the last third over the second sixth; what comes before is warming up
SLACK = {"memory": 32 << 20, "descriptors": 16, "threads": 4}
PATIENCE = 120.0  # seconds for one command
# What a reader may meet: its shard has just gone or changed; before Linux 6.9 its worker was killed.
ALLOWED = {errno.ENOENT, errno.ESTALE}
if tuple(map(int, os.uname().release.split(".")[:2])) < (6, 9):
    ALLOWED.add(errno.ECONNABORTED)


def content(key: str) -> bytes:
    """Return what the column `bin` of a sample has to be."""
    return random.Random(key).randbytes(SIZE)


def write_shard(path: Path, name: str) -> None:
    """Write a shard whose content follows from its name, in one step."""
    hidden = path.with_name(f".{path.name}.part")
    with tarfile.open(hidden, "w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(SAMPLES):
            info = tarfile.TarInfo(f"{number:04}.bin")
            info.size = SIZE
            tar.addfile(info, io.BytesIO(content(f"{name}/{number:04}")))
    hidden.rename(path)


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Serves files with ranges and ETags."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        data = Path(self.translate_path(self.path)).read_bytes()
        begin, end = 0, len(data)
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked:
            begin, end = int(asked[1]), min(int(asked[2] or end) + 1, end)
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(end - begin))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", '"1"')
        if asked:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
        self.end_headers()
        if with_body:
            self.wfile.write(data[begin:end])


class Soak:
    """The mounts, what works on them, and what has come of it."""

    def __init__(self, home: Path, seconds: float) -> None:
        self.home, self.seconds = home, seconds
        self.ended = threading.Event()
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.rows: list[dict[str, Any]] = []
        places = {"WDSFS_INDEX_DIR": str(home / "index"), "WDSFS_CACHE_DIR": str(home / "cache")}
        self.environment = {**os.environ, **places}
        self.lock = threading.Lock()  # of the writable mount: no edit while it is committed

    def wdsfs(self, *words: str) -> str:
        """Run a command; a failure is noted."""
        done = subprocess.run(
            [WDSFS, *words],
            cwd=self.home,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )
        if done.returncode:
            self.fail(f"{' '.join(words)}: exit {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def fail(self, text: str) -> None:
        """Note what was wrong."""
        self.wrong.append(text)
        print(f"soak: wrong: {text}", flush=True)

    # --- the work

    def read(self, mount: str) -> None:
        """Read a random sample of a mount, and compare it."""
        shard = f"s{random.randrange(SHARDS):02}"
        key = f"{random.randrange(SAMPLES):04}"
        try:
            data = (self.home / mount / shard / key / "bin").read_bytes()
        except OSError as error:
            if error.errno not in ALLOWED:
                raise
            self.done["reads refused"] += 1
            return
        self.done[f"reads of {mount}"] += 1
        if data != content(f"{shard}/{key}"):
            self.fail(f"{mount}/{shard}/{key}: other bytes")

    def walk(self) -> None:
        """List a whole shard of the set that grows."""
        shard = random.choice(os.listdir(self.home / "grows"))
        try:
            self.done["samples listed"] += len(os.listdir(self.home / "grows" / shard))
        except OSError:
            if (self.home / f"growing/{shard}.tar").exists():
                raise
            self.done["listings refused"] += 1  # its shard has just gone

    def edit(self) -> None:
        """Write, add or remove a sample, and see the change."""
        with self.lock:
            shard = self.home / "edited" / f"s{random.randrange(SHARDS):02}"
            sample = shard / f"new{random.randrange(50):03}"
            if sample.exists() and random.random() < 0.5:
                shutil.rmtree(sample)
                seen, wanted = sample.exists(), False
            else:
                text = random.randbytes(random.randrange(10_000))
                sample.mkdir(exist_ok=True)
                (sample / "txt").write_bytes(text)
                seen, wanted = (sample / "txt").read_bytes() == text, True
            self.done["edits"] += 1
            if seen != wanted:
                self.fail(f"{sample}: the change is not seen")
        self.ended.wait(0.02)

    def commit(self) -> None:
        """Commit all edits into the shards."""
        self.ended.wait(15)
        with self.lock:
            self.wdsfs("commit", "-q", "--in-place", "edited")
            self.done["commits"] += 1

    def grow(self) -> None:
        """Add a shard to the set that is followed, and take an old one away."""
        self.ended.wait(4)
        number = self.done["shards added"]
        write_shard(self.home / f"growing/t{number:05}.tar", f"t{number:05}")
        self.done["shards added"] += 1
        if number >= 8:
            (self.home / f"growing/t{number - 8:05}.tar").unlink()

    def kill(self) -> None:
        """Kill a worker of some mount."""
        self.ended.wait(random.uniform(3, 9))
        workers = [pid for mount in self.mounts() for pid in mount.get("processes", ())[1:]]
        if workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(random.choice(workers), signal.SIGKILL)
            self.done["kills"] += 1

    def mounts(self) -> list[dict[str, Any]]:
        """Return the reports of our mounts."""
        return [
            one
            for one in json.loads(self.wdsfs("status", "--json"))
            if one["mountpoint"].startswith(str(self.home))
        ]

    def sample(self) -> None:
        """Note memory, descriptors and threads of all processes of each mount."""
        now = time.monotonic()
        for mount in self.mounts():
            totals = Counter({"memory": 0, "descriptors": 0, "threads": 0})
            for pid in descendants(mount["pid"]):  # its fetcher, too
                with contextlib.suppress(OSError, KeyError):  # it has just ended
                    totals += Counter(resources_of(pid))
            self.rows.append({"second": now, "mount": Path(mount["mountpoint"]).name, **totals})
        self.ended.wait(max(1.0, self.seconds / 500))

    # --- the whole

    def repeat(self, step: Callable[[], None]) -> None:
        """Repeat a step to the end; an exception is noted, and does not end it."""
        while not self.ended.is_set():
            try:
                step()
            except Exception as error:
                self.fail(f"{step}: {error!r}")
                self.ended.wait(1)

    @contextlib.contextmanager
    def mounted(self) -> Iterator[None]:
        """Make the sets and mount them."""
        for name in ("fixed", "edits-of", "growing"):
            (self.home / name).mkdir(parents=True)
            for number in range(SHARDS):
                write_shard(self.home / name / f"s{number:02}.tar", f"s{number:02}")
        server = http.server.ThreadingHTTPServer(
            ("127.0.0.1", 0), lambda *words: Ranges(*words, directory=str(self.home / "fixed"))
        )
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/s{{00..{SHARDS - 1:02}}}.tar"
        mounts = {
            "local": ("fixed",),
            "edited": ("--overlay", "overlay", "edits-of"),
            "grows": ("--follow", "growing"),
            "remote": (url,),
        }
        try:
            for name, words in mounts.items():
                (self.home / name).mkdir()
                self.wdsfs("mount", "-q", *words, name)
            yield
        finally:
            for name in mounts:
                self.wdsfs("umount", name)
            server.shutdown()

    def run(self) -> bool:
        """Do all of it; return True if nothing was wrong."""
        steps = [lambda: self.read("local")] * 2 + [lambda: self.read("remote"), lambda: self.read("edited")]
        steps += [lambda: self.read("grows"), self.walk, self.edit, self.commit, self.grow, self.kill, self.sample]
        with self.mounted():
            threads = [threading.Thread(target=self.repeat, args=(step,)) for step in steps]
            for thread in threads:
                thread.start()
            with contextlib.suppress(KeyboardInterrupt):
                self.ended.wait(self.seconds)
            self.ended.set()
            for thread in threads:
                thread.join()
        self.wrong += grown(self.rows)
        return not self.wrong


def resources_of(pid: int) -> dict[str, int]:
    """Return the anonymous memory (bytes), descriptors and threads of a process. Raises OSError."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    memory = int(fields["RssAnon"].split()[0]) << 10
    return {"memory": memory, "descriptors": len(os.listdir(f"/proc/{pid}/fd")), "threads": int(fields["Threads"])}


def grown(rows: list[dict[str, Any]]) -> list[str]:
    """Return what has grown from the second sixth of the time to its last third, a line each."""
    found = []
    for mount in sorted({row["mount"] for row in rows}):
        own = [row for row in rows if row["mount"] == mount]
        for what, slack in SLACK.items():
            values = [row.get(what, 0) for row in own]
            if len(values) < 12:
                continue
            before = statistics.median(values[len(values) // 6 : len(values) // 3])
            after = statistics.median(values[-len(values) // 3 :])
            if after > before * GROWTH + slack:
                found.append(f"{mount}: {what} has grown from {before:,.0f} to {after:,.0f}")
    return found


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Draw the samples, a row of charts for what was sampled, a line for each mount."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    figure, charts = pyplot.subplots(len(SLACK), 1, sharex=True, figsize=(9, 8))
    begin = rows[0]["second"]
    for chart, what in zip(charts, SLACK, strict=True):
        scale = 1 << 20 if what == "memory" else 1
        for mount in sorted({row["mount"] for row in rows}):
            own = [row for row in rows if row["mount"] == mount]
            chart.plot(
                [(row["second"] - begin) / 60 for row in own],
                [row.get(what, 0) / scale for row in own],
                label=mount,
            )
        chart.set_ylabel("anonymous memory (MiB)" if what == "memory" else what)
        chart.set_ylim(bottom=0)
    charts[0].legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4)
    charts[-1].set_xlabel("minutes")
    figure.tight_layout()
    figure.savefig(file)


def main() -> int:
    seconds, directory = float(sys.argv[1]), Path(sys.argv[2]).resolve()
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    soak = Soak(directory / "home", seconds)
    well = soak.run()
    shutil.rmtree(directory / "home", ignore_errors=True)
    with (directory / "samples.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["second", "mount", *SLACK], restval=0)
        writer.writeheader()
        writer.writerows(soak.rows)
    draw(soak.rows, directory / "soak.svg")
    report = [f"{seconds:.0f} s on Linux {os.uname().release}"]
    report += [f"{what}: {count:,}" for what, count in sorted(soak.done.items())]
    report += [f"wrong: {text}" for text in soak.wrong] or ["nothing wrong, nothing grown"]
    (directory / "report.txt").write_text("".join(f"{line}\n" for line in report))
    print("\n".join(report))
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
