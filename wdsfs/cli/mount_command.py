"""The command `mount`: its options, and errors for arguments that are missing or misplaced.

The mount itself is made in `mount/session.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import click

from wdsfs.cli import completion
from wdsfs.cli.options import (
    AtLeastOne,
    Directory,
    flag,
    handing_over,
    numbered_tree_options,
    opening_options,
    path_of,
    set_options,
)
from wdsfs.cli.process import may_have_secrets
from wdsfs.errors import ImageError, MountError, StaleShard, UsageError
from wdsfs.host import in_directory
from wdsfs.names import MEDIA, SHARD_SUFFIXES

if TYPE_CHECKING:
    from wdsfs.kernel.guard import Guarded, MadeBy
    from wdsfs.kernel.image_mount import ImageMount, MakeImage
    from wdsfs.mount.options import MountOptions
    from wdsfs.spec.expand import Shard
    from wdsfs.spec.selection import Selection
    from wdsfs.tree.options import Opening, TreeOptions
    from wdsfs.tree.shard_set import ShardSet


log = logging.getLogger("wdsfs")


class Serving(NamedTuple):
    """The options of how a mount is made and served, as they were typed."""

    foreground: bool
    read_only: bool
    options: tuple[str, ...]
    workers: int | None
    spin: int
    readahead: int
    overlay: str | None
    new: bool
    lazy: bool
    follow: float | None


FOLLOW, FOLLOW_SECONDS = "--follow", 60.0
FUSE, KERNEL, AUTO = "fuse", "kernel", "auto"
# Variables that say where the index, and the caches beside it, are, what these may hold, and if commands may run.
ENVIRONMENT = (
    *("WDSFS_ALLOW_PIPE", "WDSFS_INDEX_DIR", "WDSFS_CACHE_DIR", "WDSFS_CACHE_SIZE", "WDSFS_UNPACK"),
    *("WDSFS_UNPACK_MEMORY", "XDG_CACHE_HOME", "HOME"),
)
_ARGUMENTS, _PREPARED = "wdsfs.mount.arguments", "wdsfs.mount.prepared"  # in the context of the command


class MountCommand(click.Command):
    """`--follow` without a value does not take the next argument for one, as an option with a value does."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        ctx.meta[_ARGUMENTS] = list(args)
        given = [f"{FOLLOW}={FOLLOW_SECONDS:g}" if one == FOLLOW else one for one in args[:end]]
        return super().parse_args(ctx, given + args[end:])


serving_options = handing_over(
    "serving",
    Serving,
    {
        "foreground": flag("-f", "--foreground", "Stay in front and log to the terminal."),
        "read_only": flag("-r", "--read-only", "The same as -o ro: an overlay is shown, not changed."),
        "options": click.option(
            "-o",
            "options",
            multiple=True,
            metavar="OPT,...",
            help="Mount options: ro, allow_other, uid=, gid=, umask=, fsname=, auto_unmount, nonempty, ...",
        ),
        "workers": click.option(
            "--workers",
            type=click.IntRange(1, 16),
            help="Processes that serve; no effect with --overlay, which always has one.  "
            "[default: one per core, 2 to 8]",
        ),
        "spin": click.option(
            "--spin",
            type=click.IntRange(0, 1000),
            default=50,
            show_default=True,
            metavar="MICROSECONDS",
            help="How long a worker looks for the next request before it sleeps: faster, for more processor time.",
        ),
        "readahead": click.option(
            "--readahead",
            type=click.IntRange(4, 16384),
            default=256,
            show_default=True,
            metavar="KIB",
            help="How much of a large file the kernel asks for at a time; for users other than root always 128.",
        ),
        "overlay": click.option(
            "--overlay",
            type=Directory(),
            metavar="DIR",
            help="Make the tree writable; all changes go to DIR. See also `wdsfs diff` and `wdsfs commit`.",
        ),
        "new": flag(
            "--new", "With --overlay and without SHARDS: a set that begins empty. `wdsfs commit` makes its shards."
        ),
        "lazy": flag("--lazy", "Mount at once; index each shard when it is first used."),
        "follow": click.option(
            FOLLOW,
            type=AtLeastOne(),
            metavar="[=SECONDS]",
            help="Look at SHARDS again: show new ones, and hide those that are gone. At once after local "
            f"changes, and every so many seconds ({FOLLOW_SECONDS:g} if not given). See also `wdsfs refresh`.",
        ),
    },
)


