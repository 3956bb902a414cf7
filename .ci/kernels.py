"""The smoke suite on another kernel: a virtual machine with nothing but it, Python and an installed wdsfs.

    .ci/kernels.py LINUX_IMAGE.deb PYTHON [STEP...]

LINUX_IMAGE.deb is a kernel package of Debian (`apt-get download linux-image-cloud-amd64` has its name), PYTHON the
interpreter of an environment in which wdsfs is installed, not editable. Needs qemu-system-x86, busybox-static,
e2fsprogs, cpio and dpkg. The machine is emulated, which takes minutes, unless ACCEL=kvm says otherwise. Exits with
the number of failed steps.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

MODULES = ("fuse", "loop", "crc32c_generic", "libcrc32c", "netfs", "erofs", "overlay")
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
    package, python = Path(sys.argv[1]).resolve(), Path(os.path.abspath(sys.argv[2]))
    with tempfile.TemporaryDirectory(prefix="wdsfs-kernel-") as name:
        home = Path(name)
        subprocess.run(["dpkg", "-x", package, home / "kernel"], check=True)
        [kernel] = (home / "kernel/boot").glob("vmlinuz-*")
        make_root(home / "root", home / "kernel", python)
        return boot(kernel, pack(home / "root", home / "root.cpio"))


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
    present = []
    for module in MODULES:  # one that is not there is built in, or not of this kernel
        for file in (kernel / "lib").rglob(f"{module}.ko"):
            shutil.copy(file, root / "modules")
            present.append(module)
    with (root / "work.ext4").open("wb") as disk:
        disk.truncate(64 << 20)
    subprocess.run(["mke2fs", "-q", "-t", "ext4", root / "work.ext4"], check=True)
    shutil.copy(Path(__file__).with_name("kernel_smoke.py"), root / "smoke.py")
    (root / "etc").mkdir(exist_ok=True)
    (root / "etc/passwd").write_text("root:x:0:0:root:/work:/bin/sh\n")
    (root / "init").write_text(INIT.format(modules=" ".join(present), python=python, steps=" ".join(sys.argv[3:])))
    (root / "init").chmod(0o755)


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
    command += ["-append", "console=ttyS0 panic=-1 rdinit=/init"]
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
