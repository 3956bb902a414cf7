"""What a measurement was made on: the machine and the versions, without its name or its paths."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench.systems import System

PACKAGES = ("pyfuse3", "lmdb", "numpy", "torch", "webdataset", "pillow")
BUSY = 0.5  # load per core above which a measurement says little


def describe(systems: dict[str, System], place: Path) -> dict[str, Any]:
    kernel = ".".join(re.findall(r"\d+", platform.release())[:3])
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    parts = [
        f"{cores} cores",
        _processor(),
        f"{memory:.0f} GiB",
        f"Linux {kernel}",
        f"data on {_file_system(place)}",
    ]
    return {
        "date": datetime.date.today().isoformat(),
        "machine": ", ".join(part for part in parts if part),
        "load at the start": round(os.getloadavg()[0], 2),
        "versions": _versions(systems),
    }


def busy() -> str:
    """A warning when others use this machine, else nothing."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    return f"the machine was not idle: load {load:.1f} on {cores} cores" if load > BUSY * cores else ""


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return " ".join(line.partition(":")[2].split())
    return platform.machine()


def _file_system(place: Path) -> str:
    said = subprocess.run(["stat", "-f", "-c", "%T", place], capture_output=True, text=True, check=False)
    return said.stdout.strip().replace("ext2/ext3", "ext4")


def _versions(systems: dict[str, System]) -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for system in systems.values():
        if said := system.version():
            found[system.name.removesuffix("-raw").removesuffix("-nospin")] = said.removeprefix("wdsfs, version ")
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
