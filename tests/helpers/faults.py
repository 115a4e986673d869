"""Runs of the command line that something goes wrong with, and what must hold afterwards.

After a fault the output is absent or the very one that an undisturbed run writes; whoever failed said why in one
line; and the same command, run again, succeeds. Everything that differs from that is a `Broken` fault.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file

import corp
from corp import CorpError, Statistics
from tests.helpers import decoders, hf_folders

ROOT = Path(__file__).parents[2]


class BrokenError(AssertionError):
    """A promise that was not kept."""


@dataclass(frozen=True)
class Command:
    """A command line of the inputs' folder and the output, and what it reads."""

    line: Callable[[Path, Path], list[str]]
    reads: tuple[str, ...]
    check: Callable[[Path, Path], None] | None  # (output, reference): raises unless whole and equal
    suffix: str = ""


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    code: int
    out: str
    err: str
    seconds: float


def _texts(inputs: Path) -> list[str]:
    return ["--calib", str(inputs / "texts.jsonl"), "--samples", "24", "--seq-len", "16", "--batch-size", "2"]


def _model(inputs: Path, name: str) -> str:
    return f"hf:{inputs / name}"


def same_tensors(out: Path, reference: Path) -> None:
    """Every file of the folder is there, and every tensor bit for bit the same."""
    found, wanted = ({str(p.relative_to(f)) for p in f.rglob("*") if p.is_file()} for f in (out, reference))
    if found != wanted:
        raise BrokenError(f"{out.name} lacks {sorted(wanted - found)}, has {sorted(found - wanted)}")
    for name in sorted(name for name in wanted if name.endswith(".safetensors")):
        ours, theirs = load_file(out / name), load_file(reference / name)
        if ours.keys() != theirs.keys() or any(not ours[key].equal(theirs[key]) for key in ours):
            raise BrokenError(f"{name} of {out.name} differs from that of an undisturbed run")
    for name in sorted(name for name in wanted if name.endswith(".json")):
        json.loads((out / name).read_text())


def same_statistics(out: Path, reference: Path) -> None:
    same_tensors(out, reference)
    for sums in Statistics.load(out).sums.values():
        sums.tensors()


def same_model(out: Path, reference: Path) -> None:
    same_tensors(out, reference)
    corp.load(out)


def same_sweep(out: Path, reference: Path) -> None:
    same_tensors(out, reference)
    rows, wanted = (json.loads((folder / "sweep.json").read_text())["rows"] for folder in (out, reference))
    timeless = [[{k: v for k, v in row.items() if "seconds" not in k} for row in some] for some in (rows, wanted)]
    if timeless[0] != timeless[1]:
        raise BrokenError("the rows of the sweep differ from those of an undisturbed run")


def same_bytes(out: Path, reference: Path) -> None:
    if out.read_bytes() != reference.read_bytes():
        raise BrokenError(f"{out.name} differs from that of an undisturbed run")


def same_graph(out: Path, reference: Path) -> None:
    """Graphs hold the names of their folders and of temporary files, so that only what is there can be compared."""
    found, wanted = ({str(p.relative_to(f)) for p in f.rglob("*") if p.is_file()} for f in (out, reference))
    if found != wanted:
        raise BrokenError(f"{out.name} lacks {sorted(wanted - found)}, has {sorted(found - wanted)}")
    for name in wanted:
        ours, theirs = (folder.joinpath(name).stat().st_size for folder in (out, reference))
        if abs(ours - theirs) > 0.05 * theirs + 200:
            raise BrokenError(f"{name} of {out.name} has {ours} bytes, that of an undisturbed run {theirs}")


def whole_page(out: Path, _reference: Path) -> None:
    if not out.read_text().rstrip().endswith("</html>"):
        raise BrokenError("half a page")


def _exported(target: str) -> Command:
    check = same_tensors if target in ("hf", "vllm") else same_graph
    return Command(
        lambda i, o: ["export", str(i / "pruned llama"), "--to", target, "-o", str(o)], ("pruned llama", "llama"), check
    )


