"""`make bench`: arguments in, workloads in order, report out.

python -m bench                                              everything, half an hour
python -m bench --tiny                                       everything with little data, to see that it works
python -m bench --only first-read --systems wdsfs,squashfuse_ll
python -m bench --only memory,mount-time --large
python -m bench --only kernel                                what the kernel serves, against FUSE and the disk
python -m bench --only node                                  many cores and a GPU (install torch with CUDA before)
python -m bench --only in-order                              passes in order, local and remote
python -m bench --base ../before/.venv/bin/wdsfs             against another build of wdsfs, in turn
python -m bench --only training                              loaders of wdsfs and of its peers
python -m bench --from bench/results/2026-01-31.json --chart docs/images/figures.svg      tables again, and a chart
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from bench import data, machine, readme, report, systems
from bench.run import Bench
from bench.workloads import ALONE, GROUPS, WORKLOADS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
CHART = ROOT / "docs" / "images" / "figures.svg"
ROOM = 14 << 30  # bytes on the disk; some 12 GB are used by default


def main() -> int:
    arguments = _arguments()
    console = Console(stderr=True, highlight=False, markup=False)
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    results = report.Results()
    if arguments.saved:
        for file in arguments.saved:
            results.take(json.loads(file.read_text()))
        complete = True
    else:
        complete = _measure(arguments, results, console)
    report.show(results, out)
    _show_readme(arguments, results, out)
    if complete and not arguments.saved and not (arguments.only or arguments.systems or arguments.tiny):
        file = report.save(results, RESULTS)
        CHART.write_text(readme.chart(results))
        console.print(f"saved: {file.relative_to(ROOT)}")
    elif arguments.out and complete:
        arguments.out.write_text(json.dumps(results.to_json(), indent=1) + "\n")
    if not complete:
        return 130
    return 1 if any(system.startswith(("wdsfs", "all")) for _, system, _ in results.failures) else 0


def _show_readme(arguments: argparse.Namespace, results: report.Results, out: Console) -> None:
    if results.median(*readme.FIRST[:2], "wdsfs"):
        out.print("for the README:", readme.comparison(results), sep="\n\n", soft_wrap=True)
    if arguments.chart:
        arguments.chart.write_text(readme.chart(results))


def _measure(arguments: argparse.Namespace, results: report.Results, console: Console) -> bool:
    """Run the workloads; returns whether all of them came to their turn."""
    since = time.monotonic()

    def say(text: str) -> None:
        console.print(f"{time.monotonic() - since:6.1f} s  {text}", soft_wrap=True)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    place = _place(arguments)
    complete = False
    try:
        systems.clear(place)
        chosen = _systems(arguments, results, say)
        results.about = machine.describe(chosen, place)
        results.about |= {"sizes": dataclasses.asdict(arguments.sizes), "repetitions": arguments.repetitions}
        if warning := machine.busy():
            results.note(warning)
        sets = data.Sets(place, arguments.sizes, say)
        bench = Bench(sets, chosen, results, arguments.repetitions, arguments.limit, say)
        _run(arguments, bench)
        _listen(bench)
        results.about["minutes"] = round((time.monotonic() - since) / 60, 1)
        complete = True
    except KeyboardInterrupt:
        say("interrupted; what was measured so far:")
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # cleaning up is short
        systems.sweep()
        systems.clear(place)
        if not arguments.data:
            shutil.rmtree(place, ignore_errors=True)
    return complete


def _run(arguments: argparse.Namespace, bench: Bench) -> None:
    done = set()
    chosen = arguments.only or WORKLOADS.keys() - ALONE
    for name, (title, function) in WORKLOADS.items():
        if name not in chosen or function in done:
            continue
        done.add(function)
        since = time.monotonic()
        bench.begin(title)
        bench.say(title)
        try:
            function(bench)
        except Exception as error:  # the others are worth measuring all the same
            bench.results.failed(title, "all", repr(error))
            bench.say("".join(traceback.format_exception(error)))
        bench.results.about.setdefault("seconds", {})[name] = round(time.monotonic() - since)
        gc.collect()


def _listen(bench: Bench) -> None:
    """Report the complaints in the logs of wdsfs."""
    for system in bench.systems.values():
        if isinstance(system, systems.Wdsfs):
            for log in sorted(bench.sets.home.glob(f"*/{system.name}/log")):
                lines = log.read_text(errors="replace").splitlines()
                odd = [line for line in lines if systems.is_complaint(line)]
                for line in sorted(set(odd))[:10]:
                    bench.results.note(f"log of {system.name}, {odd.count(line)} x: {line}")


def _place(arguments: argparse.Namespace) -> Path:
    if arguments.data:
        arguments.data.mkdir(parents=True, exist_ok=True)
        return Path(arguments.data).resolve()
    (ROOT / "build").mkdir(exist_ok=True)
    _remove_leftovers()
    place = Path(tempfile.mkdtemp(prefix=f"bench-{os.getpid()}-", dir=(ROOT / "build").resolve()))
    free = shutil.disk_usage(place).free
    if free < ROOM and not arguments.tiny:
        place.rmdir()
        sys.exit(f"bench: {free >> 30} GiB are free below {place.parent}; name another place: --data DIRECTORY")
    return place


def _remove_leftovers() -> None:
    """What runs that were killed have left."""
    for place in (ROOT / "build").glob("bench-*-*"):
        if not Path("/proc", place.name.split("-")[1]).exists():
            systems.clear(place)
            shutil.rmtree(place, ignore_errors=True)


def _systems(
    arguments: argparse.Namespace, results: report.Results, say: systems.Say
) -> dict[str, systems.System]:
    every = systems.systems(say, arguments.mount_options, arguments.base)
    names = [*(arguments.systems or every), "wdsfs-base"]
    chosen = {}
    for name, system in every.items():
        if name in names:
            why = system.absent()
            if why:
                results.absent(name, why)
                say(f"absent: {name}: {why}")
            else:
                chosen[name] = system
    return chosen


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = list(systems.systems(print, ""))
    known = [*WORKLOADS, *GROUPS]
    parser.add_argument("--only", type=_names(known), metavar="WORKLOAD,...", help=", ".join(known))
    parser.add_argument("--systems", type=_names(every), metavar="NAME,...", help=", ".join(every))
    parser.add_argument("--repetitions", type=int, metavar="N", help="of each measurement (3; training: 5)")
    parser.add_argument("--limit", type=float, default=120, metavar="SECONDS", help="for a single step (120)")
    parser.add_argument("--mount-options", default="", metavar="TEXT", help="for wdsfs, as in '--workers 4'")
    parser.add_argument("--base", default="", metavar="PROGRAM", help="`wdsfs` of another build, to compare with")
    parser.add_argument("--data", type=Path, metavar="DIRECTORY", help="keep the data here, and use it again")
    parser.add_argument("--out", type=Path, metavar="FILE", help="save the JSON of a partial run here")
    parser.add_argument(
        "--from", dest="saved", type=Path, nargs="+", metavar="FILE", help="show saved runs as one"
    )
    parser.add_argument("--chart", type=Path, metavar="FILE.svg", help="draw the chart of the README")
    parser.add_argument("--tiny", action="store_true", help="little data; the numbers mean nothing")
    parser.add_argument("--large", action="store_true", help="10 million samples for memory and mount time")
    sizes = parser.add_argument_group("sizes of the data")
    for field in dataclasses.fields(data.Sizes):
        option = "--" + field.name.replace("_", "-")
        sizes.add_argument(option, dest=field.name, type=int, metavar="N", help=f"({field.default})")
    arguments = parser.parse_args()
    base = data.TINY if arguments.tiny else data.Sizes()
    _spell_out(arguments)
    arguments.repetitions = arguments.repetitions or (5 if arguments.only == ["training"] else 3)
    given = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(base)}
    changes = {name: value for name, value in given.items() if value is not None}
    if arguments.large:
        changes["memory_samples"] = data.LARGE_MEMORY_SAMPLES
    arguments.sizes = dataclasses.replace(base, **changes)
    return arguments


def _spell_out(arguments: argparse.Namespace) -> None:
    """Put workloads and systems in the place of the names of groups."""
    for name in arguments.only or ():
        if name in GROUPS:
            workloads, systems = GROUPS[name]
            arguments.only = [*arguments.only, *workloads]
            arguments.systems = arguments.systems or systems


def _names(known: list[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(known)}")
        return names

    return parse


if __name__ == "__main__":
    sys.exit(main())
