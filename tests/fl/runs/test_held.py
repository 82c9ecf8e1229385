"""One process at a time works in a run folder, and what a killed one leaves can be used again."""

import os
import signal
import socket
import subprocess
import sys

import pytest
from refusals import fl_refused

import fl
from fl import FLError
from fl.base.files import write_text
from fl.runs import lock
from fl.runs.lock import open_run_folder


def test_held__a_folder_that_another_works_in_is_refused_by_name(tmp_path):
    folder = tmp_path / "a"
    with open_run_folder(folder, resume=False):
        write_text(folder / "config.yaml", "")
        for resume in (True, False):
            match = f"a is in use by process {os.getpid()} on" if resume else "exists already"
            with fl_refused("folder", match), open_run_folder(folder, resume):
                raise AssertionError("two in one folder")
        assert (folder / lock.FILE).exists()
    assert [path.name for path in folder.iterdir()] == ["config.yaml"]
    with open_run_folder(folder, resume=True):
        pass


def test_held__the_lock_of_a_killed_process_is_free(tmp_path):
    ready, tell = os.pipe()
    if not (process := os.fork()):
        with open_run_folder(tmp_path / "a", resume=False):
            (tmp_path / "a" / ".metrics.csv.12@node.tmp").write_text("half a")
            os.write(tell, b"x")
            signal.pause()
        os._exit(0)
    os.read(ready, 1)
    for _ in range(2):  # asking does not take the lock away
        with fl_refused("folder", f"in use by process {process} on"), open_run_folder(tmp_path / "a", False):
            raise AssertionError("two in one folder")
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    assert (tmp_path / "a" / lock.FILE).exists()
    with open_run_folder(tmp_path / "a", resume=False):  # killed before its settings: as good as new
        assert [path.name for path in (tmp_path / "a").iterdir()] == [lock.FILE]
    os.close(ready)
    os.close(tell)


def test_held__a_lock_file_that_its_owner_deletes_meanwhile_is_no_lock(tmp_path, monkeypatch):
    """Its owner ends between our opening of the file and our locking of it: the file is not in the folder any more."""
    flock, path = lock.fcntl.flock, tmp_path / lock.FILE

    def late(handle, how):
        if not taken:
            path.unlink()
        taken.append(handle)
        flock(handle, how)

    taken = []
    monkeypatch.setattr(lock.fcntl, "flock", late)
    with lock.folder_lock(tmp_path):
        assert len(taken) == 2
        with fl_refused("folder", str(os.getpid())), lock.folder_lock(tmp_path):
            pass


def test_held__settings_that_are_refused_leave_no_folder_and_an_empty_one_stays(tmp_path):
    for folder in (tmp_path / "new" / "a", tmp_path / "mine"):
        (tmp_path / "mine").mkdir(exist_ok=True)
        with fl_refused("argument"), open_run_folder(folder, resume=False):
            raise FLError("no such split")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_held__folders_with_something_in_them_are_refused(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").write_text("mine")
    match = "other exists already and holds no run that could be resumed"
    with fl_refused("folder", match), open_run_folder(tmp_path / "other", resume=False):
        pass
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["notes"]
    with fl_refused("folder", "none"), open_run_folder(tmp_path / "none", resume=True):
        pass


def test_held__file_systems_without_locks_and_without_writing_say_so(tmp_path, monkeypatch, caplog):
    def refuse(error):
        def call(*_):
            raise error

        return call

    with monkeypatch.context() as patch:
        patch.setattr(lock.fcntl, "flock", refuse(OSError(37, "No locks available")))
        with open_run_folder(tmp_path, resume=True):
            assert "cannot be locked (No locks available): make sure that no other process" in caplog.text
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse(OSError(30, "Read-only file system")))
        match = r"\.lock cannot be written \(Read-only file system\): .*work on a copy"
        with pytest.raises(FLError, match=match), open_run_folder(tmp_path, resume=True):
            pass


def test_held__what_a_killed_process_left_beside_a_file_goes_with_its_next_writing(tmp_path, caplog):
    if not (process := os.fork()):
        os._exit(0)
    os.waitpid(process, 0)
    host = socket.gethostname()
    dead, alive = tmp_path / f".a.pt.{process}@{host}.tmp", tmp_path / f".a.pt.{os.getppid()}@{host}.tmp"
    others = [
        tmp_path / name for name in (f".b.pt.{process}@{host}.tmp", f".a.pt.{process}@other.tmp", ".a.pt.mine.tmp")
    ]
    for path in (dead, alive, *others):
        path.write_text("half")
    write_text(tmp_path / "a.pt", "whole")
    assert sorted(tmp_path.iterdir()) == sorted([alive, *others, tmp_path / "a.pt"])
    (said,) = caplog.messages
    assert said == f"warning: {dead} is deleted, which a process left that was killed while it wrote"


@pytest.mark.nightly
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux")
def test_held__an_output_that_is_full_is_told_to_be_the_output(tmp_path):
    block = "with guard() as ended:\n    print('a' * 99999)\n"
    code = f"import sys\nfrom fl.base.console import guard\n{block}sys.exit(ended.code)"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    said = "error: the output cannot be written (No space left on device): send it to a place with room\n"
    assert done.stderr == said


@pytest.mark.parametrize("kind", ["a link", "no regular file"])
def test_held__what_is_no_lock_file_is_refused_and_stays(tmp_path, kind):
    other, file = tmp_path / "other.txt", tmp_path / "run" / lock.FILE
    other.write_text("mine")
    file.parent.mkdir()
    file.symlink_to(other) if kind == "a link" else os.mkfifo(file)
    for resume in (True, False):
        with fl_refused("file", "run/.lock"), open_run_folder(file.parent, resume):
            raise AssertionError("it was taken")
    assert other.read_text() == "mine"
    file.unlink()
    with open_run_folder(file.parent, resume=True):
        pass


def test_held__a_lock_that_its_owner_deleted_in_the_meantime_is_taken_anew(tmp_path, monkeypatch):
    take = lock.fcntl.flock

    def racing(handle, how):
        monkeypatch.setattr(lock.fcntl, "flock", take)
        (tmp_path / lock.FILE).unlink()  # by a process that has ended since the file was opened
        take(handle, how)

    monkeypatch.setattr(lock.fcntl, "flock", racing)
    with lock.folder_lock(tmp_path), fl_refused("folder", str(os.getpid())), lock.folder_lock(tmp_path):
        raise AssertionError("two in one folder")


def test_held__an_unknown_log_is_named_and_leaves_no_folder(tmp_path):
    with fl_refused("name: nix"):
        fl.simulate(fl.Config.of(log=("nix",)), tmp_path / "run")
    assert not (tmp_path / "run").exists()
