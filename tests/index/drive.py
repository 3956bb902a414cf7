"""Drives commands with `--executor` in one process: an engine takes seconds to import, and a cluster to start.

    python drive.py HOME NAME [deadly] [index] [few] [all]

Some commands, or `few`, or `all`, are run here and on the cluster; or `index` alone, and only there. `deadly`
kills a worker in the middle of some. Started by test_clusters.py with the Python that has the engines.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from unittest import mock

from tests.index import dying
from wdsfs.cli.main import main
from wdsfs.index import store
from wdsfs.packing import cluster_units

SET = "set/s*.tar"


def wdsfs(*words: str) -> None:
    try:
        code = main([*words], standalone_mode=False, prog_name="wdsfs")
    except SystemExit as end:
        code = end.code
    assert code in (None, 0), (words, code)


@contextlib.contextmanager
def deadly(wanted: bool) -> Iterator[None]:
    with contextlib.ExitStack() as patches:
        if wanted:
            patches.enter_context(mock.patch.object(store, "build_file", dying.build_file))
            patches.enter_context(mock.patch.object(cluster_units, "write", dying.write))
        yield


def run(where: str, more: list[str], *executor: str) -> None:
    """What a cluster can do, with results in directories called so."""
    index = ("--index-dir", f"index-{where}")
    wdsfs("index", SET, *index, *executor)
    if "few" not in more:
        wdsfs("export", "-o", f"export-{where}", SET, *index, *executor)
    shutil.copytree("edits", f"edits-{where}/upper")
    wdsfs("commit", "--overlay", f"edits-{where}", "-o", f"new-{where}/%d.tar", SET, *index, *executor)
    if "all" not in more:
        return
    wdsfs("check", SET, *executor)
    shutil.copytree("set", f"replaced-{where}")
    shutil.copytree("edits", f"more-{where}/upper")
    wdsfs("commit", "--overlay", f"more-{where}", "--in-place", f"replaced-{where}/s*.tar", *index, *executor)


if __name__ == "__main__":
    home, name, *more = sys.argv[1:]
    os.chdir(home)
    if "index" not in more:
        run("here", more)
    with deadly(wanted="deadly" in more):
        if "index" in more:
            wdsfs("index", SET, "--index-dir", "index-there", "--executor", name)
        else:
            run("there", more, "--executor", name)
