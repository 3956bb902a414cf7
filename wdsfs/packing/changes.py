"""The changes of an overlay, as samples and members of shards, and the reasons why something cannot be packed.

`packing/diff.py` finds it; `wdsfs diff` prints it, and `packing/overlay_source.py` plans a commit from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from wdsfs.overlay.upper_format import UpperNode
from wdsfs.packing.plan import NewMember, Remark
from wdsfs.storage.identity import GONE, Fingerprint

ADDED, CHANGED, REMOVED, RENAMED, TIME = "added", "changed", "removed", "renamed", "time only"

# Why something cannot be packed.
OUTSIDE = "is outside of a sample: a sample's files are in a directory of its own, below that of a shard"
OUTSIDE_MERGED = "is outside of a sample: a sample's files are in a directory of its own"
OUTSIDE_FILES = "is outside of the shards: files of samples are below the directory of a shard, or below a new one"
NO_EXTENSION = "has no extension, so it would be in no sample"
HIDDEN = "its name would start with a dot, which readers skip"
META = "a name like __this__ at the top belongs to the set, not to a sample"
DOTTED_KEY = "the name of the sample has a dot: readers would end the key there"
ODD_FOLDER = "the name of its folder would be read as another one"
OTHER_STEM = "does not start with the name of its sample and a dot"
ONLY_CASE = "differs from another file of its sample only in letter case: readers take the two for one"
RESERVED = "readers keep something of their own under this name: the webdataset library stops at such a column"
OF_MOUNT = "is the name under which a mount tells about itself: give it another one"
SYMBOLIC = "is a symbolic link"
SPECIAL = "is no regular file, but a fifo, a socket or a device"
# Reasons that would also damage other samples.
TWICE = "would have the same name in the tar as another file"
OLD_STEM = "does not start with the name of its directory and a dot: a sample is renamed together with its files"
MEETING = "would make one sample of two with the same key: rename one of them"
LINKED = "has hard links in the shard, which cannot be changed"
DOUBLED = (
    "has an extension twice, in members that lie apart: side by side readers refuse them; remove or rename one"
)
# Left out unless asked for.
LEAVING = "looks like what an editor or a desktop has left behind; --with-leavings packs it"
# Notes: nothing is left out.
JOINED = "is several tars joined: a commit makes one of them, which every reader sees whole"
APART = "has samples whose members lie apart: a commit puts them side by side, as other readers need them"
EMPTY_DIRECTORY = "is an empty directory, and a tar of samples has none"
DANGLING = "hides nothing: there is nothing of this name below"
TIME_IGNORED = "has another time than in the shard and the same content"
UNEXTRACTABLE = "tar cannot extract a member of this name"
FILE_AND_FOLDER = (
    "tar cannot extract it: another member needs a directory where this is a file, or the other way round"
)
SAME = "has what the shard has; another mode, owner or attribute has no place in a tar of samples"


class ChangedSample(NamedTuple):
    """A sample that differs from the lower, with the extensions concerned.

    `was` is the former path of a renamed one. `times`: extensions with the same content and another time.
    """

    kind: str
    path: bytes
    added: tuple[bytes, ...] = ()
    changed: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    was: bytes = b""
    times: tuple[bytes, ...] = ()


class Rules(NamedTuple):
    """Rules of what is a change: leftovers of programs; a different time (whole seconds) alone."""

    with_leavings: bool = False
    ignore_times: bool = False


class NewSample(NamedTuple):
    """A new sample: its key, and its members in order."""

    key: bytes
    members: tuple[NewMember, ...]


@dataclass(slots=True)
class ShardChanges:
    """The changes of a shard. Members and entries are numbers in its record.

    `members`: for each changed member its replacements, none if it is removed. `following`: the new members that
    follow each one. `appended`: whole samples at the end. `entries`: the samples that stay and change.
    `fingerprint` is that of the record with these numbers.
    """

    members: dict[int, tuple[NewMember, ...]] = field(default_factory=dict)
    following: dict[int, tuple[NewMember, ...]] = field(default_factory=dict)
    appended: list[NewSample] = field(default_factory=list)
    entries: set[int] = field(default_factory=set)
    fingerprint: Fingerprint = GONE

    def __bool__(self) -> bool:
        return bool(self.members or self.following or self.appended)


@dataclass(slots=True)
class Changes:
    """All that an overlay changes.

    `shards` has the changed ones by number; `further` the samples of each new shard directory, by its path (all in
    one for a merged tree). `samples` and `others` (members of no sample) are what `diff` shows, in the order of
    the shards and their tars, then of the paths. A commit that must lose nothing needs an empty `unpackable`; no
    commit can resolve `conflicts`; `leavings` are not packed; `notes` are harmless.

    `upper` is the tree that was compared. `covered` are the paths of its files that need not be written: the shard
    has the same, or they are further names of a file that is written. A commit accounts for all others.
    """

    shards: dict[int, ShardChanges] = field(default_factory=dict)
    further: dict[bytes, list[NewSample]] = field(default_factory=dict)
    samples: list[ChangedSample] = field(default_factory=list)
    others: list[ChangedSample] = field(default_factory=list)
    unpackable: list[Remark] = field(default_factory=list)
    conflicts: list[Remark] = field(default_factory=list)
    notes: list[Remark] = field(default_factory=list)
    leavings: list[Remark] = field(default_factory=list)
    upper: UpperNode | None = field(default=None, compare=False)
    covered: set[bytes] = field(default_factory=set, compare=False)
