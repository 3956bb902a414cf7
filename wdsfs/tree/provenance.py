"""Where a file or sample comes from, as its extended attributes `user.wdsfs.*` say it."""

from __future__ import annotations

from collections.abc import Callable

from wdsfs import inodes, names
from wdsfs.errors import NoSuchAttribute
from wdsfs.index.record import STRAY, Record
from wdsfs.inodes import FOLDER, MEMBER, ROOT, SAMPLE, index_of, kind_of
from wdsfs.tar.member_reader import read_name
from wdsfs.tree.content import check_unchanged
from wdsfs.tree.shard_set import ShardSet
from wdsfs.tree.tree import XATTR, text_of


class Provenance:
    """The extended attributes of what a set shows. `open_record` returns an inode's shard, record and position."""

    def __init__(self, lower: ShardSet, open_record: Callable[[int], tuple[int, Record, int]]) -> None:
        self.lower, self._open = lower, open_record

    def names(self, inode: int) -> list[bytes]:
        """The names of the extended attributes of an inode: exactly those that it has, or `rsync -X` fails."""
        if inode == ROOT:
            return []
        kind = kind_of(inode)
        keys = {FOLDER: [b"shard"], SAMPLE: [b"shard", b"key"]}.get(kind) or self._member_keys(inode)
        return [XATTR + key for key in keys]

    def _member_keys(self, inode: int) -> list[bytes]:
        number, record, where = self._open(inode)
        member = index_of(where)
        if record.symlink(member) is not None:
            return []  # in the kernel no symbolic link has attributes of users
        made_up = self.lower.origin(number, member) is None
        stray = record.entry_flags[record.entry_of(member)] & STRAY
        return [b"shard", *([] if stray else [b"key"]), b"member", *([] if made_up else [b"offset"])]

    def value(self, inode: int, name: bytes) -> bytes:
        """The value of an extended attribute. Raises NoSuchAttribute.

        `shard` is the absolute path of the tar; `key` the key of the sample and `member` the whole name of the
        file, both as in the tar, without escapes; `offset` the byte in the shard at which the content starts. For
        a file that is no member of any shard (a label), `shard` is the file that it comes from, and `member` its
        own name.
        """
        if name not in self.names(inode):
            raise NoSuchAttribute(f"no attribute {text_of(name)}")
        number, record, where = self._open(inode)
        what = name.removeprefix(XATTR)
        if what == b"shard" and kind_of(where) != MEMBER:
            return self.lower.shards[number].path
        member = index_of(where) if kind_of(where) == MEMBER else record.entry_member[index_of(where)]
        origin = self.lower.origin(number, member)
        if origin is None:
            return self._made_up(inode, what)
        below, number, member = origin
        if what == b"shard":
            return below.shards[number].path
        tag = below.tag(number)
        place = below.record(number, tag).member(member)
        if what == b"offset":
            return b"%d" % place.data
        content = below.content(number, tag, member)
        raw = read_name(content.file.source, place.head)
        check_unchanged(content)
        key = names.raw_key(raw)
        if what == b"member":
            return raw
        if key is None:
            raise NoSuchAttribute(f"{text_of(raw)} is in no sample")
        return key

    def _made_up(self, inode: int, what: bytes) -> bytes:
        """The value of an attribute of a file that is no member of a shard. Raises NoSuchAttribute."""
        _, record, where = self._open(inode)
        if what == b"shard":
            tag, number, where = inodes.unpack(inode)
            return self.lower.content(number, tag, index_of(where)).file.path
        entry = record.entry_of(index_of(where)) if kind_of(where) == MEMBER else index_of(where)
        key = record.entry_path(entry)
        if what == b"offset":
            raise NoSuchAttribute("it is no member of a shard, so it has no offset there")
        return key if what == b"key" else key + b"." + record.extension(index_of(where))
