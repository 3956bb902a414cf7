#!/usr/bin/env python3
"""Measures the structure of the code: sizes, rooms, and what they import. `make house` prints it.

A line of code is one that is neither blank nor a comment nor part of a docstring. A room is a package of wdsfs,
the ground is the modules in none. An arrow is a room that imports from another one or from the ground. A module
could join its user if no other module imports it, both are in one room, and together they have fewer than 400
lines of code.
"""

import ast
import re
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
JOINED_MAX = 400  # lines of code of a module that takes in another one
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


class Module(NamedTuple):
    """A module: its name with dots, its room ("" for the ground), lines of code and of imports, the modules that
    it imports, and the lengths of its functions (lines), and the first sentence of its docstring."""

    name: str
    room: str
    lines: int
    import_lines: int
    imports: frozenset[str]
    functions: list[int]
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
    room = parts[1] if len(parts) > 2 or (path.name == "__init__.py" and len(parts) == 2) else ""
    summary = re.split(r"(?<=\.)\s", ast.get_docstring(tree) or "", maxsplit=1)[0].replace("\n", " ")
    return Module(name, room, len(code), len(import_lines & code), imports - {name}, lengths, summary)


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
    rows = {
        "lines of code in wdsfs/": lines,
        "modules (without __init__)": len(modules) - len(rooms) - 1,
        "rooms beside the ground": len(rooms),
        "arrows between rooms": len(arrows),
        "modules that could join their only user": len(joins),
        "share of import lines": f"{sum(m.import_lines for m in modules.values()) / lines:.1%}",
        "lines of code in wdsfs/cli": sum(m.lines for m in modules.values() if m.room == "cli"),
        "lines in tests/": sum(len(path.read_text().splitlines()) for path in (ROOT / "tests").rglob("*.py")),
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


if __name__ == "__main__":
    main()
