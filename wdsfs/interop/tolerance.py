"""Which damage of a set a command tolerates. What that means is decided in `soundness.py`."""

from __future__ import annotations

from typing import NamedTuple

from wdsfs.errors import UsageError


class Tolerance(NamedTuple):
    """`--allow-missing`: shards that cannot be read may be missing; `strict`: nothing may be wrong at all.

    `is_option` is False where neither option is for the user to give: what shows a mount, or shows or undoes its
    changes, makes no set of its own.
    """

    allow_missing: bool = False
    strict: bool = False
    is_option: bool = True

    def check(self) -> Tolerance:
        """Raises UsageError where both are asked for."""
        if self.allow_missing and self.strict:
            raise UsageError("--allow-missing and --strict contradict each other")
        return self
