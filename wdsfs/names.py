"""Member names: splits them into key and extension, and turns them into names that a file system can show.

The one home of each naming decision; docs/reference/semantics.md explains them to users. Pure functions over
bytes: no disks, no FUSE, no state.

A member name such as `images17/image194.left.jpg` has the key `images17/image194` and the extension
`left.jpg`. The part of the key after the last slash is its stem, the part before it its folder.

All shards of a set are read in the same way (`Reading`). In a plain reading a tar ends at its first end mark, a
sample is a run of adjacent members, and a key ends at the first dot. Every reader of the format does so. The
options are for tars of which a plain reading sees only a part, or takes parts of names for columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

KEY_ENDS = ("first-dot", "last-dot")  # the values of --key-ends; the first is the default


class Reading(NamedTuple):
    """`ignore_zeros`: a tar goes on after end marks. `group_by_key`: a sample has all members of its key.

    `last_dot`: a key ends at the last dot of a name, not at the first.
    """

    ignore_zeros: bool = False
    group_by_key: bool = False
    last_dot: bool = False

    @property
    def is_plain(self) -> bool:
        return self == PLAIN

    @property
    def arguments(self) -> list[str]:
        """The command line options that select this reading."""
        last_dot = ["--key-ends", KEY_ENDS[1]] * self.last_dot
        return ["--ignore-zeros"] * self.ignore_zeros + ["--group-by-key"] * self.group_by_key + last_dot

    def as_json(self) -> dict[str, bool]:
        """Return the options as arguments of `Reading`; `last_dot` only if set: other releases do not know it."""
        return {name: on for name, on in self._asdict().items() if on or name in ("ignore_zeros", "group_by_key")}

    def marks(self) -> list[int] | None:
        """Return a new list for `scan.scan`, which reads on after end marks if it gets one; else None."""
        return [] if self.ignore_zeros else None

    @property
    def mark(self) -> bytes:
        """The part of a record's key after the path of the shard; empty for a plain reading."""
        return b"" if self.is_plain else b"\0" + " ".join(self.arguments).encode()


PLAIN = Reading()


HIDDEN_DIRECTORY = b".wdsfs"  # at the top of a mount by FUSE; see `mount/hidden_directory.py`
NAME_MAX = 255  # bytes; what tools assume of a file name, and what statfs reports

# Suffixes of shards. The first is the default. GNU tar (`-a`) and ratarmount know the others. `.tlz` (lzma, lzip)
# is missing: nothing here unpacks it.
SHARD_SUFFIXES = (
    b".tar",
    *(b".tar.gz", b".tgz", b".taz"),
    *(b".tar.bz2", b".tbz2", b".tbz", b".tb2", b".tz2"),
    *(b".tar.xz", b".txz"),
    *(b".tar.zst", b".tzst"),
)
SHARD_SUFFIXES_OF_ANY_CASE = (*SHARD_SUFFIXES, *map(bytes.upper, SHARD_SUFFIXES))  # some systems write A.TAR

# Parts of a name that may need an escape: a percent sign, a NUL, an empty component, and "." or ".." as a whole
# component.
_ODD = (b"%", b"\0", b"//", b"/./", b"/../")
_ESCAPED = re.compile(rb"%(00|25|2E)")

# Images, sound and films, by the end of their names: what loaders look for in directories.
MEDIA = frozenset(
    b"jpg jpeg png webp gif bmp tif tiff ppm pgm pbm avif jxl wav flac mp3 ogg opus m4a mp4 mkv webm mov".split()
)

# Names that readers use in a sample beside its columns. A column of this name stops the webdataset library.
RESERVED = frozenset((b"__key__", b"__url__", b"__local_path__"))

# Semantics decision: what editors, desktops and file systems leave in directories is no column of a sample.
_LEAVING = re.compile(
    rb"""
      \..+\.sw(?:px?|[a-px])     # vim: swap files
    | 4913                       #      the file by which it tries a directory
    | .+~                        # Emacs, vim, gedit, kate: the version before
    | \#.+\#                     # Emacs: what is not saved yet
    | \.\#.+                     #      a lock, which is a symbolic link to nothing
    | \.~lock\..+\#              # LibreOffice: a lock
    | \..+\.kate-swp             # kate: a swap file
    | \.goutputstream-.+         # GNOME: a file that is being saved
    # rsync: a file that is being copied. Its six signs are random; only those are taken that look it, seven of
    # eight, so that `.x.sha256` or `.x.tensor` is a column.
    | \..+\.(?=[A-Za-z0-9]*[a-z0-9][A-Z])[A-Za-z0-9]{6}
    | \.DS_Store | \._.+         # macOS
    | Thumbs\.db | ehthumbs\.db | [Dd]esktop\.ini        # Windows
    | \.directory                # KDE
    | \.fuse_hidden.+ | \.nfs[0-9a-f]+                   # removed while open
    """,
    re.VERBOSE | re.DOTALL,
)
_LEAVING_STARTS = b".#4TeDd"
_LEAVINGS = frozenset(  # directories of such
    (
        b".ipynb_checkpoints",
        b"__MACOSX",
        b".AppleDouble",
        b"@eaDir",
        b".Spotlight-V100",
        b".fseventsd",
        b".Trashes",
    )
)
_TRASH = b".Trash-"

