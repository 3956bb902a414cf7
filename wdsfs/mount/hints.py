"""Hints at what loaders of directories would make of a mount without an error."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from wdsfs.errors import ShardError
from wdsfs.names import MEDIA
from wdsfs.tree.classes import folders_of, misnumbered, numbers_of, read_class_names
from wdsfs.tree.options import TreeOptions
from wdsfs.tree.shard_set import NotIndexed, ShardSet