class OfImage(NamedTuple):
    """The options of a mount by the kernel, as they were typed."""

    engine: str
    trust_shards: bool


image_options = handing_over(
    "of_image",
    OfImage,
    {
        "engine": click.option(
            "--engine",
            type=click.Choice([FUSE, KERNEL, AUTO]),
            default=FUSE,
            show_default=True,
            help="Who serves: a daemon by FUSE, or the kernel (root; shards of this machine); auto: the kernel "
            "where it can.",
        ),
        "trust_shards": flag(
            "--trust-shards",
            "Served by the kernel: accept shards with other times than when it was made, such as copies, and "
            "shards on network file systems.",
        ),
    },
)

# Options that a mount of an image has, too. All others are about what the image holds already, or about a daemon.
_FOR_IMAGES = frozenset(
    (
        "shards",
        "mountpoint",
        "base",
        "trust_shards",
        "wdsfs_trust",
        "options",
        "read_only",
        "quiet",
        "foreground",
        "engine",
    )
)


@click.command(cls=MountCommand)
@click.argument("shards", metavar="SHARDS...", nargs=-1, shell_complete=completion.paths)
@set_options
@click.argument("mountpoint", metavar="MOUNTPOINT", required=False, shell_complete=completion.directories)
@numbered_tree_options
@serving_options
@image_options
@opening_options
def mount(
    shards: tuple[str, ...],
    selection: Selection,
    mountpoint: str | None,
    tree: TreeOptions,
    serving: Serving,
    of_image: OfImage,
    opening: Opening,
) -> None:
    """Mount SHARDS at MOUNTPOINT, read-only unless with --overlay. Returns when the tree is usable.

    `wdsfs help layouts` says which layout is for which loader, with a picture of each tree.

    An image that `wdsfs image` has made is mounted by the kernel, which takes root.

    \b
    Examples:
      wdsfs mount 'train-{000000..000999}.tar' /mnt/train
      wdsfs mount --layout files -o allow_other shards/ /mnt/train
      wdsfs mount --follow shards/ /mnt/train
      wdsfs mount --names full --merge 'a-{0..9}.tar' 'b-*.tar' /mnt/all
      wdsfs mount --layout classes --class-names names.txt 'train-{000..099}.tar' /mnt/train
      wdsfs mount --columns 'jpg;png' --columns cls --associate labels.csv shards/ /mnt/train
      wdsfs mount train.erofs /mnt/train
      wdsfs mount --overlay edits --new /mnt/new
    """
    _refuse_own_options(serving.options)
    mountpoint = _mountpoint(shards, mountpoint, selection, serving)
    if len(shards) == 1 and _is_image(shards[0]):
        _mount_image(shards[0], mountpoint, serving, selection.base, of_image)
        return
    shards = _settled(shards)
    if of_image.engine != FUSE and _by_kernel(shards, selection, mountpoint, tree, serving, of_image, opening):
        return
    if of_image.trust_shards and of_image.engine == FUSE:
        raise UsageError("--trust-shards is for images, which `wdsfs image` makes, and for --engine kernel")
    from wdsfs.mount import session
    from wdsfs.tree.opening import make_view, refresh_index

    wanted = _mount_options(mountpoint, shards, selection, tree, serving, opening)
    front = session.Front(
        indexer=lambda index, shards, ready: refresh_index(index, shards, opening, ready).unreadable,
        composer=lambda below: make_view(below, opening),
        adviser=_adviser(tree, serving, opening),
        doctor=_reasons,
    )
    run = session.run_in_front if serving.foreground else session.run_in_background
    sys.exit(run(wanted, front))


