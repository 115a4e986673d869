"""List what src/corp defines and never uses: functions, methods, classes, constants, and parameters that no call sets.

A function or constant of a module counts as used when its own file reads it, or when another file imports it or looks
it up on the imported module; a method when anything anywhere is looked up under its name. What a library calls by
name (forward, extra_repr), commands and properties that only JSON reads are told by eye. Tests do not count as users.

    python scripts/unused.py [src/corp]
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


def names_read(tree: ast.AST) -> set[str]:
    """Bare names that are read, and strings: annotations and lazy tables name things by string."""
    found = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    strings = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return found | {text for text in strings if text.isidentifier()}


def attributes_read(tree: ast.AST) -> set[str]:
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def imported(tree: ast.AST) -> set[tuple[str, str]]:
    """(module, name) of every name imported from a module."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {(node.module or "", alias.name) for node in nodes for alias in node.names}


def module_of(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")


def unused_names(trees: dict[str, ast.Module], words: set[str]) -> Iterator[tuple[str, int, str]]:
    """(module, line, what) of top-level names and methods without a user; `words` are those of templates."""
    attributes = words.union(*map(attributes_read, trees.values()))
    imports = {module: imported(tree) for module, tree in trees.items()}
    for module, tree in trees.items():
        inside = names_read(tree)
        importers = [trees[m] for m, pairs in imports.items() if any(f"{a}.{b}" == module for a, b in pairs)]
        outside = {name for pairs in imports.values() for where, name in pairs if where == module}
        outside |= set().union(*map(attributes_read, importers))
        for name, node in _top_level(tree):
            if name not in inside | outside and not _decorated(node) and not name.startswith("__"):
                yield module, node.lineno, name
        for owner in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            for method in (node for node in owner.body if isinstance(node, Function)):
                if method.name not in attributes | inside and not method.name.startswith("__"):
                    yield module, method.lineno, f"{owner.name}.{method.name}"


def _top_level(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef):
            yield node.name, node
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        stored = (part for target in targets if target is not None for part in ast.walk(target))
        yield from (
            (part.id, node) for part in stored if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
        )


def _decorated(node: ast.stmt) -> bool:
    """A decorator may hand the function to somebody; one that only changes a class does not."""
    return isinstance(node, Function) and bool(node.decorator_list)


def unset_parameters(trees: dict[str, ast.Module]) -> Iterator[tuple[str, int, str]]:
    """Parameters with a default which no call under the function's name sets, of functions that somebody calls."""
    calls: dict[str, list[ast.Call]] = {}
    for node in (node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.Call)):
        calls.setdefault(_name(node.func), []).append(node)
        if _name(node.func) == "partial" and node.args:
            calls.setdefault(_name(node.args[0]), []).append(node)
    for module, tree in trees.items():
        owners = {id(f): c.name for c in ast.walk(tree) if isinstance(c, ast.ClassDef) for f in c.body}
        for function in (node for node in ast.walk(tree) if isinstance(node, Function)):
            owner = owners.get(id(function), "")
            name = owner if function.name == "__init__" else function.name
            known = [] if _decorated(function) else calls.get(name, [])
            for argument, place in _optional(function, bound=bool(owner)):
                if known and not any(_sets(call, argument, place) for call in known):
                    yield module, function.lineno, f"{name}({argument}=)"


def _optional(function: Function, *, bound: bool) -> Iterator[tuple[str, int | None]]:
    """Parameters with a default, and at which place a call gives them (None: by name only)."""
    arguments = function.args.posonlyargs + function.args.args
    for place in range(len(arguments) - len(function.args.defaults), len(arguments)):
        yield arguments[place].arg, place - bound
    for argument, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
        if default is not None:
            yield argument.arg, None


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _sets(call: ast.Call, name: str, place: int | None) -> bool:
    spread = any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords)
    return spread or (place is not None and len(call.args) > place) or any(k.arg == name for k in call.keywords)


def main(root: Path) -> None:
    paths = {module_of(path, root): path for path in sorted(root.rglob("*.py"))}
    trees = {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in paths.items()}
    words = {word for page in root.rglob("*.html") for word in re.findall(r"\w+", page.read_text(encoding="utf-8"))}
    for module, line, what in (*unused_names(trees, words), *unset_parameters(trees)):
        print(f"{paths[module]}:{line}: {what}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "src/corp"))
