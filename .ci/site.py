"""`make docs`: the site of the documents, in build/site. It needs what docs/requirements.txt names.

The generator reads one directory. So README, docs/ and the files that pages link to are copied into
build/site-source, in their places, and all links between them hold; a link or an anchor that leads nowhere ends
this with an error.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE, SITE = ROOT / "build" / "site-source", ROOT / "build" / "site"
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "docs/**/*.md",
    "docs/images/*",
    "kubernetes/*.yaml",
    "slurm/*.sh",
    "bench/*.md",
    "bench/results/*.md",
    "bench/*.svg",
]
SHIM = "https://unpkg.com/iframe-worker/shim"  # of the generator; a site that is read offline has its own


def main() -> int:
    shutil.rmtree(SOURCE, ignore_errors=True)
    for pattern in PAGES:
        for page in ROOT.glob(pattern):
            copy = SOURCE / page.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(page, copy)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
        return 1
    worker = Path(shutil.copy(ROOT / ".ci" / "worker.js", SITE / "assets"))
    for page in SITE.rglob("*.html"):
        page.write_text(page.read_text().replace(SHIM, os.path.relpath(worker, page.parent)))
    print(f"the site is in {SITE.relative_to(ROOT)}: open {SITE.relative_to(ROOT)}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
