"""Imports go down only: the table of the rooms, and the checks that hold the modules to it.

The source is parsed, nothing is imported, so a broken module does not hide a wrong import. Every import
counts, wherever it stands: inside a function or under TYPE_CHECKING, upwards is upwards.
"""

import ast
import functools
import graphlib
import itertools
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "wdsfs"

# Lowest first: a room may import from the rooms above its row, and inside itself as long as there is no circle.
# The ground is the modules that lie in no room. The words of the last column are explained below the table.
TABLE = """
room    | stays away from
--------+-----------------------------------
ground  | third-party
cache   | fuse trio lmdb numpy terminal
door    | fuse trio lmdb numpy terminal
remote  | fuse trio lmdb numpy terminal
spec    | fuse trio lmdb numpy terminal clock
tar     | fuse trio lmdb terminal clock
index   | fuse trio terminal
tree    | fuse trio lmdb terminal
interop | fuse trio lmdb terminal clock
overlay | third-party clock
packing | fuse trio lmdb terminal clock
fuse    | fuse lmdb terminal
mount   | lmdb numpy terminal
kernel  | fuse trio lmdb terminal
pages   | fuse trio lmdb terminal
library | fuse trio lmdb numpy terminal
cli     | trio lmdb numpy
"""

GROUPS = {"fuse": {"pyfuse3"}, "terminal": {"click", "rich"}, "clock": {"time", "datetime"}}

# What the command line must not load before it knows that the command needs it: `wdsfs mount --help` is to be
# there at once. The command line imports its commands by name.
SLOW = {"pyfuse3", "trio", "lmdb", "numpy", "yaml"}
ENTRIES = ("wdsfs.__main__", "wdsfs.cli.main", "wdsfs.cli.mount_helper")

# A child of a process that has used obstore hangs at its first call. So no process that may fork imports it: these
# modules do, and only the fetcher, a program of its own, imports these.
_OF_STORES = "answers demand hub listings open_objects store_clients store_reader store_requests store_sender"
STORE_MODULES = {f"wdsfs.remote.{name}" for name in _OF_STORES.split()}
FETCHER = "wdsfs.remote.fetcher"

# The modules that may import a wing (`wdsfs/wings.py`). They do it late, after a call of `wings.load`. The rooms
# below a wing take what they need from `wings.load` alone.
REACHED_BY: dict[str, set[str]] = {
    **{wing: set() for wing in ("remote", "kernel", "executors")},
    "pages": {"wdsfs.cli.look_commands"},
    "library": {"wdsfs"},
    "interop": {"wdsfs.cli.interop_commands"},
}

# Beside the ground lie `python -m wdsfs`, which belongs to the commands, and the public names.
STARTS = {"__main__": "cli", "__init__": "library"}
GROUND = {file.stem for file in PACKAGE.glob("*.py")} - set(STARTS)

MODULES_OF = {"PyYAML": "yaml", "pillow": "PIL"}  # where a package has another name than what is imported


class Room(NamedTuple):
    may_import: set[str]
    stays_away: set[str]


def parse_table() -> dict[str, Room]:
    rows = [[cell.strip() for cell in line.split("|")] for line in TABLE.splitlines() if "|" in line]
    rooms: dict[str, Room] = {}
    for name, away in rows[1:]:
        stays_away = set[str]().union(*(GROUPS.get(word, {word}) for word in away.split()))
        rooms[name] = Room(set(rooms), stays_away)
    return rooms


