"""The order in which a listing shows the names of the upper that the lower has not: by a hash of the name.

So a listing can be continued whatever is made or removed meanwhile, and by another worker.
"""

from __future__ import annotations

import bisect
import hashlib
from collections import OrderedDict
from collections.abc import Iterator

from wdsfs.inodes import UP
from wdsfs.overlay.node_table import NodeTable
from wdsfs.overlay.upper_format import THE_WHITEOUT, UpperNode

ORDERS_MAX = 16  # listed directories whose order of new names is kept


class NameOrder:
    """The new names of directories in their order, kept for the few directories that were listed last."""

    def __init__(self, nodes: NodeTable) -> None:
        self.nodes = nodes
        self._orders: OrderedDict[UpperNode, list[tuple[int, bytes]]] = OrderedDict()

    def after(self, directory: UpperNode, below: int, cursor: int) -> Iterator[tuple[int, bytes, UpperNode]]:
        """The new names after a cursor, each with its cursor and node. `below` is the lower's directory, or 0."""
        order = self._order(directory, below)
        children = directory.children
        at = bisect.bisect_right(order, cursor & UP - 1, key=_first) if cursor >= UP else 0
        while at < len(order):
            place, name = order[at]
            child = children.get(name)
            if child is not None and child is not THE_WHITEOUT:
                yield place | UP, name, child
            at += 1

    def _order(self, directory: UpperNode, below: int) -> list[tuple[int, bytes]]:
        """The names in a directory that the lower has not, in the order in which they are listed.

        Kept for a few directories, because a listing asks again and again. Removed names may stay in it.
        """
        order = self._orders.get(directory)
        if order is None or len(order) > 2 * len(directory.children) + 64:
            order = sorted(
                (_hash(name), name)
                for name, child in directory.children.items()
                if child is not THE_WHITEOUT and not (below and self.nodes.has(below, name))
            )
            self._orders[directory] = order
            if len(self._orders) > ORDERS_MAX:
                self._orders.popitem(last=False)
        else:
            self._orders.move_to_end(directory)
        return order

    def entered(self, directory: UpperNode, name: bytes) -> None:
        """A name has come into a directory of the upper."""
        order = self._orders.get(directory)
        if order is not None and not (directory.lower > 0 and self.nodes.has(directory.lower, name)):
            entry = _hash(name), name
            at = bisect.bisect_left(order, entry)
            if at == len(order) or order[at] != entry:
                order.insert(at, entry)

    def drop(self, directory: UpperNode) -> None:
        """Forget the order of a directory, of which some names have become the lower's or its own."""
        self._orders.pop(directory, None)

    def clear(self) -> None:
        """Forget all: the lower has changed."""
        self._orders.clear()


def _first(entry: tuple[int, bytes]) -> int:
    return entry[0]


def _hash(name: bytes) -> int:
    """60 bits of a name. That two names of one directory have the same ones will not happen."""
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 4
