"""Break the code in small ways and count how often the tests notice: python -m scripts.mutants [--mutants N] [--seed N]

A mutant is one changed comparison, operation, number, condition or returned value. It is put into a copy of the tree,
and the tests of its package run there until one fails. Prints every mutant, and the share that was noticed per package.
A number is made larger by one; but a whole number that a module gives a name is a limit or a size, to which one more
makes no difference, so it becomes 1.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
# Some families of the contract stand for all of them here; graphs take a minute each.
CHOSEN = "not graphs and (not test_adapters.py or [vit or gpt2-cross or [hf-opt) and (not test_hf_rotary.py or llama)"
PACKAGES = {  # files that are changed, and tests that should notice
    "numerics": ("numerics", "numerics evaluate/test_evaluate.py"),
    "planning": (
        "planning",
        "planning faults/test_fuzz.py contract/test_adapters.py test_api.py contract/test_output_head.py "
        "contract/test_qk_norm.py steps/allocation/test_allocation.py report",
    ),
    "surgery": (
        "surgery",
        "surgery contract/test_adapters.py contract/test_hf_rotary.py contract/test_hf.py contract/test_structure.py "
        "contract/test_qk_norm.py test_api.py",
    ),
    "loaders": (
        "storage/folder.py storage/rebuilding.py storage/tying.py adapters/hf_models.py adapters/timm_models.py "
        "io/files.py calibration/statistics.py evaluate/heads.py",
        "io/test_files.py calibration/test_statistics.py evaluate/test_heads.py storage/test_storage.py "
        "golden/test_golden.py faults/test_attacks.py cli/test_hf_cli.py",
    ),
}
COMPARED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not"}
COMPARED |= {ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}
COMPUTED = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Pow: "*", ast.MatMult: "+"}


class Mutant(NamedTuple):
    """A file, the place of an expression in it, and what to write there instead."""

    file: Path
    line: int
    start: int  # bytes
    stop: int
    text: str

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.stop :]


def changes(node: ast.AST) -> Iterator[str]:
    """What an expression can be replaced by."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARED:
        left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
        yield f"({left}) {COMPARED[type(node.ops[0])]} ({right})"
    elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED:
        yield f"(({ast.unparse(node.left)}) {COMPUTED[type(node.op)]} ({ast.unparse(node.right)}))"
    elif isinstance(node, ast.BoolOp):
        word = " or " if isinstance(node.op, ast.And) else " and "
        yield "(" + word.join(f"({ast.unparse(value)})" for value in node.values) + ")"
    elif isinstance(node, ast.UnaryOp):
        yield f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield repr(node.value + 1)
    elif isinstance(node, ast.IfExp):
        yield f"({ast.unparse(node.body)})"
        yield f"({ast.unparse(node.orelse)})"


def expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Expressions that the program computes with: no annotations, no text of errors, no defaults of options.

    Nor the value of `strict=` in a call of zip: an assertion that right code never fails.
    """
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases") or isinstance(node, ast.Raise | ast.JoinedStr):
            continue
        if isinstance(node, ast.keyword) and node.arg == "strict":
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                if isinstance(child, ast.expr):
                    yield child
                yield from expressions(child)


def mutants_of(file: Path) -> list[Mutant]:
    source = file.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def place(node: Any, text: str) -> Mutant:
        start, stop = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        return Mutant(file, node.lineno, start, stop, text)

    tree = ast.parse(source)
    named = [part for node in tree.body if isinstance(node, ast.Assign) for part in ast.walk(node.value)]
    limits = [part for part in named if isinstance(part, ast.Constant) and type(part.value) is int and part.value > 1]
    made = [place(node, "1" if node in limits else text) for node in expressions(tree) for text in changes(node)]
    returns = [n.value for n in ast.walk(tree) if isinstance(n, ast.Return) and n.value is not None]
    made += [place(value, "None") for value in returns if not (isinstance(value, ast.Constant) and value.value is None)]
    return made


def sample(package: str, count: int, draw: random.Random) -> list[Mutant]:
    places = [ROOT / "src" / "corp" / name for name in PACKAGES[package][0].split()]
    files = [file for place in places for file in (sorted(place.rglob("*.py")) if place.is_dir() else [place])]
    found = [mutant for file in files for mutant in mutants_of(file)]
    return draw.sample(found, min(count, len(found)))


def copy_tree(folder: Path) -> None:
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in names.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)


def import_libraries() -> None:
    """All that takes long to import, but not corp: its modules are forgotten, and read again by every child."""
    import pytest  # noqa: F401

    import corp
    import corp.adapters.torchvision_import  # noqa: F401

    with contextlib.suppress(ImportError):
        from transformers import AutoModel, LlamaForCausalLM, OPTForCausalLM, PreTrainedTokenizerFast  # noqa: F401
    for name in [name for name in sys.modules if name.split(".")[0] in ("corp", "tests")]:
        del sys.modules[name]


def tests_pass(folder: Path, package: str, seconds: float) -> bool:
    """Whether the package's tests pass in the copy; a run that takes too long does not."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.chdir(folder)
        os.environ["PYTHONPATH"] = f"{folder / 'src'}:{folder}"
        sys.path[:0] = [str(folder / "src"), str(folder)]
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        import pytest

        options = ["-q", "-x", "-p", "no:cacheprovider", "-k", CHOSEN, f"--basetemp={folder}/temporary"]
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # libraries are imported already
        os._exit(int(pytest.main([*options, *(f"tests/{name}" for name in PACKAGES[package][1].split())])))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.1)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def hunt(package: str, mutants: list[Mutant], folder: Path) -> dict[str, Any]:
    """Try every mutant; those that no test noticed are listed."""
    start = time.monotonic()
    if not tests_pass(folder, package, 3600):
        raise SystemExit(f"the tests of {package} fail without any mutant")
    usual = time.monotonic() - start
    print(f"{package}: the tests take {usual:.0f} s", flush=True)
    survivors = []
    for mutant in mutants:
        target = folder / mutant.file.relative_to(ROOT)
        source = target.read_bytes()
        target.write_bytes(mutant.applied(source))
        lives = tests_pass(folder, package, 3 * usual + 60)
        target.write_bytes(source)
        was = source[mutant.start : mutant.stop].decode()
        text = f"{mutant.file.relative_to(ROOT)}:{mutant.line}: {was!r} -> {mutant.text!r}"
        print(f"{'SURVIVED' if lives else 'killed'} {text}", flush=True)
        survivors += [text] if lives else []
    return {"mutants": len(mutants), "killed": len(mutants) - len(survivors), "survivors": survivors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", type=int, default=30, help="per package")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("mutants.json"))
    parser.add_argument("packages", nargs="*", default=list(PACKAGES))
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    import_libraries()
    results: dict[str, Any] = {}
    for package in args.packages:
        with tempfile.TemporaryDirectory(prefix="corp-mutants-") as folder:
            copy_tree(Path(folder))
            chosen = sample(package, args.mutants, random.Random(f"{package} {args.seed}"))
            results[package] = hunt(package, chosen, Path(folder))
        print(f"{package}: {results[package]['killed']} of {results[package]['mutants']} killed", flush=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