def _settled(shards: Sequence[str]) -> tuple[str, ...]:
    """SHARDS that mean the same when the daemon, or `refresh` from the arguments, expands them again."""
    from wdsfs.spec.expand import settled

    changed, meta = {spec: settled(spec) for spec in shards}, click.get_current_context().meta
    meta[_ARGUMENTS] = [changed.get(word, word) for word in meta[_ARGUMENTS]]
    return tuple(changed[spec] for spec in shards)


def _reasons(mountpoint: str, options: Collection[str]) -> list[str]:
    """Return what `wdsfs doctor` finds where libfuse could not mount, with what to type."""
    from wdsfs.mount.doctor import preventing

    return [f"{one.name}: {one.detail} -> {one.remedy}" for one in preventing(mountpoint, options)]


def _mountpoint(shards: Sequence[str], mountpoint: str | None, selection: Selection, serving: Serving) -> str:
    """Return the mount point. Raises UsageError for arguments that are missing, or do not go with --new."""
    if serving.new:
        _check_new(shards, selection, serving)
    elif mountpoint is None or not shards:
        raise _incomplete(mountpoint)
    if not mountpoint:
        raise UsageError("the MOUNTPOINT is missing" if mountpoint is None else "the MOUNTPOINT is empty")
    if mountpoint.endswith(tuple(map(os.fsdecode, SHARD_SUFFIXES))) and os.path.isfile(mountpoint):
        # A glob that the shell has expanded: its last shard stands where the mount point does.
        raise UsageError(
            f"the MOUNTPOINT is missing, an empty directory: {mountpoint} is a shard; "
            "wdsfs mount SHARDS... MOUNTPOINT"
        )
    return mountpoint


def _mount_options(
    mountpoint: str,
    shards: Sequence[str],
    selection: Selection,
    tree: TreeOptions,
    serving: Serving,
    opening: Opening,
) -> MountOptions:
    """Return the options as the mount takes them. Raises UsageError for those that do not go together."""
    from wdsfs.host import default_jobs
    from wdsfs.mount.options import MountOptions

    allow_missing = opening.tolerance.allow_missing
    return MountOptions(
        specs=list(shards),
        selection=selection._replace(allow_missing=allow_missing),
        mountpoint=mountpoint,
        view=tree.view(allow_missing),
        tolerance=opening.tolerance,
        merge=tree.merge,
        composition=tree.composition,
        index_dir=opening.index_dir,
        lazy=serving.lazy,
        overlay=path_of(serving.overlay),
        new=serving.new,
        follow=serving.follow,
        workers=serving.workers or max(2, min(default_jobs(), 8)),
        spin=serving.spin / 1e6,
        readahead=serving.readahead << 10,
        options=[*serving.options, *["ro"] * serving.read_only],
        foreground=serving.foreground,
    )


def _by_kernel(
    shards: Sequence[str],
    selection: Selection,
    mountpoint: str,
    tree: TreeOptions,
    serving: Serving,
    of_image: OfImage,
    opening: Opening,
) -> bool:
    """Have the kernel serve this mount; False if it is to be FUSE. Raises MountError, ImageError, ShardErrors."""
    from wdsfs import mount_table
    from wdsfs.kernel.image_mount import end_if_wrong
    from wdsfs.kernel.set_image import CannotServe

    given = {"--new": serving.new, "--lazy": serving.lazy, FOLLOW: serving.follow is not None}
    reason = next((f"{name} is for FUSE" for name, is_given in given.items() if is_given), None)
    if reason is None and serving.overlay is not None and of_image.engine == AUTO:
        reason = "with --overlay FUSE does more (--engine kernel takes the kernel)"
    wanted, advice = None, list[str]()
    if reason is None:
        try:
            wanted = _image_mount(shards, selection, mountpoint, tree, serving, of_image, opening, advice)
        except CannotServe as error:
            reason = str(error)
            end_if_wrong(mountpoint, path_of(serving.overlay))
        except ImageError as error:
            if of_image.engine == KERNEL:
                raise
            reason = str(error)
    if reason is not None and of_image.engine == KERNEL:
        raise MountError(f"--engine kernel: {reason}; --engine auto takes FUSE then")
    if of_image.engine == AUTO:
        log.info("%s", "engine: kernel" if reason is None else f"engine: FUSE, because {reason}")
    if wanted is None:
        return False
    if serving.foreground:
        _say(advice)
    code = _mount_or_hand_out(wanted, serving.foreground)
    is_refused = code in (MountError.exit_code, StaleShard.exit_code)
    if of_image.engine == AUTO and is_refused and mount_table.mounted_at(mountpoint) is None:
        log.info("engine: FUSE, because the kernel has not mounted it")
        return False
    if code:
        sys.exit(code)
    if not serving.foreground:
        _say(advice)
    return True


