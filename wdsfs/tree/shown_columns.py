"""What a tree shows of a whole shard, in columns: for work over all names at once.

The same as `ShardTree.listing` says directory by directory; of a merged tree it is what the shard wants to show,
and `merged_columns.py` makes of it what is shown. Names that need a second look (aliases, links, samples in the
directory of a folder) are few, and are put into the columns one by one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from wdsfs.index.record import BY_EXTENSION, LINK, STRAY, TWIN, Record
from wdsfs.inodes import FOLDER, INDEX_MAX, MEMBER, SAMPLE, pack, position
from wdsfs.tree.shard_tree import ShardTree
from wdsfs.tree.texts import Ints, Texts
from wdsfs.tree.tree import Node

_DOT = np.frombuffer(b".", np.uint8)


class ShownColumns(NamedTuple):
    """What is shown of a shard.

    Directories are numbered: those of folders, then those of samples, in the order of the record. `folders` are
    the nodes of folder directories, the top first. `folder_holder` and `sample_holder` are the directories that
    they are in (-1: the top's). `samples` are entries of the record, with the times (ns) of their directories.

    Of each file `members` is where it is in the record, `links` how many names it has, `sizes` its bytes,
    `mtimes_ns` its time; `targets` are those of symbolic links, by the number of the file. A file has one name
    here, or several: hard links in the files layout. `name_file` is the file of a name, `name_member` the member
    that it is of, `name_holder` the directory. `names` are those of the folders (without the top), of the samples,
    and of files.
    """

    folders: list[Node]
    folder_holder: Ints
    samples: Ints
    sample_holder: Ints
    sample_mtime_ns: Ints
    members: Ints
    links: Ints
    sizes: Ints
    mtimes_ns: Ints
    targets: dict[int, bytes]
    name_file: Ints
    name_member: Ints
    name_holder: Ints
    names: Texts


def columns_of(tree: ShardTree, number: int) -> ShownColumns:
    """The columns of a shard of a tree. Raises what `ShardTree.listing` raises."""
    record = tree.lower.record(number)
    shown = [n for n in range(record.folders) if not n or tree.names.is_shown(record, n)]
    at = np.full(record.folders, -1, np.int64)  # the directory of each folder
    at[shown] = np.arange(len(shown))
    holder = at[record.array("folder.parent")[shown].astype(np.int64)]
    holder[0] = -1
    entry_folder = np.repeat(np.arange(record.folders), _steps(record.array("folder.entry").astype(np.int64)))
    bounds = record.array("entry.member").astype(np.int64)
    flags = record.array("entry.flags")
    names = [Texts.of([record.folder_name[n] for n in shown[1:]])]
    if tree.files_layout:
        samples = np.zeros(0, np.int64)
        directory = at[entry_folder]  # of the files of each entry
        listed = _members_with_names(record)
        names.append(_file_names(record, listed))
    else:
        apart = flags & (0 if tree.merged else TWIN)
        samples = np.flatnonzero((flags & STRAY | apart) == 0)
        directory = np.full(record.entries, -1, np.int64)
        directory[samples] = np.arange(len(samples)) + len(shown)
        for entry in np.flatnonzero(apart).tolist():
            folder = record.twin_folder(entry)
            assert folder is not None
            directory[entry] = at[folder]
        listed = np.flatnonzero(np.repeat((flags & STRAY) == 0, _steps(bounds)))
        names.append(_packed(record, "entry.name").take(samples))
        if tree.domain == BY_EXTENSION:
            extensions = record.array("member.ext")[listed].astype(np.int64)
            names.append(_packed(record, "ext.name").take(extensions))
        else:
            names.append(_file_names(record, listed))
    members, name_file = _without_hard_links(record, listed)
    targets, sizes = _symbolic_links(record, members)
    tag = tree.lower.tag(number)
    return ShownColumns(
        folders=[tree.getattr(pack(tag, number, position(FOLDER, n))) for n in shown],
        folder_holder=holder,
        samples=samples,
        sample_holder=at[entry_folder[samples]],
        sample_mtime_ns=record.mtimes_ns(bounds[:-1][samples]),
        members=members,
        links=_link_counts(record)[members],
        sizes=sizes,
        mtimes_ns=record.mtimes_ns(members),
        targets=targets,
        name_file=name_file,
        name_member=listed,
        name_holder=np.repeat(directory, _steps(bounds))[listed],
        names=_with_aliases(
            record, tree.domain, Texts.joined(names), (np.array(shown[1:], np.int64), samples, listed)
        ),
    )


def _steps(bounds: Ints) -> Ints:
    return bounds[1:] - bounds[:-1]


def _packed(record: Record, section: str) -> Texts:
    return Texts.packed(record.array(section), record.array(f"{section}.start"))


def _file_names(record: Record, members: Ints) -> Texts:
    """The plain names of members, with their extensions."""
    entry = np.repeat(np.arange(record.entries), _steps(record.array("entry.member").astype(np.int64)))[members]
    samples = (record.array("entry.flags")[entry] & STRAY) == 0  # others have no extension
    extension = np.where(samples, record.array("member.ext")[members], 0)
    suffixes = _packed(record, "ext.name").take(extension) if samples.any() else Texts.of([b""] * len(members))
    return Texts.chained(
        [
            _packed(record, "entry.name").take(entry),
            Texts(_DOT, np.zeros(len(members), np.int64), samples.astype(np.int64)),
            suffixes._replace(lengths=np.where(samples, suffixes.lengths, 0)),
        ]
    )


def _members_with_names(record: Record) -> Ints:
    """The members that the files layout shows: all but hard links that lead nowhere."""
    leads_nowhere = np.repeat(
        (record.array("entry.flags") & LINK) != 0, _steps(record.array("entry.member").astype(np.int64))
    )
    if "link.member" in record.column:
        leads_nowhere[record.array("link.member")] = False
    return np.flatnonzero(~leads_nowhere)


def _without_hard_links(record: Record, listed: Ints) -> tuple[Ints, Ints]:
    """The members that are files, and for each listed name its file among these."""
    if "link.member" not in record.column:
        return listed, np.arange(len(listed))
    targets = np.arange(record.members)
    targets[record.array("link.member").astype(np.int64)] = record.array("link.target")
    members, file = np.unique(targets[listed], return_inverse=True)
    return members, file.reshape(-1)


def _link_counts(record: Record) -> Ints:
    found = np.ones(record.members, np.int64)
    if "linked.member" in record.column:
        found[record.array("linked.member").astype(np.int64)] = record.array("linked.count")
    return found


def _symbolic_links(record: Record, members: Ints) -> tuple[dict[int, bytes], Ints]:
    """Where those among these members lead, and the sizes (bytes) of all."""
    sizes = record.array("member.size")[members].astype(np.int64)
    if "symlink.member" not in record.column:
        return {}, sizes
    links = np.flatnonzero(np.isin(members, record.symlinks())).tolist()
    targets = {file: record.symlink(int(members[file])) or b"" for file in links}
    sizes[links] = [len(one) for one in targets.values()]
    return targets, sizes


def _with_aliases(record: Record, domain: int, names: Texts, named: tuple[Ints, Ints, Ints]) -> Texts:
    """Names, with those instead that differ from the plain ones; `named` are the folders, samples and members."""
    aliases = record.aliases[domain]
    if aliases is None:
        return names
    child = np.asarray(aliases.child).astype(np.int64)
    rows = np.full(len(child), -1, np.int64)
    before = 0
    for kind, shown in zip((FOLDER, SAMPLE, MEMBER), named, strict=True):
        its = np.flatnonzero(child >> 30 == kind)
        index, found = child[its] & INDEX_MAX, np.zeros(0, np.int64)
        if len(shown):
            found = np.minimum(np.searchsorted(shown, index), len(shown) - 1)
            rows[its] = np.where(shown[found] == index, found + before, -1)
        before += len(shown)
    chosen = np.flatnonzero(rows >= 0)
    others = Texts.packed(np.asarray(aliases.name.text), np.asarray(aliases.name.starts))
    return names.replaced(rows[chosen], others.take(chosen))
