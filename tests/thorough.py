"""How far random tests search: some examples in each run, and `WDSFS_THOROUGH=10` times as many when that is set.

Outside of continuous integration each run looks at other examples, so that many runs look at many.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

THOROUGH = int(os.environ.get("WDSFS_THOROUGH", "1"))


def examples(count: int) -> settings:
    """The decorator for a test of so many examples a run."""
    return settings(max_examples=count * THOROUGH, suppress_health_check=[HealthCheck.too_slow])
