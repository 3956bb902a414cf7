"""The journal: what a worker that takes over knows of the request that was under way."""

from __future__ import annotations

from wdsfs.overlay.writable_tree import JOURNAL_BYTES, RequestJournal

KEY = (1, b"name")


def journal(memory: bytearray, requester: int = 7, resent: bool = True) -> RequestJournal:
    """That of a new worker, which gets a request."""
    journal = RequestJournal(memory)
    journal.requester, journal.resent = requester, resent
    if not resent:
        journal.drop_previous()
    return journal


def begun() -> bytearray:
    """Return the journal of a worker that was killed at a mkdir of thread 7."""
    memory = bytearray(JOURNAL_BYTES)
    journal(memory, resent=False).begin("mkdir", KEY, (5,))
    return memory


def test_the_same_request_is_recognised_once() -> None:
    one = journal(begun())
    assert one.repeats("mkdir", KEY) == (5,)
    assert one.repeats("mkdir", KEY) is None


def test_another_request_is_not_recognised() -> None:
    assert journal(begun()).repeats("rmdir", KEY) is None
    assert journal(begun()).repeats("mkdir", (2, b"name")) is None
    assert journal(begun(), requester=8).repeats("mkdir", KEY) is None
    assert journal(begun(), resent=False).repeats("mkdir", KEY) is None


def test_a_note_goes_with_the_answer() -> None:
    memory = begun()
    one = journal(memory)
    one.repeats("mkdir", KEY)
    one.clear()
    assert journal(memory).repeats("mkdir", KEY) is None


def test_a_worker_killed_before_its_first_request_leaves_the_note() -> None:
    memory = begun()
    journal(memory).clear()
    assert journal(memory).repeats("mkdir", KEY) == (5,)


def test_a_note_is_settled_when_nothing_was_in_flight() -> None:
    """Else a later mkdir of the same thread, killed twice, would be taken for this one."""
    memory = begun()
    journal(memory, resent=False)
    assert journal(memory).repeats("mkdir", KEY) is None


def test_a_note_that_does_not_fit_is_dropped() -> None:
    memory = begun()
    journal(memory, resent=False).begin("mkdir", (1, b"x" * JOURNAL_BYTES))
    assert journal(memory).repeats("mkdir", KEY) is None
