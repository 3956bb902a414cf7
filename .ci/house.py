#!/usr/bin/env python3
"""Measures the structure of the code: sizes, rooms, and what they import. `make house` prints it.

A line of code is one that is neither blank nor a comment nor part of a docstring. A room is a package of wdsfs,
the ground is the modules in none. An arrow is a room that imports from another one or from the ground. A module
could join its user if no other module imports it, both are in one room, and together they have fewer than 400
lines of code. A loose flag is a parameter with the default True or False that a caller may pass by position: the
call does not show what it means.

    house.py          the figures
    house.py -v       the figures, and the lists behind them
    house.py rooms    the figures, and the modules of each room with the first sentence of their docstrings
"""

import ast
import re
import statistics
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
JOINED_MAX = 400  # lines of code of a module that takes in another one
MODULE_MAX, CLASS_MAX = 500, 400  # lines of code
HOMES_MAX = 3  # modules that may define a function, class or constant of the same name
WING = "remote"  # the room that few modules may import
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


class Module(NamedTuple):
    """A module: its name with dots, its room ("" for the ground), lines of code and of imports, the modules that
    it imports, the lengths of its functions (lines), the lines of code of its classes, the names that it defines,
    its loose flags ("function(parameter)"), and the first sentence of its docstring."""

    name: str
    room: str
    lines: int
    import_lines: int
    imports: frozenset[str]
    functions: list[int]
    classes: dict[str, int]
    defines: frozenset[str]
    loose_flags: list[str]
    summary: str