_PATH_MAX = 4095  # bytes


class Split(NamedTuple):
    """A sample member's name: `folder` (raw, with its last slash; empty at the top), stem, extension."""

    folder: bytes
    stem: bytes
    extension: bytes


def split(name: bytes, *, last_dot: bool = False) -> Split | None:
    """Split a member name into folder, stem and extension; None when the member is in no sample."""
    key = raw_key(name, last_dot=last_dot)
    if key is None:
        return None
    start = key.rfind(b"/") + 1
    return Split(key[:start], key[start:], name[len(key) + 1 :])


# Semantics decision: where keys end at the last dot, a suffix of compression belongs to the extension before it
# (`a.nii.gz`). That begins with a letter: of `11.708.gz` the extension is `gz`.
_COMPRESSED = re.compile(rb"[.][a-z][a-z0-9]*[.](?:gz|bz2|xz|zst|lz4)\Z", re.IGNORECASE)


def raw_key(name: bytes, *, last_dot: bool = False) -> bytes | None:
    """Return the key of the sample that a member belongs to, without escapes; None when it is in no sample.

    The rule is the webdataset library's `base_plus_ext` (`^((?:.*/|)[^.]+)[.]([^/]*)$`): the key ends at the
    first dot after the last slash, everything after that dot is the extension. With `last_dot` the key ends at the
    last dot.
    """
    start = name.rfind(b"/") + 1
    dot = name.find(b".", start)
    # Semantics decision: a name without a dot has no extension and is in no sample (as everywhere).
    # Semantics decision: a base name that starts with a dot is in no sample, as for DALI and Hugging Face. The
    # webdataset library makes `d/.hidden` a sample with the key `d/`, which no tree can show.
    if dot <= start or is_meta(name):
        return None
    return name[: start + len(partition(name[start:], last_dot=True)[0])] if last_dot else name[:dot]


def partition(base: bytes, *, last_dot: bool = False) -> tuple[bytes, bytes, bytes]:
    """Split a base name at the dot at which its key ends, as `bytes.partition` does."""
    if not last_dot or base.startswith(b"."):
        return base.partition(b".")
    double = _COMPRESSED.search(base, 1)
    dot = base.rfind(b".") if double is None else double.start()
    return (base, b"", b"") if dot < 0 else (base[:dot], b".", base[dot + 1 :])


# Semantics decision: new shards of a set with dots in its keys have `_` in their place, and each sample has this
# column with the key as it was.
KEY_COLUMN = b"key.txt"


def without_dots(key: bytes) -> bytes:
    """Return a key as `pack` writes it where keys have dots, which readers would end it at."""
    folder, stem = split_folder(key)
    return folder + stem.replace(b".", b"_")


# Between the first and the last dot of a name, characters of titles and not of extensions: `Track 2.0 (Live).mp3`.
_OF_TITLES = re.compile(rb"[\s()\[\]{},;!&]")
_SHOWN_MAX = 120  # bytes of a name in a message about dots


