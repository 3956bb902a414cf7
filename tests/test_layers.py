"""Imports go down only: the table of the layers, and the checks that hold the modules to it.

The source is parsed, nothing is imported, so a broken module does not hide a wrong import. Every import
counts, wherever it stands: inside a function or under TYPE_CHECKING, upwards is upwards.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "wdsfs"

# Lowest first: a module may import from rows above its own, and of those from the ones its row names
# ("*": from all). A row without a name goes on with the row above. What the words of the last column stand for
# is listed below the table.
TABLE = """
module     | may import from wdsfs                                  | stays away from
-----------+--------------------------------------------------------+------------------------------
__init__   |                                                        | third-party
errors     |                                                        | third-party disks clock
identity   | errors                                                 | third-party clock
inodes     |                                                        | third-party disks clock
generations | identity inodes                                        | third-party disks clock
board      |                                                        | third-party disks
snapshots  |                                                        | third-party
names      |                                                        | third-party disks clock
reading    |                                                        | third-party disks clock
trust      | errors                                                 | third-party clock
system     | trust errors                                           | third-party
control    | system                                                 | fuse lmdb numpy terminal
mountpoint | control system errors trust                            | fuse trio lmdb numpy terminal
braces     | errors                                                 | fuse trio lmdb numpy terminal disks clock
documents  | errors                                                 | fuse trio lmdb numpy terminal clock
lists      | braces documents errors                                | fuse trio lmdb numpy terminal clock
spec       | braces documents lists names errors reading            | fuse trio lmdb numpy terminal clock
pool       | errors spec                                            | third-party
source     |                                                        | third-party clock
durable    | errors source                                          | third-party clock
seek       |                                                        | fuse trio lmdb numpy terminal clock
copies     | system trust errors                                    | third-party
shard      | errors source                                          | fuse trio lmdb terminal clock
wids       | names shard                                            | fuse trio lmdb terminal clock
codecs     | errors                                                 | fuse trio lmdb numpy terminal clock
compressed | codecs copies seek shard source errors                 | fuse trio lmdb terminal clock
header     |                                                        | third-party disks clock
record     | shard source                                           | fuse trio lmdb terminal clock
claims     | names record                                           | fuse trio lmdb terminal disks clock
builder    | names shard errors inodes reading record source        | fuse trio lmdb terminal clock
energon    | names shard errors                                     | fuse trio lmdb terminal clock
ahead      | source                                                 | fuse trio lmdb terminal clock
formats    | names shard ahead errors reading record                | fuse trio lmdb terminal clock
labels     | names system trust errors                              | fuse trio lmdb numpy terminal clock
compose    | codecs names shard builder errors record               | fuse trio lmdb terminal clock
pages      |                                                        | fuse trio lmdb terminal
index      | builder claims compressed copies pages pool system     |
           | trust ahead errors identity reading record spec        | fuse trio terminal
access     | identity trust index errors                            | fuse trio lmdb numpy terminal clock
lower      | compressed identity shard source index record access   |
           | claims errors generations spec                         | fuse trio lmdb terminal
derived    | codecs labels lower access compose errors generations  |
           | index names reading record spec                        | fuse trio lmdb terminal
tree       | inodes names errors lower record shard                 | fuse trio lmdb terminal
merged     | inodes names claims errors index lower record tree     | fuse trio lmdb terminal
numbered   | inodes errors lower merged record spec tree            | fuse trio lmdb terminal
report     | board lower tree                                       | fuse trio lmdb numpy terminal
pack       | header shard durable errors identity index record source | fuse trio lmdb terminal clock
overlay    | trust errors inodes reading                            | third-party clock
changes    | inodes lower names errors identity overlay pack record |
           | shard tree                                             | fuse trio lmdb terminal clock
commit     | braces header changes durable errors identity lower    |
           | names overlay pack record shard                        | fuse trio lmdb terminal clock
export     | __init__ ahead energon formats pool wids durable       |
           | errors identity index lower record                     | fuse trio lmdb terminal clock
inplace    | trust changes commit errors identity lower overlay pack | fuse trio lmdb terminal clock
restore    | inodes errors identity lower overlay tree              | fuse trio lmdb numpy terminal clock
journal    |                                                        | third-party disks clock
upper      | errors inodes overlay                                  | third-party clock
writable   | inodes lower errors identity journal names overlay     |
           | restore tree upper                                     | fuse trio lmdb numpy terminal clock