COMMANDS = {
    "calibrate": Command(
        lambda i, o: ["calibrate", _model(i, "opt"), *_texts(i), "--checkpoint-every", "0", "-o", str(o)],
        ("opt", "texts.jsonl"),
        same_statistics,
    ),
    "calibrate images": Command(
        lambda i, o: [
            *("calibrate", _model(i, "vit"), "--calib", str(i / "photos"), "--batch-size", "2"),
            *("--checkpoint-every", "0", "-o", str(o)),
        ],
        ("vit", "photos"),
        same_statistics,
    ),
    "prune": Command(
        lambda i, o: ["prune", _model(i, "opt"), *_texts(i), "--sparsity", "0.5", "-o", str(o)],
        ("opt", "texts.jsonl"),
        same_model,
    ),
    "prune with statistics": Command(
        lambda i, o: ["prune", _model(i, "opt"), "--stats", str(i / "stats"), "--sparsity", "0.5", "-o", str(o)],
        ("opt", "stats"),
        same_model,
    ),
    "sweep": Command(
        lambda i, o: [
            *("sweep", _model(i, "opt"), *_texts(i), "--sparsity", "0.3,0.5", "--kinds", "mlp,both"),
            *("--calib-sizes", "12,24", "--data", str(i / "texts.jsonl"), "--eval-samples", "8", "-o", str(o)),
        ],
        ("opt", "texts.jsonl"),
        same_sweep,
    ),
    "eval": Command(
        lambda i, _: [
            *("eval", str(i / "pruned"), "--dense", _model(i, "opt"), "--data", str(i / "texts.jsonl")),
            *("--seq-len", "16", "--json"),
        ],
        ("opt", "pruned", "texts.jsonl"),
        None,
    ),
    "export": Command(
        lambda i, o: ["export", str(i / "pruned"), "--profile", "compat", "-o", str(o)],
        ("pruned", "opt"),
        same_tensors,
    ),
    "plan": Command(
        lambda i, o: ["plan", _model(i, "opt"), "--stats", str(i / "stats"), "--sparsity", "0.5", "-o", str(o)],
        ("opt", "stats"),
        same_bytes,
        ".json",
    ),
    "search and refit": Command(
        lambda i, o: ["prune", _model(i, "opt"), *_texts(i), "--target-macs", "0.8", "-o", str(o)],
        ("opt", "texts.jsonl"),
        same_model,
    ),
    "merged tokens": Command(
        lambda i, o: [
            *("prune", _model(i, "vit"), "--calib", str(i / "photos"), "--batch-size", "4", "--mlp", "0.5"),
            *("--tokens", "2,0", "-o", str(o)),
        ],
        ("vit", "photos"),
        same_model,
    ),
    "probe": Command(
        lambda i, o: ["probe", _model(i, "vit"), "--data", str(i / "scenes"), "-o", str(o)],
        ("vit", "scenes"),
        same_bytes,
        ".safetensors",
    ),
    **{f"export {target}": _exported(target) for target in ("hf", "vllm", "gguf", "onnx", "pt2")},
    "merge": Command(
        lambda i, o: ["merge", str(i / "stats"), str(i / "other"), "-o", str(o)], ("stats", "other"), same_statistics
    ),
    "report": Command(lambda i, o: ["report", str(i / "pruned"), "-o", str(o)], ("pruned",), whole_page, ".html"),
}


