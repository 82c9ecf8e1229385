"""Processes of a deployment on this machine: what nobody else may read, and what is left of one that was killed."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from fl_nodes import settings
from refusals import fl_refused

from fl.extensions.flower import local
from fl.extensions.flower.folders import deal_out
from fl.extensions.flower.local import Deployment, write_keys


def modes(folder):
    return {(path.is_dir(), oct(path.stat().st_mode & 0o777)) for path in [folder, *folder.rglob("*")]}


@pytest.fixture
def running(tmp_path):
    """A deployment whose SuperLink is some process, and starts an app in a session of its own."""
    app = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    link = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True)"
    running = Deployment(tmp_path, 1, dict(os.environ))
    running._start("superlink", sys.executable, "-c", f"{link}; time.sleep(60)", app)
    end = time.monotonic() + 30
    while len(marked(running)) < 2 and time.monotonic() < end:
        time.sleep(0.02)
    yield running
    for pid in marked(running):
        os.kill(pid, signal.SIGKILL)


def marked(running):
    return local._find_marked(running._mark("superlink"))


def deal(folder):
    deal_out(settings("fedavg", clients=2), folder)


def keys(folder):
    pytest.importorskip("cryptography", reason="the extra flower is not installed")
    folder.mkdir(mode=0o755)
    write_keys(folder, 1)


@pytest.mark.parametrize("write", [deal, keys])
def test_local__what_clients_have_and_keys_are_for_their_owner_alone(write, tmp_path):
    before = os.umask(0o022)
    try:
        write(tmp_path / "folder")
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
    assert modes(tmp_path / "folder") == {(True, "0o700"), (False, "0o600")}


def test_local__what_a_process_of_a_deployment_writes_is_for_its_owner_alone(tmp_path):
    one = Deployment(tmp_path, 1, dict(os.environ))
    write = "import os, sys; os.mkdir(sys.argv[1] + '/run'); open(sys.argv[1] + '/superlink.db', 'w')"
    one._start("superlink", sys.executable, "-c", write, tmp_path)
    assert one.processes["superlink"].wait() == 0
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()} == {
        "run": "0o700", "superlink.db": "0o600", "superlink.log": "0o600",
    }  # fmt: skip


@pytest.mark.skipif(not os.path.exists("/proc"), reason="the system does not tell what a process has started")
@pytest.mark.parametrize("kill", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("killed", [True, False])
def test_local__nothing_is_left_of_a_superlink_that_was_killed(running, killed, kill, monkeypatch):
    monkeypatch.setattr(local, "_GRACE", 0.2)
    assert len(marked(running)) == 2
    if killed:
        running.processes["superlink"].kill()
    running.stop("superlink", kill=kill)
    assert not marked(running)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (0, json.dumps({"success": False, "error-message": "Connection to the SuperLink is unavailable."})),
        (0, "[]"),
        (0, json.dumps({"runs": []})),
        (0, "no JSON"),
        (1, "Connection refused"),
    ],
)
@pytest.mark.parametrize("alive", [True, False])
def test_local__a_superlink_that_does_not_answer_is_named(tmp_path, monkeypatch, code, said, alive):
    one = Deployment(tmp_path, 1, {})
    one.processes["superlink"] = link = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    def answer(words, **_):
        if not alive:
            link.kill()
        return subprocess.CompletedProcess(words, code, said, "")

    monkeypatch.setattr(local.subprocess, "run", answer)
    monkeypatch.setattr(local, "_GRACE", 0.2)
    with fl_refused("peers", "superlink.log") as error:
        one.wait("7")
    assert ("the SuperLink has stopped" in str(error.value)) == (not alive)
    link.kill()
    link.wait()
