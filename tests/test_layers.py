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
inodes     |                                                        | third-party disks clock
board      | inodes                                                 | third-party disks
snapshots  |                                                        | third-party
names      | errors                                                 | third-party disks clock
reading    |                                                        | third-party disks clock
trust      | errors                                                 | third-party clock
system     | errors trust                                           | third-party
control    | errors system                                          | fuse lmdb numpy terminal
mountpoint | errors trust system control                            | fuse trio lmdb numpy terminal
braces     | errors                                                 | fuse trio lmdb numpy terminal disks clock
documents  | errors                                                 | fuse trio lmdb numpy terminal clock
lists      | errors braces documents                                | fuse trio lmdb numpy terminal clock
spec       | errors names reading braces documents lists            | fuse trio lmdb numpy terminal clock
pool       | errors spec                                            | third-party
source     |                                                        | third-party clock
seek       |                                                        | fuse trio lmdb numpy terminal clock
copies     | errors system trust                                    | third-party
shard      | errors names source                                    | fuse trio lmdb terminal clock
codecs     | errors                                                 | fuse trio lmdb numpy terminal clock
compressed | errors source seek copies shard codecs                 | fuse trio lmdb terminal clock
header     |                                                        | third-party disks clock
record     | inodes shard source                                    | fuse trio lmdb terminal clock
claims     | names record                                           | fuse trio lmdb terminal disks clock
builder    | errors inodes names reading record shard source        | fuse trio lmdb terminal clock
formats    | errors names reading shard record                      | fuse trio lmdb terminal clock
energon    | errors names shard                                     | fuse trio lmdb terminal clock
ahead      | formats energon source                                   | fuse trio lmdb terminal clock
labels     | errors names system trust                              | fuse trio lmdb numpy terminal clock
compose    | errors names shard record builder codecs               | fuse trio lmdb terminal clock
pages      | errors                                                 | fuse trio lmdb terminal
index      | errors inodes trust system reading spec pool copies compressed record claims |
           | builder pages ahead                                    | fuse trio terminal
access     | errors trust index                                     | fuse trio lmdb numpy terminal clock
lower      | errors access board inodes source spec compressed shard record claims index | fuse trio lmdb terminal
derived    | errors access board names reading spec record codecs labels compose index lower |
           |                                                        | fuse trio lmdb terminal
tree       | errors inodes names shard record lower                 | fuse trio lmdb terminal
merged     | errors inodes names record claims index lower tree     | fuse trio lmdb terminal
numbered   | errors inodes lower merged record spec tree            | fuse trio lmdb terminal
report     | board lower tree                                       | fuse trio lmdb numpy terminal
pack       | errors header index record shard source                | fuse trio lmdb terminal clock
overlay    | errors inodes reading trust                            | third-party clock
changes    | errors board inodes names record shard lower tree overlay pack | fuse trio lmdb terminal clock
commit | errors braces header index names record shard lower overlay pack changes | fuse trio lmdb terminal clock
export     | __init__ errors pool record formats energon index lower pack | fuse trio lmdb terminal clock
inplace    | errors trust index lower overlay pack changes commit   | fuse trio lmdb terminal clock
restore    | errors board inodes lower overlay tree                | fuse trio lmdb numpy terminal clock
journal    |                                                        | third-party disks clock
upper      | errors inodes overlay                                  | third-party clock
writable | errors board inodes journal names lower overlay tree restore upper | fuse trio lmdb numpy terminal clock
special | errors board inodes names snapshots control formats record index lower tree report writable |
protocol   |                                                        | fuse trio lmdb terminal disks clock
watch      | board inodes protocol spec                             | fuse trio lmdb numpy terminal
worker     | protocol                                               | fuse trio lmdb numpy terminal
ops        | errors names board inodes lower protocol tree writable special | fuse trio lmdb numpy terminal disks
writes     | errors board inodes ops protocol special tree writable   | fuse trio lmdb numpy terminal
stack      | errors trust spec index inplace tree overlay journal upper writable | fuse trio lmdb numpy terminal
engine     | errors board protocol worker tree writable ops         | fuse lmdb numpy terminal
check      | errors names reading source compressed shard record formats energon ahead | fuse trio lmdb terminal
soundness  | errors lower check                                     | fuse trio lmdb terminal clock
mount      | *                                                      | lmdb numpy terminal
statistics | errors record lower                                    | fuse trio lmdb terminal
doctor     | errors trust system control mountpoint                 | trio lmdb numpy terminal
console    | errors names trust copies index lower pool reading spec tree compose derived soundness|
           |                                                        | fuse trio lmdb numpy
cli_export | *                                                      | fuse trio lmdb numpy
cli_overlay | *                                                     | fuse trio lmdb numpy
cli_restore | *                                                     | fuse trio lmdb numpy
cli_status | *                                                      | fuse trio lmdb numpy
cli        | *                                                      | fuse trio lmdb numpy
fstab      | errors names system control mount cli                        | third-party
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