def _say(lines: Sequence[str]) -> None:
    for line in lines:
        log.info("%s", line)


def _image_mount(
    shards: Sequence[str],
    selection: Selection,
    mountpoint: str,
    tree: TreeOptions,
    serving: Serving,
    of_image: OfImage,
    opening: Opening,
    advice: list[str],
) -> ImageMount:
    """Make the image for a mount by the kernel, and return the mount. `advice` gets hints for the user.

    Raises CannotServe, WdsfsError.
    """
    from wdsfs.kernel import engine_checks
    from wdsfs.kernel.set_image import CannotServe, ServedSet
    from wdsfs.mount import image_session
    from wdsfs.spec.dependencies import noted
    from wdsfs.spec.expand import expand

    with noted() as used:
        found = expand(shards, *selection._replace(allow_missing=opening.tolerance.allow_missing))
    if used.files:
        from wdsfs.tree.shard_access import refuse_foreign_lists  # late: most sets are named without a list

        refuse_foreign_lists(used.files, shared=True)
    reason = engine_checks.obstacle(found, of_image.trust_shards)
    is_repeated = _PREPARED in click.get_current_context().meta
    if reason is None and of_image.engine == AUTO and not is_repeated:
        reason = engine_checks.obstacle_now(found)  # else the guard says it, when the image is made
    if reason is not None:
        raise CannotServe(reason)
    options, overlay = [*serving.options, *["ro"] * serving.read_only], path_of(serving.overlay)
    if not is_repeated:
        image_session.check_place(mountpoint, options, overlay)
    if overlay is not None:
        from wdsfs.mount.options import refuse_view

        refuse_view(found, tree.view(opening.tolerance.allow_missing), tree.composition)
    adviser = _adviser(tree, serving, opening._replace(quiet=opening.quiet or is_repeated))
    served = ServedSet(found, tree, opening, lambda below: advice.extend(adviser(below)))
    return image_session.prepare(served, mountpoint, options, of_image.trust_shards, overlay)


def image_maker(opening: Opening | None = None) -> MakeImage:
    """What makes the image of a mount that the kernel serves anew; `opening` is for a set that is named."""

    def make(guard: Guarded, shards: Sequence[Shard] | None) -> ImageMount:
        if shards is not None and opening is not None:
            return _image_of_shards(guard, shards, opening)
        if guard.made is None:
            raise MountError(
                f"{guard.mountpoint}: how it was mounted was not kept, as there may be a secret in it; type: "
                f"wdsfs umount {shlex.quote(guard.mountpoint)}, and mount it again"
            )
        return prepared_again(guard.made)

    return make


def _image_of_shards(guard: Guarded, shards: Sequence[Shard], opening: Opening) -> ImageMount:
    """Make the image for a mount with an overlay over new shards. Raises CannotServe, WdsfsError."""
    from wdsfs.cli.output import bars
    from wdsfs.kernel.set_image import ServedSet
    from wdsfs.mount import image_session
    from wdsfs.tree.options import Composition, TreeOptions

    tree = TreeOptions(guard.layout, guard.names, guard.merge, index_tree=False, composition=Composition())
    served = ServedSet(shards, tree, opening._replace(quiet=True, workers=None, progress=bars(True)))
    overlay = path_of(guard.overlay)
    return image_session.prepare(served, guard.mountpoint, guard.options, guard.trusting, overlay)


