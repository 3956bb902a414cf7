"""The command `image`: writes an image that the kernel mounts. What is in it is decided in `kernel/image.py`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

import click

from wdsfs.cli import completion
from wdsfs.cli.options import (
    Directory,
    handing_over,
    json_option,
    numbered_tree_options,
    opening_options,
    set_options_without_base,
    shards_argument,
)
from wdsfs.cli.output import say, write_json
from wdsfs.errors import UsageError, bytes_text, counted

if TYPE_CHECKING:
    from wdsfs.spec.selection import Selection
    from wdsfs.tree.options import Opening, TreeOptions

_ID_MAX = (1 << 32) - 2


class Making(NamedTuple):
    """The options of what an image is like, as they were typed."""

    base: str | None
    uid: int
    gid: int
    umask: str
    linux: str


_making_options = handing_over(
    "making",
    Making,
    {
        "base": click.option(
            "--base",
            type=Directory(),
            metavar="DIR",
            help="Paths of shards below DIR are kept relative to it.  [default: the directory of FILE]",
        ),
        "uid": click.option(
            "--uid", type=click.IntRange(0, _ID_MAX), default=0, help="Owner of all files.  [default: root]"
        ),
        "gid": click.option(
            "--gid", type=click.IntRange(0, _ID_MAX), default=0, help="Group of all files.  [default: root]"
        ),
        "umask": click.option(
            "--umask", default="0", metavar="OCTAL", help="Bits to leave out of the modes 0444 and 0555."
        ),
        "linux": click.option(
            "--linux",
            default="5.16",
            show_default=True,
            metavar="VERSION",
            help="The oldest kernel that is to mount it; from 6.15 on an image is a fifth smaller.",
        ),
    },
)


@click.command()
@shards_argument
@set_options_without_base
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    required=True,
    shell_complete=completion.paths,
    help="The image, such as set.erofs.",
)
@numbered_tree_options
@_making_options
@json_option
@opening_options
def image(
    shards: tuple[str, ...],
    selection: Selection,
    output: str,
    tree: TreeOptions,
    making: Making,
    as_json: bool,
    opening: Opening,
) -> None:
    """Write an image of SHARDS that the kernel mounts by itself, over the shards: an EROFS file system of names.

    The image has the tree that `wdsfs mount` would show with the same options, and points into the shards, which
    have to stay as they are. Root mounts it: faster than FUSE, and without a daemon.

    \b
    Examples:
      wdsfs image 'train-{000000..000999}.tar' -o train.erofs
      wdsfs mount train.erofs /mnt/train
    """
    from wdsfs.kernel import manifest
    from wdsfs.kernel.image import make_image
    from wdsfs.kernel.manifest import ImageOptions
    from wdsfs.owner import Owner
    from wdsfs.tree.numbered_tree import check_name, make_numbered
    from wdsfs.tree.opening import opened

    target = os.path.abspath(os.fsencode(output))
    base = os.path.dirname(target) if making.base is None else os.path.abspath(os.fsencode(making.base))
    view = tree.view(opening.tolerance.allow_missing)
    owner = Owner(making.uid, making.gid, _octal(making.umask))
    options = ImageOptions(
        *(owner, base, _version(making.linux), tree.merge, tree.composition.public_text),
        directory=os.getcwdb() if tree.composition.names_files else None,
    )
    with opened(shards, selection, opening, tree.composition, whole=True) as below:
        check_name(below.shards, view, tree.merge)
        with opening.progress.shards("writing", len(below)) as on_shard:
            made = make_image(make_numbered(below, view, tree.merge), target, options, on_shard)
    files = [device.shard(os.fsdecode(base)) for device in manifest.read(target).devices]
    if as_json:
        write_json({"image": output, **made._asdict(), "files": files})
    else:
        shown = counted(len(set(files)), "shard")  # one may be a device twice
        say(f"{output}: {shown}, {counted(made.inodes, 'inode')}, {bytes_text(made.size)}")


def _octal(text: str) -> int:
    try:
        number = int(text, 8)
    except ValueError:
        number = -1
    if not 0 <= number <= 0o777:
        raise UsageError(f"--umask {text}: an octal number up to 777 is needed")
    return number


def _version(text: str) -> tuple[int, int]:
    """The first two numbers of a kernel's version: `6.12.3-amd64` is (6, 12). Raises UsageError."""
    from wdsfs import host
    from wdsfs.kernel.erofs import OLDEST_KERNEL

    numbers = host.kernel_version(text)
    if len(numbers) < 2:
        raise UsageError(f"--linux {text}: a version such as 6.12 is needed")
    if numbers < OLDEST_KERNEL:
        oldest = ".".join(map(str, OLDEST_KERNEL))
        raise UsageError(f"--linux {text}: images over several files take Linux {oldest} or later")
    return numbers[0], numbers[1]
