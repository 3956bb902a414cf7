"""Records the first steps of the README as a terminal shows them, so that the picture is what the program does.

    python .ci/recording.py      writes docs/images/session.cast (asciinema, version 2) and session.svg

The commands are typed in a temporary directory. A test compares the recording with the README.
"""

import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich import terminal_theme
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
CAST = ROOT / "docs" / "images" / "session.cast"
WIDTH = 100
KEY, PAUSE = 0.03, 0.9  # seconds for a key, and before the next command
SHOWN = 2  # seconds that the end is shown before the session is played


def commands() -> list[str]:
    """Return the commands of the README's first steps."""
    steps = (ROOT / "README.md").read_text().partition("\n## First steps\n")[2].partition("\n## ")[0]
    return re.findall(r"^\$ (.*)$", steps, re.MULTILINE)


def play(home: Path) -> list[tuple[str, str]]:
    """Return each command with its answer."""
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
    environment = {**os.environ, "PATH": path, "LC_ALL": "C.UTF-8", "WDSFS_INDEX_DIR": str(home / "index")}
    answers = []
    try:
        for command in commands():
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=home / "data",
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=True,
            )
            answers.append((command, done.stdout))
    finally:
        if (home / "data" / "mnt").is_mount():
            subprocess.run(["wdsfs", "umount", "--lazy", home / "data" / "mnt"], env=environment, check=False)
    return answers


def cast(answers: list[tuple[str, str]]) -> str:
    """Return the recording for asciinema."""
    events: list[tuple[float, str]] = []
    now = 0.0
    for command, answer in answers:
        events.append((now, "\x1b[1;32m$\x1b[0m "))
        for key in command:
            now += KEY
            events.append((now, key))
        events.append((now + KEY, "\r\n" + answer.replace("\n", "\r\n")))
        now += PAUSE
    head = {"version": 2, "width": WIDTH, "height": sum(1 + answer.count("\n") for _, answer in answers) + 1}
    lines = [json.dumps(head), *(json.dumps([round(at, 2), "o", text]) for at, text in events)]
    return "\n".join(lines) + "\n"


def picture(answers: list[tuple[str, str]]) -> str:
    """Return an SVG of the whole session, which then plays it line by line.

    A viewer without animation, or a preview of the first frame, shows the end. The fonts are the viewer's.
    """
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, highlight=False)
    times: list[float] = []
    now = 0.0
    for command, answer in answers:
        console.print(Text.assemble(("$", "bold green"), " ", (command, "bold")))
        console.print(answer, end="", markup=False)
        times += [now, *[now + KEY * len(command)] * answer.count("\n")]
        now += KEY * len(command) + PAUSE
    svg = console.export_svg(title="wdsfs", theme=terminal_theme.MONOKAI, unique_id="session")
    svg = re.sub(r"@font-face {.*?}", "", svg, flags=re.DOTALL).replace("Fira Code, monospace", "monospace")
    # A line is drawn by elements that are clipped to it.
    rules = [
        f'[clip-path="url(#session-line-{line})"] {{ animation: hide {at:.2f}s {SHOWN}s }}'
        for line, at in enumerate(times)
    ]
    style = "@media (prefers-reduced-motion: no-preference) {\n" + "\n".join(rules) + "\n}"
    return svg.replace("</style>", f"@keyframes hide {{ from, to {{ opacity: 0 }} }}\n{style}\n</style>", 1)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="wdsfs-recording-") as place:
        (Path(place) / "data").mkdir()
        answers = play(Path(place))
    CAST.write_text(cast(answers))
    CAST.with_suffix(".svg").write_text(picture(answers))
