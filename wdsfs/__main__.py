"""The programs `wdsfs` and `mount.wdsfs`, and `python -m wdsfs`.

Nothing is imported before an interrupt simply ends the program: in an import it would be a traceback. The command
line takes over where it can say something about it (`main._Group`).
"""

import atexit
import gc
import signal

YOUNG_OBJECTS = 50_000  # containers that are made between two collections


def _end_at_interrupts() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as in a background job
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _collect_rarely() -> None:
    """Look for cycles of garbage less often than Python does: imports alone cause 70 ms of this work.

    Imported objects are frozen, so that the collection at the end skips them.
    """
    gc.set_threshold(YOUNG_OBJECTS)
    atexit.register(gc.freeze)


def main() -> None:
    """Run the program wdsfs."""
    _end_at_interrupts()
    _collect_rarely()
    from wdsfs.cli import main

    main.main(prog_name="wdsfs")


def mount_helper() -> int:
    """Return the program mount.wdsfs."""
    _end_at_interrupts()
    _collect_rarely()
    from wdsfs import host

    host.refuse_algebra_threads()
    from wdsfs.cli import mount_helper

    return mount_helper.main()


if __name__ == "__main__":
    main()
