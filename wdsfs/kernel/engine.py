"""The kernel's engine for the rest of wdsfs: checks what the kernel can serve, mounts, makes and finds images.

`mount/engines.py` has the interface. `mount --engine` asks whether the kernel can serve a set, `wdsfs doctor`
whether the machine can: EROFS, root, leases on shards, shards that are files of this machine. These checks change
nothing, and no finding is a failure, because FUSE can serve instead. `guard.py` has the process of a mount.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from wdsfs import __version__, host, mount_registry, mount_table, source, trust
from wdsfs.cache import file_cache
from wdsfs.cache.file_cache import CachedFile, NewFile, NoRoom
from wdsfs.door.shard_door import DOOR
from wdsfs.door.urls import is_remote
from wdsfs.errors import ImageError, MountError, ShardError, StaleShard, UsageError
from wdsfs.host import MachineFinding
from wdsfs.kernel import erofs_header
from wdsfs.kernel.devices import is_written, require_file_limit
from wdsfs.kernel.erofs_header import OLDEST_KERNEL
from wdsfs.kernel.erofs_mount import FILES_SINCE, LOOPS, refusal_of_kernel
from wdsfs.kernel.guard import Guarded, end_if_wrong, guard_of, mount_and_guard, unguarded
from wdsfs.kernel.manifest import ImageOptions, image_of, is_image, read_manifest
from wdsfs.mount import daemon
from wdsfs.mount.daemon import open_log
from wdsfs.mount.engines import KERNEL_ENGINE, CannotServe
from wdsfs.mount.mount_options import AUTO, MountOptions, parse_options, split_options
from wdsfs.mount.mount_search import check_mountpoint
from wdsfs.mount_registry import canonical
from wdsfs.names import suffix_of
from wdsfs.shards import Fingerprint
from wdsfs.tree.set_options import Opening, Owner, Selection, TreeOptions

if TYPE_CHECKING:
    from wdsfs.kernel.image import Built
    from wdsfs.kernel.live_kernel import KernelMount
    from wdsfs.mount_table import MountPoint
    from wdsfs.shards import Shard
    from wdsfs.tree.tree import LowerTree

__all__ = ["is_image"]

log = logging.getLogger("wdsfs")

KINDS = ("erofs",)  # of files in the cache
FILE_SYSTEMS = Path("/proc/filesystems")  # that the kernel has loaded

_NAMES = ("fsname=", "subtype=")  # for the mount table, in which the image is the source
# The attributes that other options of `-o` set; 0: every mount of an image has what the option asks for.
_SET_BY = {
    **dict.fromkeys(("ro", "allow_other", "allow_root", "default_permissions", "nodev", "nosuid", "exec"), 0),
    **dict.fromkeys(("async", "atime", "sync", "dirsync"), 0),
    "noexec": mount_table.NO_PROGRAMS,
    "noatime": mount_table.NO_ACCESS_TIMES,
    "suid": ~mount_table.NO_SUID,
    "dev": ~mount_table.NO_DEVICES,
}


# --- mounts and images


def mount_image(mount: MountOptions) -> int:
    """Mount the named image; return an exit code. Raises UsageError, MountError."""
    image, base, options = os.path.abspath(mount.specs[0]), mount.selection.base, mount.dash_o
    if base is not None and "://" in base:
        raise UsageError(f"--base {base}: the shards of an image are files; name their directory")
    if any(option.partition("=")[0] in ("uid", "gid", "umask") for option in split_options(options)):
        raise UsageError("-o uid, gid and umask are for FUSE; for an image give them to: wdsfs image")
    return run(mount, image, os.path.dirname(image) if base is None else os.path.abspath(base))


def mount_set(mount: MountOptions, shards: Sequence[Shard]) -> int:
    """Make the image of a set, unless it exists, mount it, and give hints; return an exit code.

    With the engine AUTO this also raises CannotServe if the kernel refuses the mount. Raises CannotServe,
    WdsfsError.
    """
    is_choice, foreground = mount.serving.engine == AUTO, mount.serving.foreground
    advice = list[str]()
    try:
        image, fd = _image_of(mount, shards, advice)
    except (CannotServe, ImageError) as error:
        end_if_wrong(mount.mountpoint)
        raise CannotServe(str(error)) from None
    try:
        if is_choice:
            log.info("engine: kernel")
        if foreground:
            _give(advice)
        code = run(mount, image, "/")
    finally:
        os.close(fd)  # here; the guard has its own, and an image is not evicted while somebody has it open
    is_refused = code in (MountError.exit_code, StaleShard.exit_code)
    if is_choice and is_refused and mount_table.mounted_at(mount.mountpoint) is None:
        raise CannotServe("the kernel has not mounted it")
    if not code and not foreground:
        _give(advice)
    return code


def _give(advice: Sequence[str]) -> None:
    for line in advice:
        log.info("%s", line)


def _image_of(mount: MountOptions, shards: Sequence[Shard], advice: list[str]) -> tuple[str, int]:
    """Make the image of a set, unless it is there, and return its path and a descriptor, as `_find_or_make` does.

    `advice` gets hints for the user. Raises CannotServe, WdsfsError.
    """
    serving, parsed = mount.serving, parse_options(mount.dash_o)
    reason = obstacle(shards, serving.trust_shards)
    if reason is None and serving.engine == AUTO:
        # With --engine kernel the guard says it, after the image is made.
        reason = next(filter(None, (_cannot_be_held(shard.path) for shard in shards)), None)
    if reason is not None:
        raise CannotServe(reason)
    place = mount.mountpoint
    if unguarded(place) is None:  # else it is guarded again
        check_mountpoint(place, parsed.nonempty, [])
    since, composition = min(host.kernel_version()[:2], erofs_header.OWN_TIMES_KERNEL), mount.tree.composition
    options = ImageOptions(
        *(parsed.owner, None, (since[0], since[1]), mount.tree.merge, composition.public_text),
        private="allow_other" not in parsed.fuse,
        directory=os.getcwdb() if composition.names_files else None,
    )
    return _find_or_make(mount, shards, options, advice)


def run(mount: MountOptions, image: str, base: str) -> int:
    """Mount an image. Return an exit code after the mount, or, in the foreground, when the mount has ended.

    Raises UsageError.
    """
    DOOR.close()  # the guard asks no store, and must not keep the fetcher alive
    place = mount.mountpoint
    attributes, nonempty = _mount_attributes(mount.dash_o)
    action = partial(mount_and_guard, mount, image, base, attributes, partial(check_mountpoint, place, nonempty))
    if mount.serving.foreground:
        ready = partial(daemon.notify_systemd, "READY=1")
        return daemon.guarded(lambda: action(None, lambda _: None, ready))
    return daemon.fork(place, lambda leave, ready: action(open_log(place), leave, ready))


def _mount_attributes(options: Sequence[str]) -> tuple[int, bool]:
    """Return the attributes of a mount, and if the mount point may have entries. Raises UsageError."""
    parsed = parse_options(options)
    attributes = mount_table.NO_SUID | mount_table.NO_DEVICES | mount_table.READ_ONLY
    for option in sorted(parsed.fuse):
        if option not in _SET_BY and not option.startswith(_NAMES):
            raise UsageError(f"-o {option}: not for an image, which has no daemon; see docs/how-to/engines.md")
        flags = _SET_BY.get(option, 0)
        attributes = attributes & flags if flags < 0 else attributes | flags
    return attributes, parsed.nonempty


def write_image(
    specs: Sequence[str],
    selection: Selection,
    tree: TreeOptions,
    opening: Opening,
    output: str,
    base: str | None,
    owner: Owner,
) -> tuple[Built, list[str]]:
    """Write the image of the set that these words name; return its counts, and the paths of its shards.

    Paths below `base` (its own directory) are relative to that in the image. Raises UsageError, ImageError, and
    what `open_typed_set` raises.
    """
    from wdsfs.kernel.image import make_image  # late: a mount of an image needs none of these
    from wdsfs.tree.merged_tree import make_tree
    from wdsfs.tree.opening import open_typed_set

    target, view = os.path.abspath(os.fsencode(output)), tree.view(partial=opening.tolerance.allow_missing)
    top = os.path.dirname(target) if base is None else os.path.abspath(os.fsencode(base))
    about = ImageOptions(
        *(owner, top, erofs_header.OLDEST_KERNEL, tree.merge, tree.composition.public_text),
        directory=os.getcwdb() if tree.composition.names_files else None,
    )
    with (
        open_typed_set(specs, selection, opening, tree.composition, whole=True) as below,
        opening.progress.shards("writing", len(below)) as on_shard,
    ):
        built = make_image(make_tree(below, view), target, about, on_shard)
    return built, [device.shard(os.fsdecode(top)) for device in read_manifest(target).devices]


# --- images in the cache

# The modules that open and make a set are imported late: they load NumPy. Opening the index takes longer than all
# other steps of a mount. So an image is found without the index where shards are shown without a view and no
# problems of theirs have to be reported.


def _find_or_make(
    mount: MountOptions, shards: Sequence[Shard], options: ImageOptions, advice: list[str]
) -> tuple[str, int]:
    """Return the path of the image of a set, and a descriptor: as long as it is open, the image is not evicted.

    `advice` gets hints for the user if the image is made. Raises CannotServe, ImageError, ShardErrors.
    """
    cache = file_cache.cache()
    while True:
        key = _quick_key(mount, shards, options)
        image = None if key is None else cache.find(key, KINDS)
        if image is None:
            image = _make_image(mount, shards, options, advice)
        path = cache.place_of(image.fd)
        if path is not None:
            return path, image.fd
        os.close(image.fd)  # somebody has written it: it is removed and made again


def _make_image(
    mount: MountOptions, shards: Sequence[Shard], options: ImageOptions, advice: list[str]
) -> CachedFile:
    """Make the image of a set, unless it is there. Raises as `_find_or_make`."""
    from wdsfs.kernel.image import write_image
    from wdsfs.mount.hints import hints
    from wdsfs.tree.merged_tree import make_tree
    from wdsfs.tree.opening import open_known_set

    opening, composition = mount.opening, mount.tree.composition
    with open_known_set(shards, opening, composition, whole=True, shared=True) as lower:
        tree = make_tree(lower, mount.view)
        key = key_of(tree, options)

        def fill(new: NewFile) -> tuple[str, int]:
            with opening.progress.shards("writing", len(lower)) as on_shard:
                size = write_image(tree, new.fd, options._replace(key=key), on_shard).size
            if not opening.quiet:
                advice.extend(hints(lower, mount.tree, writable=False))
            return KINDS[0], size

        try:
            return file_cache.cache().make(key, KINDS, fill)
        except NoRoom as error:
            raise CannotServe(f"its image does not fit into the cache: {error}") from None


def _quick_key(mount: MountOptions, shards: Sequence[Shard], options: ImageOptions) -> str | None:
    """Return the key of the image, if it follows from the fingerprints of the shards alone; else None."""
    tree, tolerance = mount.tree, mount.opening.tolerance
    is_plain = tree.composition.is_plain and not any(shard.without or shard.index_file for shard in shards)
    if not is_plain or tolerance.strict:
        return None
    try:
        states = [(shard.key, shard.name, Fingerprint.at(shard.path)) for shard in shards]
    except ShardError:
        return None  # opening the set decides what that means
    return _key(states, (tree.layout, tree.names, tolerance.allow_missing), options)


def key_of(tree: LowerTree, options: ImageOptions) -> str:
    """Return a key that differs for every other image: other shards or options, changed shards, another version.

    An image of damaged shards is not found by `_quick_key`, so that each mount warns of the damage.
    """
    lower, view = tree.lower, tree.view
    states = [(shard.key, shard.name, lower.fingerprint(number)) for number, shard in enumerate(lower.shards)]
    sources = () if lower.plain is lower else lower.sources
    read = [(shard.path, below.fingerprint(at)) for below in sources for at, shard in enumerate(below.shards)]
    is_damaged = next(lower.known_damage(), None) is not None
    return _key(states, (view.layout, view.names, view.partial), options, read, is_damaged=is_damaged)


def _key(
    states: Sequence[tuple[bytes, bytes, Fingerprint]],
    view: tuple[str, str, bool],
    options: ImageOptions,
    read: Sequence[tuple[bytes, Fingerprint]] = (),
    *,
    is_damaged: bool = False,
) -> str:
    # The version, because a later one may show the same shards with other names.
    text = repr((__version__, erofs_header.LAYOUT, options, view, states, [*read], is_damaged))
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=16).hexdigest()


# --- live mounts


def is_guarded(specs: Sequence[str], mountpoint: str) -> bool:
    """Return True if the kernel serves these SHARDS at this path, and the guard lives."""
    guard = guard_of(canonical(mountpoint))
    return guard is not None and guard.alive and guard.specs == list(specs)


def is_mount(mounted: MountPoint) -> bool:
    """Return True if the kernel lists the mount of an image here."""
    return image_of(mounted) is not None


def find_mount(mounted: MountPoint) -> KernelMount | None:
    """Return the mount of an image that the kernel lists here; None for any other mount.

    The image may have been removed since.
    """
    from wdsfs.kernel.live_kernel import KernelMount  # late: the process of a mount needs none of it

    guard = mount_registry.registration_of(os.fsdecode(mounted.path), Guarded)
    if guard is not None and not guard.is_of(mounted):
        guard = None
    return None if guard is None and image_of(mounted) is None else KernelMount(mounted, guard)


# --- what the kernel cannot serve


def obstacle(shards: Sequence[Shard], trusting: bool) -> str | None:
    """Return why the kernel cannot serve these shards; None if no reason is known. Raises ShardErrors."""
    if os.geteuid() != 0:
        return "the kernel mounts sets for root only"
    if host.kernel_version() < OLDEST_KERNEL:
        return f"this kernel is older than Linux {host.version_text(OLDEST_KERNEL)}"
    refusal = refusal_of_kernel()
    if refusal is not None:
        return refusal
    try:
        require_file_limit(len(shards))
    except MountError as error:
        return str(error)
    served = next(filter(None, (_not_plain(shard.path) for shard in shards)), None)
    return served or (None if trusting else _on_network(shards))


def _not_plain(path: bytes) -> str | None:
    """Return why the kernel cannot read a shard, judged by its name. Making the image finds other reasons."""
    if is_remote(path):
        return f"{os.fsdecode(path)} is remote, and the kernel reads files of this machine only"
    if suffix_of(path) not in (b"", b".tar"):
        from wdsfs.tree.open_shards import is_compressed

        if is_compressed(path):
            return f"{os.fsdecode(path)} is compressed, and the kernel reads plain tars only"
    return None


def _on_network(shards: Sequence[Shard]) -> str | None:
    place = mount_table.on_network(shard.path for shard in shards)
    return None if place is None else f"{os.fsdecode(place[0])} lies on {place[1]}, which other machines can write"


def _cannot_be_held(path: bytes) -> str | None:
    """Return why no guard can hold a shard now, such as a program that writes it. Raises ShardErrors."""
    fd = source.open_shard(path)
    try:
        refusal = trust.foreign_link(path, fd)
        if refusal is None and is_written(fd):
            refusal = f"{os.fsdecode(path)}: a program has it open for writing"
        return refusal
    except OSError:
        return None  # without leases its times are compared
    finally:
        source.close(fd)


# --- for `wdsfs doctor`


def check_machine() -> MachineFinding:
    """Check if `--engine kernel` can be used: EROFS, shards as its devices, and root."""
    version = host.kernel_version()
    if version < OLDEST_KERNEL:
        text = f"needs Linux {host.version_text(OLDEST_KERNEL)} or later, not {host.version_text(version)}"
        return MachineFinding(KERNEL_ENGINE, "ok", text)
    if not _has_erofs():
        text = "this kernel has no EROFS: the kernel cannot serve a set itself"
        return MachineFinding(KERNEL_ENGINE, "warn", text, "sudo modprobe erofs")
    by_files = version >= FILES_SINCE
    if not by_files and not os.path.exists(LOOPS):
        text = f"there is no {LOOPS}, which EROFS needs before Linux 6.12"
        return MachineFinding(KERNEL_ENGINE, "warn", text, "modprobe loop")
    shown = f"EROFS, shards as {'files' if by_files else 'loop devices'}"
    if os.geteuid() != 0:
        return MachineFinding(KERNEL_ENGINE, "ok", f"{shown}; only for root")
    refusal = refusal_of_kernel()
    return MachineFinding(KERNEL_ENGINE, "ok", shown if refusal is None else f"{shown}; but {refusal}")


def _has_erofs() -> bool:
    """Return True if the kernel has EROFS, or can load it."""
    try:
        if any(line.split()[-1:] == ["erofs"] for line in FILE_SYSTEMS.read_text().splitlines()):
            return True
    except OSError:
        return False
    modprobe = shutil.which("modprobe")
    if modprobe is None:
        return False
    dry = subprocess.run([modprobe, "--dry-run", "--quiet", "erofs"], check=False, capture_output=True)
    return dry.returncode == 0