def read(path: Path, names: set[str]) -> Module:
    """Measure the module at `path`; `names` are those of all modules, of which it may import."""
    text = path.read_text()
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    documentation = {line for node in nodes if isinstance(node, DOCUMENTED) for line in docstring_lines(node)}
    code = {
        number
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#") and number not in documentation
    }
    statements = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    import_lines = {line for node in statements for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    name = name_of(path)
    parts = name.split(".")
    imports = frozenset(target for node in statements for target in targets(node) if target in names)
    lengths = [(node.end_lineno or 0) - node.lineno + 1 for node in nodes if isinstance(node, FUNCTION)]
    classes = {node.name: len(code.intersection(span(node))) for node in nodes if isinstance(node, ast.ClassDef)}
    flags = [flag for node in nodes if isinstance(node, FUNCTION) for flag in loose_flags(node)]
    room = parts[1] if len(parts) > 2 or (path.name == "__init__.py" and len(parts) == 2) else ""
    summary = re.split(r"(?<=\.)\s", ast.get_docstring(tree) or "", maxsplit=1)[0].replace("\n", " ")
    return Module(
        name,
        room,
        len(code),
        len(import_lines & code),
        imports - {name},
        lengths,
        classes,
        frozenset(defined(tree)),
        flags,
        summary,
    )


def span(node: ast.ClassDef) -> range:
    """The lines of a class."""
    return range(node.lineno, (node.end_lineno or 0) + 1)


def loose_flags(function: FUNCTION) -> Iterator[str]:
    """The parameters of a function that default to True or False and may be passed by position."""
    parameters = [*function.args.posonlyargs, *function.args.args]
    defaults = function.args.defaults
    for parameter, default in zip(parameters[len(parameters) - len(defaults) :], defaults, strict=True):
        if isinstance(default, ast.Constant) and isinstance(default.value, bool):
            yield f"{function.name}({parameter.arg})"


def defined(tree: ast.Module) -> Iterator[str]:
    """The functions, classes and constants that a module defines; `log` and `main` mean the same in each."""
    for statement in tree.body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found = [name]
            case ast.Assign(targets=assigned):
                found = [node.id for target in assigned for node in ast.walk(target) if isinstance(node, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=name)):
                found = [name]
            case _:
                continue
        yield from (name for name in found if name not in {"log", "main"})


def crowded_names(modules: Iterable[Module]) -> dict[str, list[str]]:
    """The names that more than `HOMES_MAX` modules define, each with these modules."""
    homes: dict[str, list[str]] = {}
    for module in modules:
        for name in module.defines:
            homes.setdefault(name, []).append(module.name)
    return {name: sorted(found) for name, found in sorted(homes.items()) if len(found) > HOMES_MAX}


def docstring_lines(node: DOCUMENTED) -> range:
    """The lines of the docstring of a node; none if it has no docstring."""
    first = node.body[0] if node.body else None
    if (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    ):
        return range(first.lineno, (first.end_lineno or 0) + 1)
    return range(0)


def targets(node: ast.Import | ast.ImportFrom) -> list[str]:
    """The names that an import statement may mean: modules, and what is in them."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    module = node.module or ""
    return [module, *(f"{module}.{alias.name}" for alias in node.names)]


def name_of(path: Path) -> str:
    """The name of a module with dots; a package has that of its directory."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def joinable(modules: dict[str, Module]) -> list[tuple[str, str]]:
    """The modules that could join their only user, each with that user."""
    users: dict[str, list[Module]] = {name: [] for name in modules}
    for module in modules.values():
        for target in module.imports:
            users[target].append(module)
    pairs = []
    for name, module in modules.items():
        if len(users[name]) == 1:
            (user,) = users[name]
            if user.room == module.room and user.lines + module.lines < JOINED_MAX:
                pairs.append((name, user.name))
    return sorted(pairs)


def main() -> None:
    """Print the figures; with `-v` also the arrows and the modules that could join another one."""
    paths = sorted((ROOT / "wdsfs").rglob("*.py"))
    names = {name_of(path) for path in paths}
    modules = {name_of(path): read(path, names) for path in paths}
    rooms = {module.room for module in modules.values()} - {""}
    arrows = sorted(
        {
            (module.room, modules[target].room)
            for module in modules.values()
            for target in module.imports
            if modules[target].room != module.room
        }
    )
    lines = sum(module.lines for module in modules.values())
    functions = [length for module in modules.values() for length in module.functions]
    joins = joinable(modules)
    flags = [f"{module.name}.{flag}" for module in modules.values() for flag in module.loose_flags]
    names_of_many = crowded_names(modules.values())
    of_wing = [module.name for module in modules.values() if imports_wing(module)]
    large = [f"{module.name} {module.lines}" for module in modules.values() if module.lines > MODULE_MAX]
    large += [
        f"{module.name}.{name} {size}"
        for module in modules.values()
        for name, size in module.classes.items()
        if size > CLASS_MAX
    ]
    rows = {
        "lines of code in wdsfs/": lines,
        "modules (without __init__)": len(modules) - len(rooms) - 1,
        "rooms beside the ground": len(rooms),
        "arrows between rooms": len(arrows),
        "modules that could join their only user": len(joins),
        "share of import lines": f"{sum(m.import_lines for m in modules.values()) / lines:.1%}",
        "lines of code in wdsfs/cli": sum(m.lines for m in modules.values() if m.room == "cli"),
        "lines in tests/": lines_in((ROOT / "tests").rglob("*.py")),
        "lines in bench/": lines_in((ROOT / "bench").rglob("*.py")),
        "lines of bench/RESULTS.md": lines_in([ROOT / "bench" / "RESULTS.md"]),
        f"modules that import the wing `{WING}`": len(of_wing),
        "loose flags": len(flags),
        f"names defined in more than {HOMES_MAX} modules": len(names_of_many),
        f"modules over {MODULE_MAX} lines, classes over {CLASS_MAX}": len(large),
        "median lines of code of a module": round(statistics.median(m.lines for m in modules.values())),
        "90th percentile of the length of functions": round(statistics.quantiles(functions, n=10)[-1]),
    }
    for text, value in rows.items():
        print(f"{text:45}{value:>8}" if isinstance(value, str) else f"{text:45}{value:>8,}")
    if "rooms" in sys.argv:
        for room in sorted(rooms):
            print(f"\n{room}")
            for module in sorted(modules.values(), key=lambda module: module.name):
                if module.room == room and "." in module.name.removeprefix("wdsfs."):
                    print(f"  {module.name.rpartition('.')[2]:22}{module.summary}")
    if "-v" in sys.argv:
        print("\nArrows:", *(f"  {room or 'ground'} -> {other or 'ground'}" for room, other in arrows), sep="\n")
        print("\nCould join:", *(f"  {name} -> {user}" for name, user in joins), sep="\n")
        print("\nLines of code of each room:", *room_sizes(modules.values()), sep="\n  ")
        print(f"\nImport the wing `{WING}`:", *of_wing, sep="\n  ")
        print("\nLoose flags:", *flags, sep="\n  ")
        print(f"\nDefined in more than {HOMES_MAX} modules:")
        print(*(f"  {name}: {', '.join(found)}" for name, found in names_of_many.items()), sep="\n")
        print(f"\nOver {MODULE_MAX} (modules) or {CLASS_MAX} (classes) lines of code:", *large, sep="\n  ")


def lines_in(paths: Iterable[Path]) -> int:
    """The number of lines of these files."""
    return sum(len(path.read_text().splitlines()) for path in paths)


def imports_wing(module: Module) -> bool:
    """True for a module outside the wing that imports from it."""
    package = f"wdsfs.{WING}"
    return module.room != WING and any(f"{target}.".startswith(f"{package}.") for target in module.imports)


def room_sizes(modules: Iterable[Module]) -> Iterator[str]:
    """A line for each room with its lines of code."""
    sizes: dict[str, int] = {}
    for module in modules:
        sizes[module.room or "ground"] = sizes.get(module.room or "ground", 0) + module.lines
    return (f"{room:10}{size:>7,}" for room, size in sorted(sizes.items()))


if __name__ == "__main__":
    main()