def prepared_again(made: MadeBy) -> ImageMount:
    """Do what the command of a kernel's mount does before it mounts: the image of the set as it is now.

    Raises MountError if it was another command, and what `mount` raises.
    """
    found: list[ImageMount] = []
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    with in_directory(made.directory), contextlib.ExitStack() as stack:
        for name in ENVIRONMENT:
            stack.callback(_set_variable, name, before[name])
            _set_variable(name, made.environment.get(name))
        with mount.make_context("mount", list(made.arguments)) as context:
            context.meta[_PREPARED] = found.append
            mount.invoke(context)
    if not found:
        raise MountError("the command of this mount would take FUSE now; unmount it, and mount it again")
    return found[0]


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _mount_or_hand_out(wanted: ImageMount, foreground: bool) -> int:
    """Mount an image, or give what is to be mounted to `prepared_again`; returns an exit code."""
    from wdsfs.kernel.guard import MadeBy
    from wdsfs.mount import image_session

    context = click.get_current_context()
    if _PREPARED in context.meta:
        context.meta[_PREPARED](wanted)
        return 0
    arguments = context.meta[_ARGUMENTS]
    if not may_have_secrets(arguments):  # else they are kept nowhere
        variables = {name: os.environ[name] for name in ENVIRONMENT if os.environ.get(name)}
        wanted.made = MadeBy(arguments, _current_directory(), variables)
    if "wdsfs.remote.shard_paths" in sys.modules:  # the guard asks no store, and is not to keep the fetcher
        sys.modules["wdsfs.remote.shard_paths"].close()
    return image_session.run(wanted, foreground)


def _current_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed: then no argument is relative to it
        return "/"


def _is_image(spec: str) -> bool:
    """True if this is an image, or was one and is damaged, as far as its name tells."""
    from wdsfs.kernel.manifest import is_image
    from wdsfs.spec.expand import IMAGE_SUFFIX

    return "://" not in spec and (is_image(spec) or (spec.endswith(IMAGE_SUFFIX) and os.path.isfile(spec)))


def _mount_image(image: str, mountpoint: str, serving: Serving, base: str | None, of_image: OfImage) -> None:
    """Have the kernel mount an image. Raises UsageError for options that are for shards."""
    from click.core import ParameterSource

    from wdsfs.kernel.image_mount import ImageMount

    context = click.get_current_context()
    for param in mount.params:
        source = context.get_parameter_source(str(param.name))
        if source is ParameterSource.COMMANDLINE and param.name not in _FOR_IMAGES:
            raise UsageError(
                f"{param.opts[0]}: not for the mount of an image; what an image shows is said when it is made: "
                "wdsfs image --help"
            )
    if of_image.engine == FUSE and context.get_parameter_source("engine") is ParameterSource.COMMANDLINE:
        raise UsageError("--engine fuse: an image is for the kernel; by FUSE mount its shards")
    if base is not None and "://" in base:
        raise UsageError(f"--base {base}: the shards of an image are files; name their directory")
    base = os.path.dirname(os.path.abspath(image)) if base is None else base
    options = [*serving.options, *["ro"] * serving.read_only]
    if any(option.partition("=")[0] in ("uid", "gid", "umask") for option in ",".join(options).split(",")):
        raise UsageError("-o uid, gid and umask are for FUSE; of an image they are options of: wdsfs image")
    wanted = ImageMount(os.path.abspath(image), mountpoint, os.path.abspath(base), options, of_image.trust_shards)
    code = _mount_or_hand_out(wanted, serving.foreground)
    if code:
        sys.exit(code)


def _check_new(shards: Sequence[str], selection: Selection, serving: Serving) -> None:
    """Raise UsageError for options that do not go with a set that begins empty."""
    if serving.overlay is None:
        raise UsageError("--new needs --overlay DIR: that is where the new samples go until they are committed")
    if shards:
        raise UsageError(
            f"--new begins an empty set, and {shards[0]} names shards: leave them out, or to add to a set leave "
            "out --new"
        )
    if selection.arguments:
        raise UsageError(f"{selection.arguments[0]} is for SHARDS, and --new begins a set without any")


