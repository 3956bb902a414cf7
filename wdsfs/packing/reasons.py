"""Reasons why a file cannot be packed: the one rule of all writers for a name in the tar, and the texts for users.

Remarks about files that can be packed are here, too.
"""

from __future__ import annotations

from wdsfs import names
from wdsfs.tar import headers

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
RESERVED_COLUMN = (
    "readers use this name for themselves: the webdataset library stops at such a column; rename the file"
)
TOO_LONG = "its path is too long for readers, which would leave it out"
OF_MOUNT = "a mount uses this name for itself: rename the file"
SYMBOLIC = "is a symbolic link"
SPECIAL = "is not a regular file, but a fifo, a socket or a device"
# Reasons that would also damage other samples.
TWICE = "would have the same name in the tar as another file"
OLD_STEM = "does not start with the name of its directory and a dot: a sample is renamed together with its files"
MEETING = "would make one sample of two with the same key: rename one of them"
LINKED = "has hard links in the shard, which cannot be changed"
# Left out unless asked for.
LEAVING = "looks like a leftover of an editor or a desktop; --with-leavings packs it"
# Notes: nothing is left out.
EMPTY_DIRECTORY = "is an empty directory, and a tar of samples has none"
DANGLING = "hides nothing: there is nothing of this name below"
TIME_IGNORED = "has another time than in the shard and the same content"
UNEXTRACTABLE = "tar cannot extract a member of this name"
FILE_AND_FOLDER = (
    "tar cannot extract it: another member needs a directory where this is a file, or the other way round"
)
FOLDER = (
    "is one sample with all its files as columns, since each directory is a sample: if each file is a sample, "
    "give it a directory of its own (1/jpg instead of 1.jpg), or pack the folder: wdsfs pack --layout classes"
)
FOLDER_TOO = "is one sample with all its files as columns, too"
SAME = "has the content of the shard; a tar of samples has no place for another mode, owner or attribute"
ESCAPED = "reads like the escape of another name; a mount of the new shards shows it as"


def misread(key: bytes, extension: bytes) -> str | None:
    """Return why readers would not find a member of this extension in the sample of this key; None if they would.

    Semantics decision: what a mount shows can be packed. So an extension may be empty, or begin with a dot.
    """
    return _misread(key, extension, names.lower_case(extension))


def _misread(key: bytes, extension: bytes, lower: bytes) -> str | None:
    if lower in names.RESERVED:
        return RESERVED_COLUMN
    name = key + b"." + extension
    shown = names.raw_key(name)
    if shown is None:
        base = names.split_folder(key)[1]
        return HIDDEN if not base or base.startswith(b".") else META
    if shown != key:
        return DOTTED_KEY
    limit = headers.name_beyond_limit(name)
    return None if limit is None else f"{TOO_LONG}: {limit}"


def obstacle(key: bytes, extension: bytes, taken: set[bytes]) -> str | None:
    """Return why a sample cannot take a member of this extension; if it can, add the extension to `taken`.

    `taken` has the extensions of the sample so far, in lower case.
    """
    lower = names.lower_case(extension)
    reason = _misread(key, extension, lower) or (ONLY_CASE if lower in taken else None)
    if reason is None:
        taken.add(lower)
    return reason
