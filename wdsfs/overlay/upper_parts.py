"""The parts of an upper that every change of its names needs."""

from __future__ import annotations

from typing import NamedTuple

from wdsfs.overlay.orphans import Orphans
from wdsfs.overlay.staging import Staging
from wdsfs.overlay.system_calls import SystemCalls
from wdsfs.overlay.upper_attributes import AttributeRules
from wdsfs.overlay.upper_descriptors import Descriptors
from wdsfs.overlay.whiteouts import Whiteouts


class UpperParts(NamedTuple):
    """The parts that `NewEntries` and `NameChanges` share; made once, by `UpperDirectory`."""

    descriptors: Descriptors
    staging: Staging
    attributes: AttributeRules
    whiteouts: Whiteouts
    orphans: Orphans
    calls: SystemCalls