class DottedNames:
    """The names with several dots in a shard or a tree; tells whether their first dot cuts keys off.

    Of `1.2.840.1000.dcm` the key is `1`, so the images of a folder are columns of one sample. On the other hand
    `a.0.jpg`, `a.512x512.jpg`, `a.seg.png` and `video.000123.jpg` are usual. Extensions of these come again in
    other samples.
    """

    FEW, MANY = 4, 64  # different extensions that prove nothing yet: extensions that begin with a digit; all
    PER_SAMPLE = 16  # different extensions with dots for each sample of a sound set
    AGAIN, SHARE = 2, 4  # members of an extension that is meant: at least two, and one in a quarter of the samples

    def __init__(self) -> None:
        self._all, self._numbers, self._titles = set[int](), set[int](), set[int]()  # hashes of extensions
        self.place, self.name = -1, b""  # of an example
        self._members = 0

    def add(self, name: bytes, extension: bytes, place: int = -1, members: int = 1) -> None:
        """Add a member whose extension has a dot, or the first of several members."""
        self._members += members
        number = hash(extension)
        if number in self._all:
            return
        before, _, _ = extension.rpartition(b".")
        is_title = _OF_TITLES.search(before) is not None
        is_number = before[:1].isdigit() and not before.isdigit()
        if not self._all or ((is_title or is_number) and not (self._titles or self._numbers)):
            self.place, self.name = place, name
        self._all.add(number)
        if is_title:
            self._titles.add(number)
        if is_number:
            self._numbers.add(number)

    def count(self, samples: int) -> int:
        """Return the number of columns that are parts of names, 0 for a sound set of this many samples."""
        every, numbers, titles = map(len, (self._all, self._numbers, self._titles))
        if self._members >= every * max(self.AGAIN, samples / self.SHARE):
            return titles
        if every >= self.MANY and every > self.PER_SAMPLE * samples:
            return every
        return max(titles, numbers if numbers >= self.FEW and 2 * numbers >= samples else 0)

    def text(self, samples: int) -> str:
        """Return a remark about the example if some columns are parts of names; else ""."""
        count = self.count(samples)
        if not count:
            return ""
        stem, _, suffix = self.name.rpartition(b"/")[2].rpartition(b".")
        better = stem.replace(b".", b"_")[:_SHOWN_MAX] + b"." + suffix[:_SHOWN_MAX]
        return (
            f"the key of a sample ends at the first dot of a name, so parts of names become columns, "
            f"{count:,} in {samples:,} sample{'' if samples == 1 else 's'}: use --key-ends last-dot, or rename "
            f"such files, for example to {readable(better)}"
        )


def without_suffix(path: bytes) -> bytes:
    """Return the path of a shard without its suffix: `a/x.tar.gz` -> `a/x`."""
    return path[: len(path) - len(suffix_of(path))]


def suffix_of(path: bytes) -> bytes:
    """Return the suffix that makes a path that of a shard: `a/x.tar.gz` -> `.tar.gz`; empty if it has none."""
    for suffix in SHARD_SUFFIXES:  # a loop of its own: asked of every shard of a set
        if path.endswith(suffix):
            return suffix
    return b""


def split_folder(name: bytes) -> tuple[bytes, bytes]:
    """Split a member name into its folder, with its last slash, and its base name."""
    start = name.rfind(b"/") + 1
    return name[:start], name[start:]


def is_meta(name: bytes) -> bool:
    """Return True if a member belongs to the data set and not to a sample: `__name__` at the top of the shard.

    Semantics decision: exactly the webdataset library's rule, so `__m__/a.json` is meta, but `__m__.json` and
    `d/__m__/a.json` are sample members.
    """
    if not name.startswith(b"__"):
        return False
    top, slash, _ = name.partition(b"/")
    return top.endswith(b"__") and (not slash or len(top) >= 4)


def folder_components(folder: bytes) -> list[bytes]:
    """Return the directories of a raw folder (with its last slash), outermost first.

    Semantics decision: leading `./` mean nothing (`tar c .` writes them) and are dropped, as `tar x` does.
    All other odd components stay and are escaped by `escape`, so that nothing leads out of the mount:
    `/abs/` is the folder `%/abs`, `a//b/` is `a/%/b`, `../up/` is `%2E%2E/up`.
    """
    components = folder.split(b"/")[:-1]
    while components and components[0] == b".":
        del components[0]
    return components


def lower_case(extension: bytes) -> bytes:
    """Return an extension in lower case, as the webdataset library uses it in a sample: `JPG` and `É`, too."""
    if extension.isascii():
        return extension.lower()
    return extension.decode("utf-8", "surrogateescape").lower().encode("utf-8", "surrogateescape")


def is_leaving(name: bytes, *, directory: bool = False) -> bool:
    """Return True if the name is that of a file (or directory) that programs leave lying around.

    No part of a sample.
    """
    if not directory and name[0] not in _LEAVING_STARTS and not name.endswith(b"~"):
        return False  # nearly always
    if directory:
        return name in _LEAVINGS or name.startswith(_TRASH)
    return _LEAVING.fullmatch(name) is not None


def unextractable(name: bytes) -> str | None:
    """Return why `tar` cannot extract a member of this name; None if it can."""
    components = name.split(b"/")
    if b".." in components:
        return "`..` is part of it"
    if max(map(len, components)) > NAME_MAX or len(name) > _PATH_MAX:
        return "it is too long for a file system"
    return "it has a NUL byte" if b"\0" in name else None