def _refuse_own_options(options: Sequence[str]) -> None:
    """Raises UsageError for `-o layout=files`, which only mount(8) takes, and for `-o layot=files`."""
    from wdsfs.mount.mountpoint import known_options
    from wdsfs.names import closest

    own = {name[2:] for param in mount.params for name in param.opts if name.startswith("--")}
    known = {name.rstrip("=") for name in known_options()}
    for option in ",".join(options).split(","):
        name, equals, value = option.partition("=")
        dashed = name.replace("_", "-")
        if dashed in own:
            typed = f"--{dashed}" + (f" {shlex.quote(value)}" if equals else "")
            raise UsageError(f"-o {option}: it is an option of its own here: {typed}")
        meant = closest(dashed, sorted(own | known)) if name not in known else None
        if meant in own:
            raise UsageError(f"-o {option}: no such option; did you mean --{meant}?")


def _incomplete(given: str | None) -> UsageError:
    """Return the error for `wdsfs mount` with one argument, or with none."""
    from wdsfs.spec.expand import names_a_shard

    if given is None:
        return UsageError("mount needs SHARDS and a MOUNTPOINT: wdsfs mount SHARDS... MOUNTPOINT")
    quoted = shlex.quote(given)
    if given.endswith(tuple(map(os.fsdecode, SHARD_SUFFIXES))) or names_a_shard(given):
        return UsageError(f"the MOUNTPOINT is missing, an empty directory: wdsfs mount {quoted} MOUNTPOINT")
    return UsageError(f"SHARDS are missing, only a MOUNTPOINT is given: wdsfs mount SHARDS... {quoted}")


_LOOKED_AT = 3  # shards


def _adviser(tree: TreeOptions, serving: Serving, opening: Opening) -> Callable[[ShardSet], Sequence[str]]:
    """What returns hints about a set that is mounted like this."""
    if opening.quiet:
        return lambda _: ()
    return lambda below: _hints(below, tree, serving.overlay is not None)


def _hints(below: ShardSet, tree: TreeOptions, writable: bool) -> Sequence[str]:
    """Return hints at what loaders of directories would make of this mount without an error."""
    of_classes = tree.layout == "classes"
    hint = _class_hint(below, tree.composition.class_names) if of_classes else _suffix_hint(below, tree, writable)
    return () if hint is None else (hint, "which layout for which loader: wdsfs help layouts")


def _suffix_hint(below: ShardSet, tree: TreeOptions, writable: bool) -> str | None:
    """Return a hint for a set of images or sound whose files are called `jpg`, so that loaders do not find them.

    None if there is no such file in the first shards, or they are not indexed.
    """
    from wdsfs.errors import ShardError
    from wdsfs.tree.shard_set import NotIndexed

    if tree.layout != "samples" or tree.names == "full":
        return None
    for number in range(min(len(below), _LOOKED_AT)):
        with contextlib.suppress(ShardError, NotIndexed):
            record = below.record(number)
            extensions = record.extension_name.of(range(len(record.extension_name)))
            for extension in extensions:
                suffix = extension.lower().rpartition(b".")[2]
                if suffix in MEDIA:
                    # Layouts of classes are read-only, and refuse a set whose samples have none.
                    other = "--layout files" if writable or b"cls" not in extensions else "--layout classes"
                    return f"loaders that look for *.{suffix.decode()} need --names full or {other}"
    return None


def _class_hint(below: ShardSet, class_names: str | None) -> str | None:
    """Return a hint for classes that have numbers, if loaders that count directories give them others.

    None also while not all shards are indexed.
    """
    from wdsfs.errors import ShardError
    from wdsfs.tree.classes import folders_of, misnumbered, numbers_of
    from wdsfs.tree.options import read_class_names
    from wdsfs.tree.shard_set import NotIndexed

    try:
        named = None if class_names is None else numbers_of(read_class_names(class_names))
        found = misnumbered(folders_of(below), named)
    except (NotIndexed, ShardError):
        return None
    return f"loaders that count directories label {found}" if found else None
