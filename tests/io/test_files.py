"""Outputs appear whole or not at all, whoever else writes, and whatever was left by those that were killed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from corp import CorpError
from corp.io import files as atomic
from corp.io.files import lock_folder, new_folder, read_json, write_json, write_text

linux = pytest.mark.skipif(sys.platform != "linux", reason="locks and exchanges as Linux has them")

KILLED = """
import os, signal, sys
from pathlib import Path
from corp.io.files import new_folder
with new_folder(Path(sys.argv[1])) as folder:
    (folder / "large").write_bytes(bytes(1000))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_text_may_be_read_by_whom_the_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "out.json", "{}")
    finally:
        os.umask(before)
    assert (tmp_path / "out.json").stat().st_mode & 0o777 == 0o640


@linux
def test_a_text_that_a_killed_run_left_is_swept_up_by_the_next(tmp_path: Path) -> None:
    (tmp_path / ".out.json.corp-abcdefgh").write_text("half")
    write_text(tmp_path / "out.json", "{}")
    assert names(tmp_path) == ["out.json"]


def test_a_plan_of_megabytes_is_read(tmp_path: Path) -> None:
    content = {"kept": list(range(500_000))}
    write_json(tmp_path / "plan.json", content)
    assert read_json(tmp_path / "plan.json") == content


@linux
def test_what_a_killed_run_left_is_swept_up_by_the_next(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "out")], check=False)
    assert len(names(tmp_path)) == 1
    assert not (tmp_path / "out").exists()
    for other in (".out.precious", ".out.partial", ".outer.corp-abcdefgh"):
        (tmp_path / other).mkdir()
    with new_folder(tmp_path / "out") as folder:
        (folder / "file").write_text("whole")
    assert names(tmp_path) == [".out.partial", ".out.precious", ".outer.corp-abcdefgh", "out"]


@linux
def test_of_two_writers_one_wins_and_one_says_so(tmp_path: Path) -> None:
    def write_late() -> None:
        with new_folder(tmp_path / "out") as late:
            (late / "file").write_text("late")
            with new_folder(tmp_path / "out") as early:  # begins later, is done earlier; and sweeps nobody away
                (early / "file").write_text("early")
            assert (late / "file").read_text() == "late"

    with pytest.raises(CorpError, match="exists; choose another output"):
        write_late()
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "file").read_text() == "early"


@pytest.mark.parametrize("exchange", [True, False], ids=["in one step", "in two"])
def test_overwriting_replaces_the_whole_folder(exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not exchange:
        monkeypatch.setattr(atomic, "_exchanged", lambda *_: False)
    for content in ("old", "new"):
        with new_folder(tmp_path / "out", overwrite=True) as folder:
            (folder / content).write_text(content)
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["new"]


@linux
def test_overwriting_has_no_moment_without_either_folder(tmp_path: Path) -> None:
    with new_folder(tmp_path / "out") as folder:
        (folder / "file").write_text("0")
    missing, done = 0, threading.Event()

    def watch() -> None:
        nonlocal missing
        while not done.is_set():
            missing += not (tmp_path / "out" / "file").exists()

    watcher = threading.Thread(target=watch)
    watcher.start()
    for number in range(30):
        with new_folder(tmp_path / "out", overwrite=True) as folder:
            (folder / "file").write_text(str(number))
    done.set()
    watcher.join()
    assert missing == 0


def test_a_text_that_cannot_be_written_leaves_the_old_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(tmp_path / "file", "old")

    def full(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic.os, "fsync", full)
    with pytest.raises(CorpError, match="No space left on device"):
        write_text(tmp_path / "file", "new")
    assert names(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "old"


def test_a_lock_in_a_folder_that_is_gone_is_an_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(CorpError, match=r"cannot write .*No such file"), lock_folder(tmp_path / "gone", "x"):
        pass
    with lock_folder(tmp_path, "x"), pytest.raises(ZeroDivisionError), lock_folder(tmp_path, "y"):
        raise ZeroDivisionError  # what happens inside is not the lock's
