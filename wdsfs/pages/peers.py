"""Whose process is at the other end of a connection on this machine, as the kernel knows it (sock_diag)."""

from __future__ import annotations

import socket
import struct

NOBODY = -1  # the other end is closed, or half closed: its user is not known any more

_SOCK_DIAG, _BY_FAMILY, _REQUEST = 4, 20, 1  # linux/netlink.h, linux/sock_diag.h
_ESTABLISHED = 1
_HEAD = struct.Struct("=IHHII")  # length, type, flags, sequence, port
# Family, protocol, extensions, states; ports and addresses of the socket and of its peer; interface, no cookie.
_QUESTION = struct.Struct("=BBBxI2s2s4s12x4s12xIQ")
_ANSWER = struct.Struct("=BBxx48x12xI")  # family, state, user
_SECONDS = 5.0  # the kernel answers at once


def user_of(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """The user of the socket at the client's end; NOBODY if it is not open, None if the kernel does not say."""
    (here, here_port), (there, there_port) = (_address(one) for one in (client, server))
    question = _QUESTION.pack(
        socket.AF_INET,
        socket.IPPROTO_TCP,
        0,
        0xFFFFFFFF,
        here_port,
        there_port,
        here,
        there,
        0,
        0xFFFFFFFFFFFFFFFF,
    )
    head = _HEAD.pack(_HEAD.size + len(question), _BY_FAMILY, _REQUEST, 0, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as kernel:
            kernel.settimeout(_SECONDS)
            kernel.send(head + question)
            answer = kernel.recv(8192)
    except OSError:
        return None
    if _HEAD.unpack_from(answer)[1] != _BY_FAMILY:  # an error: there is no such socket
        return NOBODY
    _, state, user = _ANSWER.unpack_from(answer, _HEAD.size)
    return int(user) if state == _ESTABLISHED else NOBODY


def _address(end: tuple[str, int]) -> tuple[bytes, bytes]:
    return socket.inet_aton(end[0]), struct.pack("!H", end[1])