def module_of(file: Path) -> str:
    """The dotted name of a module: "wdsfs.tar.scan"; of a package: "wdsfs.tar"."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


ROOMS = parse_table()
FILES = {module_of(file): file for file in sorted(PACKAGE.rglob("*.py"))}
MODULES = list(FILES)
COMMANDS = [
    module for module in MODULES if module.startswith("wdsfs.cli.") and module.endswith(("_command", "_commands"))
]


def room_of(module: str) -> str:
    """The room of a module of ours."""
    _, _, below = module.partition(".")
    room = below.split(".")[0] or "__init__"
    return "ground" if room in GROUND else STARTS.get(room, room)


class Import(NamedTuple):
    line: int
    module: str  # "wdsfs.tar.scan", "numpy.typing"
    at_load: bool  # runs when the importing module is loaded

    @property
    def top(self) -> str:
        return self.module.split(".")[0]

    @property
    def is_ours(self) -> bool:
        """True for a module of ours; `wdsfs` itself is imported for its version, and loads nothing."""
        return self.top == "wdsfs" and self.module != "wdsfs"

    @property
    def third_party(self) -> bool:
        return self.top != "wdsfs" and self.top not in sys.stdlib_module_names


def imports_of(source: str, package: str = "wdsfs") -> list[Import]:
    """All imports in a module of `package`, in the order of the text."""
    return list(_walk(ast.parse(source), package, at_load=True))


def _walk(node: ast.AST, package: str, *, at_load: bool) -> Iterator[Import]:
    match node:
        case ast.Import():
            for alias in node.names:
                yield Import(node.lineno, alias.name, at_load)
        case ast.ImportFrom():
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            source = ".".join(filter(None, [base, node.module]))
            for alias in node.names:
                # `from wdsfs.tar import scan` names a module, `from wdsfs import __version__` does not.
                inner = f"{source}.{alias.name}"
                yield Import(node.lineno, inner if inner in FILES else source, at_load)
        case ast.If(test=ast.Name("TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
            for statement in node.body:
                yield from _walk(statement, package, at_load=False)
            for statement in node.orelse:
                yield from _walk(statement, package, at_load=at_load)
        case _:
            inside = at_load and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from _walk(child, package, at_load=inside)


@functools.cache
def imports_of_module(module: str) -> list[Import]:
    file = FILES[module]
    return imports_of(file.read_text(), module if file.stem == "__init__" else module.rpartition(".")[0])


def faults(says: str, is_wrong: Callable[[str, Import], bool], modules: Iterable[str] = MODULES) -> list[str]:
    """All imports of these modules that are wrong: file, line, and what is said of what is imported."""
    return [
        f"{place(module, found)}: {says} {found.module}"
        for module in modules
        for found in imports_of_module(module)
        if is_wrong(module, found)
    ]


def expect_none(faults: Iterable[str]) -> None:
    """Fail with all of them, a line each."""
    lines = list(faults)
    assert not lines, "\n" + "\n".join(lines)


def place(module: str, found: Import) -> str:
    return f"{FILES[module].relative_to(ROOT)}:{found.line}"


def test_every_room_has_a_row_and_every_row_a_room() -> None:
    rooms = {room_of(module) for module in MODULES}
    assert rooms - set(ROOMS) == set(), "without a row in the table"
    assert set(ROOMS) - rooms == set(), "in the table, but not there"


def test_every_room_names_its_modules() -> None:
    """In the docstring of its `__init__`, by their files: who looks for something reads these first."""
    unnamed = []
    for module in MODULES:
        if module.count(".") == 2 or module.removeprefix("wdsfs.") in GROUND:
            text = ast.get_docstring(ast.parse(FILES[module.rpartition(".")[0]].read_text())) or ""
            file = FILES[module].name
            unnamed += [] if re.search(rf"(?<![\w]){re.escape(file)}", text) else [module]
    expect_none(unnamed)


def test_rooms_have_no_rooms_inside() -> None:
    """The table has no place for them."""
    assert [module for module in MODULES if module.count(".") > 2] == []


def test_imports_go_down_only() -> None:
    def goes_up(module: str, found: Import) -> bool:
        room = room_of(module)
        return found.is_ours and room_of(found.module) not in {room, *ROOMS[room].may_import}

    expect_none(faults("its room may not import", goes_up))


def test_no_circle_inside_a_room() -> None:
    """Nor between rooms, since imports go down."""
    expect_none(fault for room in ROOMS for fault in _circle_in(room))


def test_no_circle_in_the_benchmark() -> None:
    files = {f"bench.{file.stem}": file for file in (ROOT / "bench").glob("*.py")}
    graph = {
        module: {found.module for found in imports_of(file.read_text(), "bench")} & files.keys() - {module}
        for module, file in files.items()
    }
    for module, file in files.items():  # `from bench import cache` is found as bench
        names = re.findall(r"^ *from bench import (.*)$", file.read_text(), re.MULTILINE)
        graph[module] |= {f"bench.{name.strip()}" for line in names for name in line.split(",")} & files.keys()
    assert sum(map(len, graph.values())) > 30
    graphlib.TopologicalSorter(graph).prepare()


def _circle_in(room: str) -> list[str]:
    """The imports of a circle between the modules of a room, if there is one."""
    inside = [module for module in MODULES if room_of(module) == room]
    arrows = {
        (module, found.module): place(module, found)
        for module in inside
        for found in imports_of_module(module)
        if found.module in inside and found.module != module
    }
    graph = {module: [imported for one, imported in arrows if one == module] for module in inside}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [
            f"{arrows[module, imported]}: {imported}" for imported, module in itertools.pairwise(error.args[1])
        ]
    return []


def test_a_module_stays_away_from_what_is_not_its_business() -> None:
    def comes_near(module: str, found: Import) -> bool:
        away = ROOMS[room_of(module)].stays_away
        return found.top in away or ("third-party" in away and found.third_party)

    expect_none(faults("may not import", comes_near))


def test_a_room_introduces_itself_and_exports_nothing() -> None:
    """Its `__init__` is a paragraph, which names the file to open first. Importers name the module."""
    rooms = [PACKAGE / room / "__init__.py" for room in ROOMS if room != "ground"]
    expect_none(f"{file.relative_to(ROOT)}: {said}" for file in rooms if (said := _odd_introduction(file)))


def _odd_introduction(file: Path) -> str:
    tree = ast.parse(file.read_text())
    text = ast.get_docstring(tree) or ""
    if len(tree.body) != 1:
        return "there is more than a docstring"
    if len(text.split()) <= 30:
        return "it is no paragraph"
    firsts = re.findall(r"Start\s+with\s+`([a-z_]+)\.py`", text)
    return "" if len(firsts) == 1 and file.with_name(f"{firsts[0]}.py").exists() else f"start with {firsts}?"


# The rooms that need an extra.
EXTRAS_OF = {"pages": ("view",), "library": ("fsspec", "parquet"), "tree": ("parquet",)}


def test_what_is_imported_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(extras: Sequence[str]) -> set[str]:
        optional = project["optional-dependencies"]
        declared = [*project["dependencies"], *(package for extra in extras for package in optional[extra])]
        packages = {re.split(r"[^\w-]", requirement)[0] for requirement in declared}
        return {MODULES_OF.get(package, package) for package in packages}

    by_room = {room: names(EXTRAS_OF.get(room, ())) for room in ROOMS}
    expect_none(
        faults(
            "not declared:", lambda module, found: found.third_party and found.top not in by_room[room_of(module)]
        )
    )


def test_only_the_fetcher_loads_obstore() -> None:
    def loads(module: str, found: Import) -> bool:
        away = {"obstore"} if module == FETCHER else {"obstore", *STORE_MODULES}
        return bool({found.top, found.module} & away)

    others = [module for module in MODULES if module not in STORE_MODULES]
    expect_none(faults("may not import", loads, others))


@pytest.mark.parametrize("wing", REACHED_BY)
def test_a_wing_is_reached_at_one_place(wing: str) -> None:
    def is_of_wing(module: str) -> bool:
        return module.split(".")[1:2] == [wing]

    others = [module for module in MODULES if not is_of_wing(module) and module not in REACHED_BY[wing]]
    expect_none(faults("may not import", lambda module, found: is_of_wing(found.module), others))
    expect_none(
        faults("loads", lambda module, found: found.at_load and is_of_wing(found.module), REACHED_BY[wing])
    )


def test_a_command_starts_without_the_slow_packages() -> None:
    expect_none(fault for entry in [*ENTRIES, *COMMANDS] for fault in _slow_imports(entry))


def _slow_imports(entry: str) -> Iterator[str]:
    """The slow packages among all that `entry` loads when it starts, followed through our own modules."""
    seen, waiting = {"wdsfs", entry}, ["wdsfs", entry]
    while waiting:
        module = waiting.pop()
        for found in imports_of_module(module):
            if not found.at_load:
                continue
            if found.top in SLOW:
                yield f"{entry}: {place(module, found)}: loads {found.top}"
            for ours in (found.module, found.module.rpartition(".")[0]):  # the module, and its room
                if ours in FILES and ours not in seen:
                    seen.add(ours)
                    waiting.append(ours)


def test_tests_lie_where_what_they_test_lies() -> None:
    """In the directory of its room; those of the whole program lie beside the rooms."""
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    expect_none(f"{test.relative_to(ROOT)}" for test in tests if not _lies_well(test))


def _lies_well(test: Path) -> bool:
    room, about = test.parent.relative_to(ROOT / "tests").as_posix(), test.stem.removeprefix("test_")
    if room == ".":
        return about not in GROUND and not list(PACKAGE.glob(f"*/{about}.py"))
    return room in ROOMS


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import wdsfs.errors", ("wdsfs.errors", True)),
        ("from wdsfs import errors", ("wdsfs.errors", True)),
        ("from wdsfs import __version__", ("wdsfs", True)),
        ("from wdsfs.errors import WdsfsError", ("wdsfs.errors", True)),
        ("from wdsfs.tar import scan", ("wdsfs.tar.scan", True)),
        ("from wdsfs.tar.scan import scan", ("wdsfs.tar.scan", True)),
        ("from . import scan", ("wdsfs.tar.scan", True)),
        ("from .scan import BLOCK", ("wdsfs.tar.scan", True)),
        ("from ..errors import WdsfsError", ("wdsfs.errors", True)),
        ("class A:\n    from wdsfs import errors", ("wdsfs.errors", True)),
        ("try:\n    import wdsfs.errors\nexcept ImportError:\n    pass", ("wdsfs.errors", True)),
        ("def f():\n    from wdsfs import errors", ("wdsfs.errors", False)),
        ("async def f():\n    if x:\n        import wdsfs.errors", ("wdsfs.errors", False)),
        ("if TYPE_CHECKING:\n    from wdsfs import errors", ("wdsfs.errors", False)),
        ("if typing.TYPE_CHECKING:\n    pass\nelse:\n    from wdsfs import errors", ("wdsfs.errors", True)),
        ("import numpy.typing", ("numpy.typing", True)),
    ],
)
def test_the_checks_see_an_import_in_every_form(source: str, expected: tuple[str, bool]) -> None:
    [found] = imports_of(source, "wdsfs.tar")
    assert (found.module, found.at_load) == expected
