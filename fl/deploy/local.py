"""A SuperLink and its SuperNodes as processes on this machine, with TLS and node authentication.

Each process is the command that a user types on a machine of its own: docs/guides/machines.md shows these.
"""

import datetime
import ipaddress
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from socket import socket
from typing import Any

from fl.base.errors import FLError
from fl.base.files import write_text

_APP = '''"""The ServerApp and the ClientApp of layer-surgery."""

from fl.deploy.app import client_app, server_app

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
_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
    "RAY_raylet_start_wait_time_s": "180",  # on a busy machine Ray takes longer to start than it waits by itself
}


def write_app(folder: Path, values: Mapping[str, Any]) -> None:
    """Write the folder that `flwr run` takes: a pyproject.toml with the run config, and a few lines of Python.

    Args:
        values: the run config, see `fl.deploy.settings.RunSettings`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]  # TOML writes these as JSON does
    write_text(folder / "pyproject.toml", _PROJECT.format(config="\n".join(lines)))
    write_text(folder / "surgery_app.py", _APP)


def write_keys(folder: Path, nodes: int, hosts: Sequence[str] = ("127.0.0.1", "localhost")) -> None:
    """Write the certificate of an authority (ca.crt), that of the SuperLink with its key (server.pem, server.key), and
    a pair of keys for each node (node-0 and node-0.pub), all readable by their owner only.

    Args:
        hosts: the names and addresses under which nodes reach the SuperLink.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    def named(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    def issued(subject: x509.Name, key: Any, issuer: x509.Name) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
        return builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(
            now + datetime.timedelta(days=365)
        )

    def alternative(host: str) -> x509.GeneralName:
        with suppress(ValueError):
            return x509.IPAddress(ipaddress.ip_address(host))
        return x509.DNSName(host)

    folder.mkdir(parents=True, exist_ok=True)
    authority, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca, mine = named("layer-surgery"), named(hosts[0])
    identifier = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    root = (
        issued(ca, authority, ca)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(identifier, critical=False)
        .add_extension(x509.KeyUsage(False, False, False, False, False, True, True, False, False), critical=True)
        .sign(authority, hashes.SHA256())
    )
    certificate = (
        issued(mine, server, ca)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(list(map(alternative, hosts))), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .sign(authority, hashes.SHA256())
    )
    pem, bare = serialization.Encoding.PEM, serialization.NoEncryption()
    _private(folder / "ca.crt", root.public_bytes(pem))
    _private(folder / "server.pem", certificate.public_bytes(pem))
    _private(folder / "server.key", server.private_bytes(pem, serialization.PrivateFormat.PKCS8, bare))
    for number in range(nodes):
        key = ec.generate_private_key(ec.SECP384R1())
        _private(folder / f"node-{number}", key.private_bytes(pem, serialization.PrivateFormat.OpenSSH, bare))
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        _private(folder / f"node-{number}.pub", public)


@dataclass
class Deployment:
    """A SuperLink and SuperNodes that run on this machine.

    Attributes:
        root: the folder with data, keys, app and logs.
        port: of the SuperLink.
        processes: by name: "superlink", "node-0", ...
        env: the variables of the processes. more: arguments of `flwr run`.
    """

    root: Path
    port: int
    processes: dict[str, subprocess.Popen]
    env: dict[str, str]
    more: tuple[str, ...] = ()

    def flwr(self, *words: str) -> str:
        """What `flwr` prints when it is given these words. Raises FLError with the last line if it fails."""
        done = subprocess.run([_command("flwr"), *words], env=self.env, capture_output=True, text=True, timeout=300)
        if done.returncode:
            lines = (done.stdout + done.stderr).strip().splitlines() or ["no reason given"]
            raise FLError(f"`flwr {' '.join(words)}` failed: {lines[-1]}")
        return done.stdout

    def run(self, app: Path) -> str:
        """Start the app; returns the run's id."""
        said = json.loads(self.flwr("run", str(app), "here", "--format", "json", *self.more))
        if "run-id" not in said:
            raise FLError(f"Flower did not start {app}: {said.get('error-message', said)}")
        return str(said["run-id"])

    def status(self, run: str) -> str:
        """Of a run, such as "running" or "finished:completed"."""
        said = json.loads(self.flwr("ls", "here", "--run-id", run, "--format", "json"))
        return str(said["runs"][0]["status"])

    def log(self, run: str) -> str:
        """What the run's ServerApp has printed, such as the outcome of a round in which something went wrong."""
        return self.flwr("log", run, "here", "--show")

    def wait(self, run: str, timeout: float, meanwhile: Callable[[], None] = lambda: None) -> str:
        """Until the run is over; returns its status. Raises FLError if that takes longer, or a SuperLink has died.

        Args:
            meanwhile: called again and again.
        """
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            meanwhile()
            if self.processes["superlink"].poll() is not None:
                raise FLError(f"the SuperLink has stopped: see {self.root / 'superlink.log'}")
            if (status := self.status(run)).startswith("finished"):
                meanwhile()
                return status
            time.sleep(0.5)
        raise FLError(f"the run is not over after {timeout:g} s: see `flwr log {run}`")

    def start_superlink(self) -> None:
        """Start the SuperLink, and wait until it listens."""
        keys = self.root / "keys"
        self._start(
            "superlink",
            *("flower-superlink", "--port", str(self.port), "--disable-runtime-dependency-installation"),
            *("--ssl-ca-certfile", str(keys / "ca.crt"), "--ssl-certfile", str(keys / "server.pem")),
            *("--ssl-keyfile", str(keys / "server.key"), "--enable-supernode-auth"),
            *("--database", str(self.root / "superlink.db")),
        )
        _listens(self.port, self.processes["superlink"], self.root / "superlink.log")

    def register(self, number: int) -> None:
        """Tell the SuperLink a node's public key: others are turned away."""
        self.flwr("supernode", "register", str(self.root / "keys" / f"node-{number}.pub"), "here")

    def start_node(self, number: int, **config: Any) -> None:
        """Start a SuperNode with its own data folder."""
        said = {"partition-id": number, "data": str(self.root / "data" / f"node-{number}"), **config}
        self._start(
            f"node-{number}",
            *("flower-supernode", "--superlink", f"127.0.0.1:{self.port}", "--port", str(free_port())),
            *("--root-certificates", str(self.root / "keys" / "ca.crt")),
            *("--auth-supernode-private-key", str(self.root / "keys" / f"node-{number}")),
            *("--node-config", " ".join(f"{key}={json.dumps(value)}" for key, value in said.items())),
        )

    def stop(self, name: str, kill: bool = False) -> None:
        """End a process and those that it has started."""
        process = self.processes.pop(name)
        for end in ([] if kill else [process.terminate]) + [lambda: _end_group(process)]:
            with suppress(ProcessLookupError):
                end()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)

    def _start(self, name: str, *words: str) -> None:
        log = open(self.root / f"{name}.log", "ab")  # noqa: SIM115, the process keeps it
        with log:
            self.processes[name] = subprocess.Popen(
                [_command(words[0]), *words[1:]], env=self.env, stdout=log, stderr=log, start_new_session=True
            )


@contextmanager
def deployment(
    root: Path, nodes: int, budgets: Sequence[Mapping[str, Any]] = (), threads: int = 0
) -> Iterator[Deployment]:
    """A SuperLink and so many registered SuperNodes, whose data lie in the folder; they end with the block.

    Args:
        budgets: what each node reports of the model that it can afford; see `fl.deploy.node.Node`.
        threads: of the CPU for each process; 0: as many as PyTorch takes.
    """
    write_keys(root / "keys", nodes)
    authority = f"root-certificates = {json.dumps(str(root / 'keys' / 'ca.crt'))}"
    with _stopped_at_the_end(root, authority) as running:
        running.env |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
        running.start_superlink()
        for number in range(nodes):
            running.register(number)
            running.start_node(number, **(budgets[number] if budgets else {}))
        yield running


@contextmanager
def simulation(root: Path, nodes: int) -> Iterator[Deployment]:
    """A SuperLink that simulates so many nodes in processes of Ray, for as long as the block lasts."""
    with _stopped_at_the_end(root, "insecure = true") as running:
        running._start(
            "superlink",
            *("flower-superlink", "--insecure", "--simulation", "--port", str(running.port)),
            "--disable-runtime-dependency-installation",
        )
        _listens(running.port, running.processes["superlink"], root / "superlink.log")
        running.more = ("--federation-config", f"num-supernodes={nodes}")
        yield running


@contextmanager
def _stopped_at_the_end(root: Path, connection: str) -> Iterator[Deployment]:
    """No process yet; those that are started end with the block."""
    home, port = root / "flwr-home", free_port()
    home.mkdir(parents=True, exist_ok=True)
    write_text(
        home / "config.toml",
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\n{connection}\n',
    )
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    env = {**os.environ, **_QUIET, "FLWR_HOME": str(home), "PYTHONPATH": path, "PATH": programs}
    running = Deployment(root, port, {}, env)
    with ExitStack() as stack:
        stack.callback(lambda: [running.stop(name) for name in list(running.processes)[::-1]])
        yield running


def share_of_cores(processes: int) -> int:
    """How many threads each of some processes on this machine gets, at least one.

    >>> share_of_cores(10**6)
    1
    """
    return max(1, _cores() // processes)


def _cores() -> int:
    """How many cores this process may use; of systems that do not tell that, how many there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def require() -> None:
    """Raise FLError if Flower is not installed."""
    if find_spec("flwr") is None:
        raise FLError("real clients need Flower: install the extra, pip install 'layer-surgery[flower]'")


def _command(name: str) -> str:
    """A program of the environment that this one runs in."""
    return str(Path(sys.executable).with_name(name))


def _listens(port: int, process: subprocess.Popen, log: Path) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        with socket() as one:
            one.settimeout(1)
            if not one.connect_ex(("127.0.0.1", port)):
                return
        time.sleep(0.1)
    raise FLError(f"the SuperLink did not start: see {log}")


def _end_group(process: subprocess.Popen) -> None:
    os.killpg(process.pid, 9)


def _private(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
        opened.write(content)