special    | control formats inodes names report wids board errors  |
           | identity lower record snapshots tree writable          |
protocol   |                                                        | fuse trio lmdb terminal disks clock
watch      | protocol generations inodes spec                       | fuse trio lmdb numpy terminal
worker     | protocol                                               | fuse trio lmdb numpy terminal
ops        | lower protocol board errors inodes names special tree  |
           | writable                                               | fuse trio lmdb numpy terminal disks
writes     | protocol board errors inodes ops special tree writable | fuse trio lmdb numpy terminal
stack      | journal trust errors identity overlay spec tree upper  |
           | writable                                               | fuse trio lmdb numpy terminal
engine     | protocol worker board errors ops tree writable         | fuse lmdb numpy terminal
check      | ahead compressed energon formats names shard errors    |
           | reading record source                                  | fuse trio lmdb terminal
soundness  | check errors lower                                     | fuse trio lmdb terminal clock
mount      | *                                                      | lmdb numpy terminal
statistics | errors lower record                                    | fuse trio lmdb terminal
doctor     | control mountpoint system trust errors                 | trio lmdb numpy terminal
console    | errors names compose index lower soundness spec tree   |
           | reading copies trust pool derived                      | fuse trio lmdb numpy
cli_export | *                                                      | fuse trio lmdb numpy
cli_overlay | *                                                      | fuse trio lmdb numpy
cli_restore | *                                                      | fuse trio lmdb numpy
cli_status | *                                                      | fuse trio lmdb numpy
cli        | *                                                      | fuse trio lmdb numpy
fstab      | names errors cli mount                                 | third-party
__main__   | cli fstab                                              | third-party
"""

GROUPS = {
    "fuse": {"pyfuse3"},
    "terminal": {"click", "rich"},
    "clock": {"time", "datetime"},
    "disks": {"os", "io", "pathlib", "shutil", "tempfile"},
}

# What the command line must not load before it knows that the command needs it: `wdsfs --help` is to be
# there at once.
SLOW = {"pyfuse3", "trio", "lmdb", "numpy", "yaml"}

MODULES_OF = {"PyYAML": "yaml"}  # where a package has another name than what is imported


class Room(NamedTuple):
    may_import: set[str]
    stays_away: set[str]


def parse_table() -> dict[str, Room]:
    rows = [[cell.strip() for cell in line.split("|")] for line in TABLE.splitlines() if "|" in line]
    rooms: dict[str, Room] = {}
    for at in [at for at, row in enumerate(rows) if not row[0]]:  # the rest of the row above
        rows[at - 1] = [" ".join(cells).strip() for cells in zip(rows[at - 1], rows[at], strict=True)]
    for name, ours, away in [row for row in rows[1:] if row[0]]:
        stays_away = set[str]().union(*(GROUPS.get(word, {word}) for word in away.split()))
        rooms[name] = Room(set(rooms) if ours == "*" else set(ours.split()), stays_away)
    return rooms


ROOMS = parse_table()
MODULES = sorted(file.stem for file in PACKAGE.glob("*.py"))


class Import(NamedTuple):
    line: int
    module: str  # "wdsfs.tree", "numpy.typing"
    at_load: bool  # runs when the importing module is loaded

    @property
    def ours(self) -> str | None:
        """The wdsfs module that is imported; None for other packages."""
        package, _, module = self.module.partition(".")
        return (module.split(".")[0] or "__init__") if package == "wdsfs" else None

    @property
    def top(self) -> str:
        return self.module.split(".")[0]

    @property
    def third_party(self) -> bool:
        return self.top != "wdsfs" and self.top not in sys.stdlib_module_names


def imports_of(source: str) -> list[Import]:
    """All imports in a module of the package, in the order of the text."""
    return list(_walk(ast.parse(source), at_load=True))


def _walk(node: ast.AST, *, at_load: bool) -> Iterator[Import]:
    match node:
        case ast.Import():
            for alias in node.names:
                yield Import(node.lineno, alias.name, at_load)
        case ast.ImportFrom():
            package = ".".join(filter(None, ["wdsfs" if node.level else "", node.module]))
            for alias in node.names:
                # `from wdsfs import tree` names a module, `from wdsfs import __version__` does not.
                is_module = package == "wdsfs" and (PACKAGE / f"{alias.name}.py").exists()
                yield Import(node.lineno, f"wdsfs.{alias.name}" if is_module else package, at_load)
        case ast.If(test=ast.Name("TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
            for statement in node.body:
                yield from _walk(statement, at_load=False)
            for statement in node.orelse:
                yield from _walk(statement, at_load=at_load)
        case _:
            inside = at_load and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from _walk(child, at_load=inside)


def imports_of_module(module: str) -> list[Import]:
    return imports_of((PACKAGE / f"{module}.py").read_text())


def test_every_module_has_a_row_and_every_row_a_module() -> None:
    assert set(MODULES) - set(ROOMS) == set(), "without a row in the table"
    assert set(ROOMS) - set(MODULES) == set(), "in the table, but not there"


def test_the_package_is_flat() -> None:
    """The table has no place for a package inside the package."""
    assert [str(path) for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE] == []


def test_a_row_only_names_rows_above_it() -> None:
    above: set[str] = set()
    for module, room in ROOMS.items():
        assert room.may_import <= above, f"{module} is to import from its own row or a later one"
        above.add(module)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down_only(module: str) -> None:
    wrong = [
        f"wdsfs/{module}.py:{found.line}: may not import wdsfs.{found.ours}"
        for found in imports_of_module(module)
        if found.ours is not None and found.ours not in ROOMS[module].may_import
    ]
    assert wrong == []


@pytest.mark.parametrize("module", MODULES)
def test_a_module_stays_away_from_what_is_not_its_business(module: str) -> None:
    away = ROOMS[module].stays_away
    wrong = [
        f"wdsfs/{module}.py:{found.line}: may not import {found.module}"
        for found in imports_of_module(module)
        if found.top in away or ("third-party" in away and found.third_party)
    ]
    assert wrong == []


@pytest.mark.parametrize("module", MODULES)
def test_what_is_imported_is_a_declared_dependency(module: str) -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    packages = {re.split(r"[^\w-]", requirement)[0] for requirement in declared}
    names = {MODULES_OF.get(package, package) for package in packages}
    used = {found.top for found in imports_of_module(module) if found.third_party}
    assert used <= names


@pytest.mark.parametrize("entry", ["cli", "fstab"])
def test_a_command_starts_without_the_slow_packages(entry: str) -> None:
    """What `entry` loads before it does anything, followed through our own modules."""
    wrong, seen, waiting = [], {"__init__", entry}, ["__init__", entry]
    while waiting:
        module = waiting.pop()
        for found in imports_of_module(module):
            if not found.at_load:
                continue
            if found.top in SLOW:
                wrong.append(f"wdsfs/{module}.py:{found.line}: loads {found.top}")
            elif found.ours is not None and found.ours not in seen:
                seen.add(found.ours)
                waiting.append(found.ours)
    assert wrong == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import wdsfs.errors", ("errors", True)),
        ("from wdsfs import errors", ("errors", True)),
        ("from wdsfs import __version__", ("__init__", True)),
        ("from wdsfs.errors import WdsfsError", ("errors", True)),
        ("from . import errors", ("errors", True)),
        ("from .errors import WdsfsError", ("errors", True)),
        ("class A:\n    from wdsfs import errors", ("errors", True)),
        ("try:\n    import wdsfs.errors\nexcept ImportError:\n    pass", ("errors", True)),
        ("def f():\n    from wdsfs import errors", ("errors", False)),
        ("async def f():\n    if x:\n        import wdsfs.errors", ("errors", False)),
        ("if TYPE_CHECKING:\n    from wdsfs import errors", ("errors", False)),
        ("if typing.TYPE_CHECKING:\n    pass\nelse:\n    from wdsfs import errors", ("errors", True)),
        ("import numpy.typing", (None, True)),
    ],
)
def test_the_checks_see_an_import_in_every_form(source: str, expected: tuple[str | None, bool]) -> None:
    [found] = imports_of(source)
    assert (found.ours, found.at_load) == expected
