"""The smoke suite on another kernel: a virtual machine with nothing but it, Python and an installed wdsfs.

    .ci/kernels.py PYTHON PACKAGE [STEP...]

PYTHON is the interpreter of an environment in which wdsfs is installed, not editable; PACKAGE a kernel package
of Debian, or one that depends on the newest (linux-image-cloud-amd64). Needs qemu-system-x86, busybox-static,
e2fsprogs, cpio and apt. The machine is emulated, which takes minutes, unless ACCEL=kvm says otherwise. Exits with
the number of failed steps.
"""

from __future__ import annotations

import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

MODULES = ("fuse", "loop", "crc32c_generic", "erofs")
# A kernel is in these packages; the first depends on the others, where there are any.
PARTS = re.compile(r"Depends: (linux-(?:image|binary|modules)-\d.*)")
PROGRAMS = ("/bin/busybox", "/usr/bin/fusermount3", "/bin/mount", "/bin/umount", "/sbin/losetup")
LEFT_OUT = ("test", "tests", "idlelib", "config-*", "__pycache__", "*.a", "pip", "ensurepip", "share", "include")
INIT = """#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev /tmp /run /etc
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox mount -t tmpfs tmp /tmp
/bin/busybox mount -t tmpfs run /run
for module in {modules}; do /bin/busybox insmod /modules/$module.ko; done
/bin/busybox mkdir /work
/bin/busybox mknod /dev/loop0 b 7 0 2>/dev/null
/bin/mount -o loop /work.ext4 /work
export HOME=/work PATH=/usr/bin:/bin:/usr/sbin:/sbin PYTHONDONTWRITEBYTECODE=1
{python} /smoke.py {steps} 2>&1
/bin/busybox poweroff -f
"""


def main() -> int:
    python = Path(os.path.abspath(sys.argv[1]))
    with tempfile.TemporaryDirectory(prefix="wdsfs-kernel-", dir="/var/tmp") as name:
        home = Path(name)
        unpack(sys.argv[2], home)
        [kernel] = (home / "kernel").rglob("vmlinuz-*")
        make_root(home / "root", home / "kernel", python)
        return boot(kernel, pack(home / "root", home / "root.cpio"))


def unpack(package: str, home: Path) -> None:
    """Download a kernel, and unpack it to `home/kernel`."""
    names = [package]
    for name in names:
        said = subprocess.check_output(["apt-cache", "depends", "--important", name], text=True)
        names += [part for part in PARTS.findall(said) if part not in names]
    (home / "packages").mkdir()
    subprocess.run(["apt-get", "-qq", "download", *names], cwd=home / "packages", check=True)
    for file in (home / "packages").iterdir():
        subprocess.run(["dpkg", "-x", file, home / "kernel"], check=True)


def make_root(root: Path, kernel: Path, python: Path) -> None:
    """Fill the root of the machine."""
    root.mkdir()
    code = "import sysconfig; print(sysconfig.get_path('stdlib'))"
    library = Path(subprocess.check_output([python, "-c", code], text=True).strip())
    for place, others in ((python.parent.parent, ()), (library, ("site-packages", "dist-packages"))):
        ignored = shutil.ignore_patterns(*LEFT_OUT, *others)
        shutil.copytree(place, root / place.relative_to("/"), symlinks=True, ignore=ignored, dirs_exist_ok=True)
        for file in (root / place.relative_to("/")).rglob("*"):
            if ".so" in file.name or file.parent.name == "bin":
                copy_libraries(file, root)
    interpreter = python
    while interpreter.is_symlink():  # of the environment, to that of the system, to that of its version
        interpreter = interpreter.parent / interpreter.readlink()
        copy(interpreter, root)
        copy_libraries(interpreter, root)
    for program in PROGRAMS:
        source = shutil.which(os.path.basename(program)) or program
        copy(Path(source), root, program)
        copy_libraries(Path(source), root)
    (root / "modules").mkdir()
    modules: list[str] = []
    for module in MODULES:
        add_module(module, kernel, root / "modules", modules)
    with (root / "work.ext4").open("wb") as disk:
        disk.truncate(64 << 20)
    subprocess.run(["mke2fs", "-q", "-t", "ext4", root / "work.ext4"], check=True)
    shutil.copy(Path(__file__).with_name("kernel_smoke.py"), root / "smoke.py")
    (root / "etc").mkdir(exist_ok=True)
    (root / "etc/passwd").write_text("root:x:0:0:root:/work:/bin/sh\n")
    (root / "init").write_text(INIT.format(modules=" ".join(modules), python=python, steps=" ".join(sys.argv[3:])))
    (root / "init").chmod(0o755)


def add_module(name: str, kernel: Path, to: Path, added: list[str]) -> None:
    """Unpack a module of the kernel after those that it needs; one that has no file is built in."""
    file = next(kernel.rglob(re.sub("[-_]", "[-_]", name) + ".ko*"), None)
    if file is None or name in added:
        return
    data = lzma.decompress(file.read_bytes()) if file.suffix == ".xz" else file.read_bytes()
    needed = re.search(rb"\0depends=([^\0]*)\0", data)
    for other in needed[1].decode().split(",") if needed else ():
        add_module(other, kernel, to, added)
    (to / f"{name}.ko").write_bytes(data)
    added.append(name)


def copy(file: Path, root: Path, name: str | None = None) -> None:
    target = root / (name or str(file)).lstrip("/")
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)


def copy_libraries(program: Path, root: Path) -> None:
    """Copy the shared libraries that a program or library needs."""
    said = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    for path in re.findall(r"(/[^ ]+) \(0x", said):
        copy(Path(path), root)


def pack(root: Path, archive: Path) -> Path:
    with archive.open("wb") as file:
        names = subprocess.check_output(["find", ".", "-print0"], cwd=root)
        command = ["cpio", "--null", "--create", "--format=newc", "--quiet"]
        subprocess.run(command, cwd=root, input=names, stdout=file, check=True)
    return archive


def boot(kernel: Path, archive: Path) -> int:
    """Run the machine to its end, and show what it says; return how many steps have failed."""
    command = ["qemu-system-x86_64", "-accel", os.environ.get("ACCEL", "tcg"), "-cpu", "max", "-m", "2G"]
    command += ["-smp", "2"]
    command += ["-nographic", "-no-reboot", "-kernel", str(kernel), "-initrd", str(archive)]
    command += ["-append", "console=ttyS0 quiet panic=-1 rdinit=/init"]
    failed = -1
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True) as machine:
        assert machine.stdout
        for line in machine.stdout:
            print(line.rstrip(), flush=True)
            if match := re.search(r"smoke: (\d+) failed", line):
                failed = int(match[1])
    return 1 if failed < 0 else failed


if __name__ == "__main__":
    sys.exit(main())
