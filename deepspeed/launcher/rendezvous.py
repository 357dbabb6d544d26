"""Where rank 0 listens: a free port on one node, or a clear refusal of a port or address that cannot work.

A free port is taken from below the range that the system hands to outgoing connections: between our check and the
moment rank 0 listens there are seconds (it imports torch first), and in that range any client program could take it.
Two launchers that start at the same time keep apart by holding a name in the kernel (`hold_port`).
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

from deepspeed.launcher.console import Console
from deepspeed.launcher.constants import DEFAULT_MASTER_PORT
from deepspeed.launcher.errors import StartError, UsageError

LOOPBACK = "127.0.0.1"
_FIRST_PORT, _ATTEMPTS = 20000, 500


@dataclass
class Rendezvous:
    """Address and port of rank 0. Close it when the workers have ended: until then no other launcher takes the port."""

    address: str
    port: int
    _claim: socket.socket | None = None

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._claim is not None:
            self._claim.close()


def local_rendezvous(
    address: str, port: int | None, environ: Mapping[str, str], console: Console
) -> Rendezvous:
    """Settle address and port of a run on this host alone.

    Args:
        address: ``--master_addr``, empty when not given (then the loopback address).
        port: ``--master_port``, None when not given. Then MASTER_PORT of the environment is used if that port is free,
            else any free port.

    Raises:
        UsageError: the address is not one of this host, or the given port is not a port.
        StartError: the given port is busy (the text says who has it), or no free port was found.
    """
    if address and not is_local_address(address):
        raise UsageError(
            f"--master_addr {address}: not a name or address of this host, and all ranks run here; "
            "leave it out on one node"
        )
    if not address and environ.get("MASTER_ADDR") not in (None, LOOPBACK, "localhost"):
        console.info(
            f"MASTER_ADDR={environ['MASTER_ADDR']} of the environment is not used on one node "
            f"({LOOPBACK} is); --master_addr sets another"
        )
    chosen = _given_port(port) if port is not None else _port_from_environment(environ, console)
    claim = _claim_port(chosen) if chosen is not None else None
    if chosen is None:
        chosen, claim = _free_port()
    return Rendezvous(address or LOOPBACK, chosen, claim)


def is_local_address(name: str) -> bool:
    """Whether a name or address means this host: whether one can listen there. False for names without an address."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0]
    except socket.gaierror:
        return False
    with socket.socket(family, kind, protocol) as probe:
        try:
            probe.bind(where)
        except OSError as problem:
            if problem.errno != errno.EADDRNOTAVAIL:
                raise
            return False
    return True


def _given_port(port: int) -> int:
    if not 0 < port < 65536:
        raise UsageError(f"--master_port {port}: expected a number from 1 to 65535")
    problem = _why_busy(port)
    if problem is not None:
        raise StartError(
            f"--master_port {port}: port busy: {problem}. Give another port, or leave --master_port out: "
            "on one node a free port is chosen"
        )
    return port


def _port_from_environment(environ: Mapping[str, str], console: Console) -> int | None:
    text = environ.get("MASTER_PORT")
    if not text:
        return None
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise UsageError(f"MASTER_PORT={text} in the environment: expected a number from 1 to 65535")
    problem = _why_busy(int(text))
    if problem is None:
        return int(text)
    console.info(f"MASTER_PORT={text} of the environment is busy ({problem}); a free port is chosen instead")
    return None


def _can_listen(port: int) -> int | None:
    """Try to bind the port as torch's store will. None if that works, else the error number."""
    for family, everywhere in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            probe = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue  # this kernel has no IPv6
        with probe:
            # A port whose last connections are still draining can be listened on; torch sets this option too.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((everywhere, port))
                probe.listen(1)
            except OSError as problem:
                if problem.errno == errno.EADDRNOTAVAIL:
                    continue  # IPv6 is compiled in but switched off
                return problem.errno
    return None


def _why_busy(port: int) -> str | None:
    """None when rank 0 can listen on the port, else the reason in words."""
    error = _can_listen(port)
    if error is None:
        claim = _claim_port(port)
        if claim is None:
            return "another deepspeed launcher on this host has it for its run"
        claim.close()
        return None
    if error == errno.EACCES:
        return "this user may not listen on it"
    if error != errno.EADDRINUSE:
        return os.strerror(error)
    return f"another process listens on it{_listener(port)}"


def _listener(port: int) -> str:
    """Who listens, if the system tells: `` (pid 12: python train.py)``."""
    import psutil

    try:
        connections = psutil.net_connections(kind="tcp")
        owner = next((c.pid for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == port), None)
        if owner is None:
            return ""
        return f" (pid {owner}: {' '.join(' '.join(psutil.Process(owner).cmdline()).split())[:120]})"
    except (psutil.Error, OSError):
        return ""


def _claim_port(port: int) -> socket.socket | None:
    """Hold the port's name among launchers of this host; None when another one has it.

    Linux keeps such names per network namespace, as it does ports, and drops them with the process: no lock files.
    Elsewhere an unbound socket stands for "not contested".
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if not os.path.exists("/proc/net/unix"):
        return claim
    try:
        claim.bind(f"\0deepspeed-master-port-{port}")
    except OSError as problem:
        claim.close()
        if problem.errno != errno.EADDRINUSE:
            raise
        return None
    return claim


def _outgoing_range_start() -> int:
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as text:
            return int(text.read().split()[0])
    except (OSError, ValueError, IndexError):
        return 32768


def _free_port() -> tuple[int, socket.socket]:
    """A port nobody listens on, with its claim."""
    start = _outgoing_range_start()
    last = start if start > _FIRST_PORT + 1000 else 65536
    for _ in range(_ATTEMPTS):
        # Drawn, not counted up: launchers that start together should not all try the same ports.
        port = _FIRST_PORT + int.from_bytes(os.urandom(4), "little") % (last - _FIRST_PORT)
        if port == DEFAULT_MASTER_PORT or _can_listen(port) is not None:
            continue
        claim = _claim_port(port)
        if claim is not None:
            return port, claim
    raise StartError(
        f"no free port found between {_FIRST_PORT} and {last - 1} in {_ATTEMPTS} tries; give one with --master_port"
    )