def text_of(name: bytes) -> str:
    """Return a name as text that can be turned back into the same bytes."""
    return name.decode("utf-8", "surrogateescape")


def bytes_of(text: str) -> bytes:
    """Invert `text_of`. A lone surrogate, which JSON may have, is encoded like other characters."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def readable(name: bytes) -> str:
    """Return a raw name as text for messages and JSON, cut after 1000 bytes."""
    return name[:1000].decode("utf-8", "backslashreplace") + ("..." if len(name) > 1000 else "")


def shown(text: str) -> str:
    """Return foreign text fit for a terminal, on one line: control characters are escaped.

    All names go through this on their way into messages, logs, tables and lines of results. Errors (`WdsfsError`),
    `log_lines`, `cli/output`, `mount/reports` and others call it; code that raises, logs or prints need not.
    Bytes that are not UTF-8 (`os.fsdecode`) stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or 0xDC80 <= ord(c) <= 0xDCFF else repr(c)[1:-1] for c in text)


def meant(word: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown word: the known word that is most like it, if there is one."""
    close = closest(word, [candidate.rstrip("=") for candidate in known])
    return f"; did you mean {close}?" if close else ""


def closest(word: str, known: Sequence[str]) -> str | None:
    """Return the known word that is most like this one, if it is similar enough."""
    from difflib import get_close_matches  # not at the start of every command

    close = get_close_matches(word, known, 1, 0.7)
    return close[0] if close else None


def plain_key(key: bytes) -> bytes:
    """Return a raw key in the form that is compared with keys of other shards and of label files.

    Semantics decision: without leading `./`, as in the tree.
    """
    while key.startswith(b"./"):
        key = key[2:]
    return key


def are_plain(names: list[bytes]) -> bool:
    """Return True if all of these member names can be shown as they are. False may be a false alarm."""
    text = b"/".join((b"", *names, b""))  # one search over all of them takes next to nothing
    return not any(odd in text for odd in _ODD) and max(map(len, names), default=0) <= NAME_MAX


def escape(component: bytes) -> bytes:
    """Return the name under which a component is shown: itself, unless a file system cannot have it.

    Semantics decision: NUL becomes `%00`; the components `.` and `..` become `%2E` and `%2E%2E`; the empty one
    becomes `%`. A component that already reads like that has its percent sign written as `%25`, so that
    `unescape` gives back the original. Anything else, invalid UTF-8 included, is shown unchanged. Names over
    255 bytes are cut and end in `%` and a checksum, so they stay distinct; the attribute `user.wdsfs.member` has
    them whole.
    """
    if component in (b"", b"%"):
        return b"%25" if component else b"%"
    shown = component
    if b"%" in component:
        shown = _ESCAPED.sub(rb"%25\1", component)
    if component in (b".", b".."):
        shown = component.replace(b".", b"%2E")
    return shorten(shown.replace(b"\0", b"%00"))


def unescape(shown: bytes) -> bytes:
    """Invert `escape`. Not for cut names, which are looked up as they are."""
    if shown == b"%":
        return b""
    return _ESCAPED.sub(lambda match: bytes([int(match[1], 16)]), shown)


def shorten(name: bytes, limit: int = NAME_MAX) -> bytes:
    """Return the name, or its start and a checksum (16 hexadecimal digits) within `limit` bytes."""
    if len(name) <= limit:
        return name
    import hashlib  # late: takes a tenth of the time of `wdsfs --help`, and hardly any name is so long

    mark = b"%" + hashlib.blake2b(name, digest_size=8).hexdigest().encode()
    start = name[: limit - len(mark)]
    return start.decode("utf-8", "ignore").encode() + mark if is_utf8(name) else start + mark


def is_utf8(name: bytes) -> bool:
    """Return True if a name is text in UTF-8."""
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True


def numbered(name: bytes, number: int) -> bytes:
    """Return the name of the `number`th thing that wants to be called `name`: `jpg~2`, `key~2`."""
    suffix = b"~%d" % number
    return shorten(name, NAME_MAX - len(suffix)) + suffix


def number_of(name: bytes) -> tuple[bytes, int] | None:
    """Return the inverse of `numbered` for names that were not cut: `key~2` -> (`key`, 2)."""
    base, tilde, digits = name.rpartition(b"~")
    if tilde and base and digits.isdigit() and digits[0] != 48 and len(digits) < 10 and int(digits) >= 2:
        return base, int(digits)
    return None
