"""Makes the manual page and the completions of shells, by the program itself, when a wheel is built."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SHARED = {
    "share/man/man1/wdsfs.1": ("man",),
    "share/bash-completion/completions/wdsfs": ("completion", "bash"),
    "share/zsh/site-functions/_wdsfs": ("completion", "zsh"),
    "share/fish/vendor_completions.d/wdsfs.fish": ("completion", "fish"),
}


class SharedFiles(BuildHookInterface):
    """Adds these files to the wheel, which installs them below the prefix of the environment."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        for name, words in SHARED.items():
            file = Path(self.root, "build", name)
            file.parent.mkdir(parents=True, exist_ok=True)
            # In front of what is there: pip's isolated builds find their packages by this variable.
            path = os.pathsep.join(filter(None, (self.root, os.environ.get("PYTHONPATH"))))
            environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
            command = [sys.executable, "-m", "wdsfs", *words]
            file.write_bytes(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
            build_data["shared_data"][str(file)] = name
