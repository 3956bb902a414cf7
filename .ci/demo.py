"""`make demo`: a terminal session with wdsfs on real images.

Writes the handwritten digits that scikit-learn ships (1797 images of 8 x 8 pixels) as a set of four
shards, mounts it, and looks around with ordinary programs. Each command is printed before it runs.

    python .ci/demo.py            in a temporary directory that is removed afterwards
    python .ci/demo.py DIRECTORY  there, and the shards stay for trying things out

Exit status: 0, or 1 when a command of the session failed.
"""

import argparse
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from sklearn.datasets import load_digits
from webdataset import ShardWriter

SHARDS = "digits-{000000..000003}.tar"
IMAGES_PER_SHARD = 450
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]

# One command per block; the eighth image of the set is the first seven.
SESSION = """
ls -sh shards

wdsfs mount 'shards/digits-{000000..000003}.tar' mnt

ls mnt

ls mnt/digits-000000

ls mnt/digits-000000/seven | head -n 3

ls -l mnt/digits-000000/seven/00007

cat mnt/digits-000000/seven/00007/cls

cat mnt/digits-000000/seven/00007/json

cp -r mnt/digits-000000/seven/00007 copy

tar -xOf shards/digits-000000.tar seven/00007.png | cmp - copy/png && echo the same bytes

find mnt -name png | wc -l

python - mnt/digits-000000/seven/00007/png <<END
import sys
from PIL import Image
image = Image.open(sys.argv[1])
print(image.format, image.size)
for row in range(image.height):
    print("".join(2 * " .:-=+*#%@"[image.getpixel((x, row)) // 26] for x in range(image.width)))
END

wdsfs status

wdsfs umount mnt
"""


class Failed(Exception):
    """A command of the session failed."""


def main() -> int:
    parser = argparse.ArgumentParser(description="a terminal session with wdsfs on real images")
    parser.add_argument("directory", nargs="?", type=Path, help="work here and keep the shards")
    arguments = parser.parse_args()
    given = arguments.directory
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("demo: terminated"))
    home = given or Path(tempfile.mkdtemp(prefix="wdsfs-demo-"))
    try:
        print(f"==> Writing 1797 images into {home}/shards/{SHARDS}", flush=True)
        write_shards(home)
        play(home)
    except Failed as failure:
        print(f"demo: {failure}; `wdsfs doctor` says what this machine lacks", file=sys.stderr)
        return 1
    finally:
        clean_up(home, keep_shards=given is not None)
    return 0


def write_shards(home: Path) -> None:
    home.joinpath("shards").mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    # Fixed times: the same shards on every run.
    with ShardWriter(
        str(home / "shards/digits-%06d.tar"), maxcount=IMAGES_PER_SHARD, verbose=0, mtime=1_000_000_000
    ) as shards:
        for number, (pixels, label) in enumerate(zip(digits.images, digits.target.tolist(), strict=True)):
            shards.write(
                {
                    "__key__": f"{WORDS[label]}/{number:05d}",
                    "png": (pixels / 16).astype("float32"),  # 0 to 16 in scikit-learn, 0 to 1 here
                    "cls": label,
                    "json": {"label": label, "word": WORDS[label], "ink": int(pixels.sum())},
                }
            )


def play(home: Path) -> None:
    """Run the session in `home`, with the wdsfs and the Python that run this file.

    Raises Failed at the first command whose exit status is not 0.
    """
    home.joinpath("mnt").mkdir(exist_ok=True)
    for command in SESSION.strip().split("\n\n"):
        print(f"\n$ {command}", flush=True)
        status = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=home, env=environment(home))
        if status.returncode != 0:
            raise Failed(f"the last command ended with status {status.returncode}")


def environment(home: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
    # The index of a set that goes away again has no place in the user's cache.
    return os.environ | {"PATH": path, "WDSFS_INDEX_DIR": str(home / "index")}


def clean_up(home: Path, *, keep_shards: bool) -> None:
    """Unmount if the session did not get that far, then remove what it made."""
    mount = home / "mnt"
    for unmount in (["wdsfs", "umount", "mnt"], ["fusermount3", "-u", "-z", "mnt"]):
        if is_mounted(mount):
            subprocess.run(unmount, cwd=home, env=environment(home))
    if is_mounted(mount):
        sys.exit(f"demo: {mount} is still mounted, so {home} stays; `fusermount3 -u {mount}` unmounts it")
    if (home / "copy").exists():
        (home / "copy").chmod(0o755)  # cp took the mode of the read-only original over
    for name in ["mnt", "copy", "index"]:
        shutil.rmtree(home / name, ignore_errors=True)
    if not keep_shards:
        shutil.rmtree(home)


def is_mounted(path: Path) -> bool:
    try:
        path.stat()
    except OSError as error:
        return error.errno == errno.ENOTCONN  # a mount whose daemon is dead
    return path.is_mount()


if __name__ == "__main__":
    sys.exit(main())
