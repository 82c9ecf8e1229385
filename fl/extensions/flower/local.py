"""A SuperLink and SuperNodes on this machine, with TLS and node authentication.

Each process is the command that a user types on a machine of its own: docs/guides/machines.md shows these.
"""

import datetime
import ipaddress
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from socket import create_connection, create_server
from typing import Any

from tqdm import tqdm

from fl.base.errors import FLError
from fl.base.files import private, write_text
from fl.extensions.flower.folders import node_folder
from fl.runs.metrics import FILE, read

_APP = '''"""The ServerApp and the ClientApp of layer-surgery."""

from fl.extensions.flower.app import client_app, server_app

server = server_app()
client = client_app()
'''
_PROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "layer-surgery-run"
version = "1.0.0"
description = "A run of layer-surgery on real clients"
license = "MIT"
dependencies = []

[tool.flwr.app]
publisher = "layer-surgery"

[tool.flwr.app.components]
serverapp = "surgery_app:server"
clientapp = "surgery_app:client"

[tool.flwr.app.config]
{config}
"""
_MARK = "LAYER_SURGERY_PROCESS"
"""The variable by which what a process of a deployment has started is found."""
_GRACE = 5.0  # seconds for what is about to end to do so by itself
_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
    "RAY_raylet_start_wait_time_s": "180",  # on a busy machine Ray takes longer to start than it waits by itself
}


def write_app(folder: Path, values: Mapping[str, Any]) -> None:
    """Write the folder that `flwr run` takes: pyproject.toml and some Python.

    The pyproject.toml has the run config.

    Args:
        values: the run config, see `fl.extensions.flower.app.RunSettings`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]  # TOML writes these as JSON does
    write_text(folder / "pyproject.toml", _PROJECT.format(config="\n".join(lines)))
    write_text(folder / "surgery_app.py", _APP)