class Workshop:
    """Inputs, undisturbed outputs to compare with, and a server that forks commands."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.inputs = folder, folder / "inputs"
        self.inputs.mkdir(parents=True)
        self._write_inputs()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.fault_server"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._hear("ready")
        self._make("stats", "calibrate")
        self._make("other", "calibrate", "--seed", "1")
        self._make("pruned", "prune with statistics")
        llama = ["prune", _model(self.inputs, "llama"), *_texts(self.inputs), "--mlp", "0.5", "--seed", "0"]
        self._warm([*llama, "--no-sequential", "-o", str(self.inputs / "pruned llama")])
        self.usual: dict[str, Ended] = {}  # the undisturbed run of each command

    def close(self) -> None:
        assert self._server.stdin
        assert self._server.stdout
        self._server.stdin.close()
        self._server.wait(30)
        self._server.stdout.close()

    def _write_inputs(self) -> None:
        hf_folders.opt(self.inputs / "opt")
        hf_folders.llama(self.inputs / "llama", tok=decoders.tokenizer())
        hf_folders.vit(self.inputs / "vit")
        lines = [json.dumps({"text": text}) for text in hf_folders.sentences(60)]
        (self.inputs / "texts.jsonl").write_text("\n".join(lines) + "\n")
        for name in ("photos", "scenes/images", "scenes/labels"):
            (self.inputs / name).mkdir(parents=True)
        draw = random.Random(0)
        for number in range(24):
            noise = Image.frombytes("RGB", (16, 16), draw.randbytes(768))
            for name in ("photos", "scenes/images"):
                noise.save(self.inputs / name / f"{number:02}.png")
            halves = noise.convert("L").point(lambda value: value // 128)
            halves.save(self.inputs / "scenes/labels" / f"{number:02}.png")

    def _make(self, name: str, command: str, *more: str) -> None:
        self._warm([*COMMANDS[command].line(self.inputs, self.inputs / name), *more])

    def _warm(self, args: list[str]) -> None:
        """Run a command in the server itself."""
        self._order({"args": args, "here": True})
        self._hear("code")

    def reference(self, command: str) -> Path:
        """What the command writes undisturbed; run when first asked for."""
        out = self.folder / f"reference {command}{COMMANDS[command].suffix}"
        if command not in self.usual:
            self._warm(COMMANDS[command].line(self.inputs, out))
            again = self.folder / f"again {command}{COMMANDS[command].suffix}"
            ended = self.run(COMMANDS[command].line(self.inputs, again))
            if ended.code != 0:
                raise BrokenError(f"{command} fails without any fault: {ended.err}")
            self.usual[command] = ended
        return out

    def run(self, args: list[str], *, act: Callable[[int], None] | None = None, **limits: Any) -> Ended:
        """Run a command in a process of its own; `act(pid)` does something to it while it runs."""
        self._order({"args": args, **limits})
        pid, start = int(self._hear("pid")), time.monotonic()
        if act:
            act(pid)
        ended = self._hear_all()
        return Ended(ended["code"], ended["out"], ended["err"], time.monotonic() - start)

    def _order(self, order: dict[str, Any]) -> None:
        assert self._server.stdin
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()

    def _hear(self, key: str) -> Any:
        return self._hear_all()[key]

    def _hear_all(self) -> dict[str, Any]:
        assert self._server.stdout
        line = self._server.stdout.readline()
        if not line:
            raise BrokenError("the server of the fault tests died")
        heard: dict[str, Any] = json.loads(line)
        return heard


@dataclass
class Trial:
    """One command with one fault: everything it may touch is a copy of its own."""

    shop: Workshop
    command: str
    draw: random.Random
    place: Path
    limits: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shop.reference(self.command)
        self.inputs, self.output = self.place / "inputs", self.place / "out"
        self.inputs.mkdir(parents=True)
        self.output.mkdir()
        for name in COMMANDS[self.command].reads:
            self.restore(name)

    @property
    def out(self) -> Path:
        return self.output / f"made{COMMANDS[self.command].suffix}"

    @property
    def seconds(self) -> float:
        """A moment while the command runs, or a little after."""
        return self.draw.uniform(0, 1.4 * self.shop.usual[self.command].seconds)

    def restore(self, name: str) -> None:
        source, target = self.shop.inputs / name, self.inputs / name
        if target.exists():
            return
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copyfile(source, target)

    def run(self, act: Callable[[int], None] | None = None, **limits: Any) -> Ended:
        return self.shop.run(COMMANDS[self.command].line(self.inputs, self.out), act=act, **limits)

    def check_output(self, ended: Ended) -> None:
        """Absent or whole; and there, if the command says it went well."""
        command = COMMANDS[self.command]
        if command.check is None:
            if ended.code == 0:
                json.loads(ended.out)
            return
        if self.out.exists():
            try:
                if "because the model has none" in ended.err:  # a tokenizer that vanished before it was copied
                    corp.load(self.out)
                else:
                    command.check(self.out, self.shop.reference(self.command))
            except (CorpError, SafetensorError, OSError, ValueError) as error:
                raise BrokenError(f"what was written does not load: {error!r}") from error
        elif ended.code == 0:
            raise BrokenError("success without output")

    def check_again(self) -> None:
        """The same command, undisturbed, succeeds, and leaves nothing but its output."""
        if self.out.exists():
            return
        again = self.run()
        if again.code != 0:
            raise BrokenError(f"run again it fails: {again.err}")
        self.check_output(again)
        left = sorted(path.name for path in self.output.iterdir() if path != self.out)
        if left:
            raise BrokenError(f"left beside the output: {left}")


def say_why(ended: Ended, *causes: str) -> None:
    """One line that names the cause, and no traceback."""
    if "Traceback" in ended.err or "internal error" in ended.err:
        raise BrokenError(f"a traceback instead of an error (code {ended.code}):\n{ended.err[-3000:]}")
    if "error: " not in ended.err:
        raise BrokenError(f"failed with code {ended.code} and said nothing: {ended.err[-500:]!r}")
    if not any(cause.lower() in ended.err.lower() for cause in causes):
        raise BrokenError(f"the error does not name the cause ({', '.join(causes)}): {ended.err[-500:]}")


def _signalled(number: signal.Signals, code: int) -> Callable[[Trial], str]:
    def fault(trial: Trial) -> str:
        delay = trial.seconds

        def act(pid: int) -> None:
            time.sleep(delay)
            with suppress(ProcessLookupError):
                os.kill(pid, number)

        ended = trial.run(act)
        trial.check_output(ended)
        if ended.code not in (0, code):
            raise BrokenError(f"{number.name} ended in code {ended.code}, not {code}: {ended.err[-2000:]}")
        if "Traceback" in ended.err:
            raise BrokenError(f"a traceback after {number.name}: {ended.err[-2000:]}")
        if ended.code == code and number is signal.SIGINT and ended.err:  # silent while options are parsed
            say_why(ended, "interrupted")
        trial.check_again()
        return "stopped" if ended.code else "finished first"

    return fault


def file_too_large(trial: Trial) -> str:
    """A limit on the size of files: what a full disk looks like where nothing can be mounted."""
    largest = max((path.stat().st_size for path in _files(trial.shop.reference(trial.command))), default=4096)
    ended = trial.run(file_size=trial.draw.randrange(0, int(1.2 * largest)))
    return _after(trial, ended, "too large", "no space", "file size")


def full_disk(trial: Trial) -> str:
    """A file system of a few pages."""
    whole = sum(path.stat().st_size for path in _files(trial.shop.reference(trial.command)))
    size = trial.draw.randrange(1, max(2, int(2.5 * whole / 4096)))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size * 4}k", "none", str(trial.output)], check=True)
    try:
        ended = trial.run()
        trial.check_output(ended)
        if trial.out.exists():
            return "there was room"
        if ended.code == 0:
            return "finished"
        say_why(ended, "no space", "is full")
    finally:
        subprocess.run(["umount", str(trial.output)], check=True)
    trial.check_again()
    return "refused"


def read_only(trial: Trial) -> str:
    trial.output.chmod(0o555)
    try:
        ended = trial.run(powerless=True)
    finally:
        trial.output.chmod(0o755)
    return _after(trial, ended, "permission denied")


def input_removed(trial: Trial) -> str:
    """Something the command reads vanishes at some moment."""
    names = COMMANDS[trial.command].reads
    name, delay = trial.draw.choice(names), trial.seconds

    def act(_pid: int) -> None:
        time.sleep(delay)
        target = trial.inputs / name
        if target.is_dir():
            shutil.rmtree(target)
        else:
            target.unlink()

    ended = trial.run(act)
    for gone in names:
        trial.restore(gone)
    return _after(trial, ended, name, *(path.name for path in (trial.shop.inputs / name).glob("*")))


def memory_exhausted(trial: Trial) -> str:
    """An address space that ends a little above what the process already uses."""
    ended = trial.run(memory=int(2 ** trial.draw.uniform(10, 23)))
    trial.check_output(ended)
    if ended.code in (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGKILL):
        trial.check_again()
        return "killed"  # by a library that cannot go on without memory: nothing of ours is left half done
    return _after(trial, ended, "memory", "cannot allocate", "thread")


def _after(trial: Trial, ended: Ended, *causes: str) -> str:
    trial.check_output(ended)
    if ended.code == 0:
        return "finished"
    say_why(ended, *causes)
    trial.check_again()
    return "refused"


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]


FAULTS: dict[str, Callable[[Trial], str]] = {
    "SIGKILL": _signalled(signal.SIGKILL, -signal.SIGKILL),
    "SIGTERM": _signalled(signal.SIGTERM, 143),
    "SIGINT": _signalled(signal.SIGINT, 130),
    "file size limit": file_too_large,
    "full disk": full_disk,
    "read-only output": read_only,
    "input removed": input_removed,
    "memory exhausted": memory_exhausted,
}


def can_mount(folder: Path) -> bool:
    """Whether file systems can be mounted here, as the full disk needs."""
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(OSError):
        made = subprocess.run(["mount", "-t", "tmpfs", "none", str(folder)], capture_output=True, check=False)
        if made.returncode == 0:
            subprocess.run(["umount", str(folder)], check=True)
            return True
    return False


def applies(fault: str, command: str) -> bool:
    """eval writes nothing, so that nothing can be in its way."""
    return COMMANDS[command].check is not None or fault not in ("file size limit", "full disk", "read-only output")


def attempt(shop: Workshop, fault: str, command: str, seed: int) -> str:
    """One fault, one command, one moment; what came of it, or BrokenError."""
    place = shop.folder / "trials" / f"{fault} {command} {seed}"
    trial = Trial(shop, command, random.Random(f"{fault} {command} {seed}"), place)
    outcome = FAULTS[fault](trial)
    shutil.rmtree(place)
    return outcome
