"""Two hosts on one machine: network namespaces joined by a cable of a given speed. Needs root, ``ip`` and ``tc``.

    with TwoHosts(ranks=4, mbit=1000) as hosts:
        run_ranks(python, script, 4, arguments, place=hosts.place)

Ranks in different namespaces are on different hosts for the package too (see ``deepspeed.comm.same_host``), and for
everybody the bytes between them go through the kernel's own rate limiter, each direction by itself.
"""

from __future__ import annotations

import os
import subprocess
from types import TracebackType

_NET = "10.213.77"


def _run(*words: object, check: bool = True) -> None:
    subprocess.run([str(word) for word in words], check=check, capture_output=not check)


class TwoHosts:
    """The first half of ``ranks`` on the one, the rest on the other; ``mbit``: each way, 0: as fast as it goes.

    Raises CalledProcessError where namespaces cannot be made.
    """

    def __init__(self, ranks: int, mbit: float = 0) -> None:
        self._ranks, self._mbit = ranks, mbit
        self._names = [f"ds-host{number}-{os.getpid()}" for number in range(2)]

    def __enter__(self) -> TwoHosts:
        try:
            for name in self._names:
                _run("ip", "netns", "add", name)
            ends = [f"ds{os.getpid()}{letter}" for letter in "ab"]
            _run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
            for number, (name, end) in enumerate(zip(self._names, ends, strict=True)):
                _run("ip", "link", "set", end, "netns", name, "name", "cable")
                _run("ip", "-n", name, "addr", "add", f"{_NET}.{number + 1}/24", "dev", "cable")
                for device in ("cable", "lo"):
                    _run("ip", "-n", name, "link", "set", device, "up")
                if self._mbit:
                    # A queue that long loses nothing.
                    limit = ("rate", f"{self._mbit}mbit", "burst", "256kb", "latency", "400ms")
                    _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "cable", "root", "tbf", *limit)
        except BaseException:
            self._remove()
            raise
        return self

    def place(self, rank: int) -> tuple[list[str], dict[str, str]]:
        """See ``run_ranks``."""
        host = rank * 2 // self._ranks
        further = {"MASTER_ADDR": f"{_NET}.1", "GLOO_SOCKET_IFNAME": "cable"}
        return ["ip", "netns", "exec", self._names[host]], further

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._remove()

    def _remove(self) -> None:
        for name in self._names:
            _run("ip", "netns", "del", name, check=False)