def write_keys(folder: Path, nodes: int, hosts: Sequence[str] = ("127.0.0.1", "localhost")) -> None:
    """Write the SuperLink's certificate with its key, and each node's pair of keys.

    Only their owner can read them. The certificate is its own authority: ca.crt, which nodes check it by, and
    server.pem are the same.

    Args:
        hosts: the names and addresses under which nodes reach the SuperLink.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    def alternative(host: str) -> x509.GeneralName:
        with suppress(ValueError):
            return x509.IPAddress(ipaddress.ip_address(host))
        return x509.DNSName(host)

    def write(name: str, content: bytes) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).touch(mode=0o600)
        (folder / name).write_bytes(content)

    with private(folder):
        pass
    key, now, day = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC), datetime.timedelta(1)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, hosts[0])])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + 365 * day)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectAlternativeName([alternative(host) for host in hosts]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem, ssh, bare = serialization.Encoding.PEM, serialization.Encoding.OpenSSH, serialization.NoEncryption()
    for file in ("ca.crt", "server.pem"):
        write(file, certificate.public_bytes(pem))
    write("server.key", key.private_bytes(pem, serialization.PrivateFormat.PKCS8, bare))
    for number in range(nodes):
        key = ec.generate_private_key(ec.SECP384R1())
        write(f"node-{number}", key.private_bytes(pem, serialization.PrivateFormat.OpenSSH, bare))
        write(f"node-{number}.pub", key.public_key().public_bytes(ssh, serialization.PublicFormat.OpenSSH))


@dataclass
class Deployment:
    """Processes of Flower on this machine.

    Attributes:
        root: the folder with data, keys, app and logs.
        port: of the SuperLink.
        env: the variables of the processes.
        processes: by name: "superlink", "node-0", ...
    """

    root: Path
    port: int
    env: dict[str, str]
    processes: dict[str, subprocess.Popen] = field(default_factory=dict)

    def flwr(self, *words: str) -> str:
        """Return what `flwr` prints for these words.

        Raises FLError with the last line if it fails.
        """
        done = subprocess.run(["flwr", *words], env=self.env, capture_output=True, text=True, timeout=300)
        if done.returncode:
            lines = (done.stdout + done.stderr).strip().splitlines() or ["no reason given"]
            raise FLError(f"`flwr {' '.join(words)}` failed: {lines[-1]}", code="peers")
        return done.stdout

    def run(self, app: Path, *words: str) -> str:
        """Start an app as `flwr run` does, given more words; return the run's id."""
        answer = json.loads(self.flwr("run", str(app), "here", "--format", "json", *words))
        if "run-id" not in answer:
            raise FLError(f"Flower did not start {app}: {answer.get('error-message', answer)}", code="peers")
        return str(answer["run-id"])

    def log(self, run: str) -> str:
        """Return what the run's ServerApp has printed, such as a round's failures."""
        return self.flwr("log", run, "here", "--show")

    def wait(self, run: str, timeout: float = math.inf, meanwhile: Callable[[], None] = lambda: None) -> str:
        """Wait until the run is over, and return its status, such as "finished:completed".

        Args:
            meanwhile: called again and again.

        Raises:
            FLError: if that takes longer, or the SuperLink has died.
        """
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            self._check_superlink()
            listing = self._ask("ls", "here", "--run-id", run)
            meanwhile()
            if (status := str(listing["status"])).startswith("finished"):
                return status
            time.sleep(0.5)
        raise FLError(f"the run is not over after {timeout:g} s: see `flwr log {run}`", code="peers")

    def start_superlink(self, *flags: str) -> None:
        """Start the SuperLink and wait until it listens.

        Args:
            flags: in place of those for TLS and node authentication.
        """
        keys = self.root / "keys"
        secured = ["--ssl-ca-certfile", keys / "ca.crt", "--ssl-certfile", keys / "server.pem"]
        secured += ["--ssl-keyfile", keys / "server.key", "--enable-supernode-auth"]
        secured += ["--database", self.root / "superlink.db"]
        words = ["flower-superlink", "--port", self.port, "--disable-runtime-dependency-installation"]
        self._start("superlink", *words, *(flags or secured))
        end = time.monotonic() + 120
        while time.monotonic() < end and self.processes["superlink"].poll() is None:
            with suppress(OSError), create_connection(("127.0.0.1", self.port), timeout=1):
                return
            time.sleep(0.1)
        raise FLError(f"the SuperLink did not start: see {self.root / 'superlink.log'}", code="peers")

    def start_node(self, number: int) -> None:
        """Start a SuperNode with its own data folder.

        The SuperLink must know its public key.
        """
        keys = self.root / "keys"
        config = {"partition-id": number, "data": str(node_folder(self.root / "data", number))}
        self._start(
            f"node-{number}",
            *("flower-supernode", "--superlink", f"127.0.0.1:{self.port}", "--port", free_port()),
            *("--root-certificates", keys / "ca.crt", "--auth-supernode-private-key", keys / f"node-{number}"),
            *("--node-config", " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())),
        )

    def stop(self, name: str, kill: bool = False) -> None:
        """End a process and those that it has started."""
        process = self.processes.pop(name)
        if not kill:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        # Flower starts apps in sessions of their own: they may outlive it, and hold the run folder
        end = time.monotonic() + (0 if kill else _GRACE)
        while left := _find_marked(self._mark(name)):
            for number in left if time.monotonic() >= end else ():
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            time.sleep(0.05)

    def _start(self, name: str, *words: object) -> None:
        with private(), open(self.root / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                [str(word) for word in words],
                env={**self.env, _MARK: self._mark(name)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _mark(self, name: str) -> str:
        return f"{self.root.resolve()}:{name}"

    def _ask(self, *words: str) -> dict[str, Any]:
        """Return what `flwr` says of a run.

        Raises FLError if it says something else, or the SuperLink has stopped.
        """
        try:
            answer = json.loads(self.flwr(*words, "--format", "json"))
            if isinstance(answer, dict) and answer.get("runs"):
                return answer["runs"][0]
            reason = f"`flwr {words[0]}` says {str(answer)[:300]}"
        except (FLError, ValueError, subprocess.TimeoutExpired) as error:
            reason = " ".join(str(error).split())
        with suppress(subprocess.TimeoutExpired):  # it may be about to end
            self.processes["superlink"].wait(timeout=_GRACE)
        self._check_superlink()
        raise FLError(f"{reason}: see {self.root / 'superlink.log'}", code="peers")

    def _check_superlink(self) -> None:
        if self.processes["superlink"].poll() is not None:
            raise FLError(f"the SuperLink has stopped: see {self.root / 'superlink.log'}", code="peers")


def _find_marked(mark: str) -> list[int]:
    """Return the processes that were started with a mark, without zombies.

    Empty where the system does not tell.
    """
    numbers = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # another user's, or one that has ended
            if f"{_MARK}={mark}".encode() in environment.read_bytes().split(b"\0"):
                numbers.append(int(environment.parent.name))
    return numbers


@contextmanager
def deployment(root: Path, nodes: int, threads: int = 0) -> Iterator[Deployment]:
    """Run a SuperLink and SuperNodes with data in the folder until the block ends.

    Args:
        threads: of the CPU for each process; 0: as many as PyTorch takes.
    """
    write_keys(root / "keys", nodes)
    for earlier in filter(Path.exists, (root / "data", root / "run", root / "superlink.db")):
        earlier.chmod(0o700 if earlier.is_dir() else 0o600)
    with processes(root, f"root-certificates = {json.dumps(str(root / 'keys' / 'ca.crt'))}") as running:
        running.env |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
        running.start_superlink()
        for number in range(nodes):
            running.flwr("supernode", "register", str(root / "keys" / f"node-{number}.pub"), "here")
            running.start_node(number)
        yield running


@contextmanager
def processes(root: Path, connection: str) -> Iterator[Deployment]:
    """End all processes that are started in the block with it; none is started yet.

    Args:
        connection: how `flwr` reaches the SuperLink, a line of its configuration.
    """
    home, port = root / "flwr-home", free_port()
    with private(home):
        write_text(
            home / "config.toml",
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\n{connection}\n',
        )
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    env = {**os.environ, **_QUIET, "FLWR_HOME": str(home), "PYTHONPATH": path, "PATH": programs}
    running = Deployment(root, port, env)
    try:
        yield running
    finally:
        for name in reversed([*running.processes]):
            running.stop(name)


@contextmanager
def progress(folder: Path, rounds: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar of another process's run; yield a function that updates it."""
    with tqdm(total=rounds, unit="round", desc="waiting for the nodes", dynamic_ncols=True) as bar:

        def look() -> None:
            rows = read(folder / FILE) if (folder / FILE).exists() else []
            if len(rows) > bar.n:
                accuracies = [row["accuracy"] for row in rows if "accuracy" in row]
                bar.set_description_str("training", refresh=False)
                bar.set_postfix_str(f"accuracy {accuracies[-1]:.2%}" if accuracies else "", refresh=False)
                bar.update(len(rows) - bar.n)

        yield look


def share_of_cores(processes: int) -> int:
    """Return each process's threads, of the cores that this one may use, at least 1.

    >>> share_of_cores(10**6)
    1
    """
    known = hasattr(os, "sched_getaffinity")  # not all systems tell what a process may use
    return max(1, (len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1) // processes)


def free_port() -> int:
    """Return a free port of this machine."""
    with create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def require() -> None:
    """Raise FLError if Flower is not installed."""
    if find_spec("flwr") is None:
        raise FLError(
            "real clients need Flower: install the extra, pip install 'layer-surgery[flower]'", code="missing"
        )
