"""The options of how a set is shown: layout, names, and what a view makes of it; as values, checked.

How they are typed is `cli/options.py`.
"""

from __future__ import annotations

import getopt
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from wdsfs.errors import UsageError

if TYPE_CHECKING:
    from wdsfs.tree.composition import Composition
    from wdsfs.tree.tree import View

OF_CLASSES = ("class_from", "class_names", "class_digits")
_MANY = ("columns", "field", "join", "associate")
_FLAGS = ("ignore_case", "decode_members")
_POLICIES = ("missing", "duplicates")


class TreeOptions(NamedTuple):
    """The options of a tree: layout, names, and the view of the set."""

    layout: str
    names: str
    merge: bool
    index_tree: bool
    composition: Composition

    def view(self, partial: bool = False) -> View:
        """The layout as trees take it; `partial`: some shards may be missing. Raises UsageError."""
        return view_of(self.layout, self.names, self.index_tree, partial)


def view_of(layout: str, names: str, index_tree: bool = False, partial: bool = False) -> View:
    """The layout as trees take it. Raises UsageError for options that do not go together."""
    from wdsfs.tree.tree import View

    if layout != "samples" and index_tree:
        raise UsageError(f"--index-tree is for --layout samples; in --layout {layout} a sample has no directory")
    if layout != "samples" and names == "full":
        raise UsageError(f"--names full is for --layout samples; in --layout {layout} the names are always whole")
    return View(layout, names, index_tree, partial)


def composition_of(layout: str, **typed: Any) -> Composition:
    """The options of a view, by their names, checked. Raises UsageError."""
    # Late, as all imports here: commands that need none of it start without NumPy.
    from wdsfs.tree.composition import Composition, class_source, columns_of, fields_of, refuse_equal_names

    class_options = [f"--{name.replace('_', '-')}" for name in OF_CLASSES if typed[name] is not None]
    if layout != "classes" and class_options:
        raise UsageError(f"{class_options[0]} is for --layout classes")
    extension, field = class_source("cls" if typed["class_from"] is None else typed["class_from"])
    columns, fields = columns_of(typed["columns"]), fields_of(typed["field"])
    refuse_equal_names(columns, fields)
    join, associate = _settled(typed["join"], typed["associate"])
    as_typed = ("ignore_case", "missing", "duplicates", "class_names", "class_digits")
    return Composition(
        columns=columns,
        fields=fields,
        decode=typed["decode_members"],
        classes=layout == "classes",
        class_from=extension,
        class_field=field,
        join=join,
        associate=associate,
        **{name: typed[name] for name in as_typed},
    )


def _settled(join: Sequence[str], associate: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Joined shards and label files that mean the same when another process reads them."""
    if not (join or associate):
        return (), ()
    from wdsfs.spec.expand import settled
    from wdsfs.tree.label_files import settled_label

    return tuple(map(settled, join)), tuple(map(settled_label, associate))


def parse_composition(layout: str, text: str) -> Composition:
    """The options of a view from their text (`Composition.text`). Raises UsageError."""
    typed: dict[str, Any] = dict.fromkeys(OF_CLASSES) | dict.fromkeys(_FLAGS, False)
    typed |= dict.fromkeys(_POLICIES, "error") | {name: [] for name in _MANY}
    names = [name.replace("_", "-") for name in typed]
    flags = [name.replace("_", "-") for name in _FLAGS]
    try:
        pairs, _ = getopt.getopt(shlex.split(text), "", [name if name in flags else f"{name}=" for name in names])
    except (getopt.GetoptError, ValueError) as error:
        raise UsageError(f"{text}: {error}") from None
    for option, value in pairs:
        name = option[2:].replace("-", "_")
        if name in _MANY:
            typed[name].append(value)
        else:
            typed[name] = name in _FLAGS or (int(value) if name == "class_digits" else value)
    return composition_of(layout, **typed)
