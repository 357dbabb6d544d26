"""`PeersToBe`: the connections between the ranks at one place of every host, made while the ranks still meet.

Owns: gloo's group of these ranks and the thread that makes it. Does not own: what travels there (`across_hosts.py`).
The group is gloo's own object, unknown to torch.distributed: its calls have an order of their own, and making it asks
nothing of the ranks outside.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as torch_dist

from deepspeed.comm import watch

if TYPE_CHECKING:
    from deepspeed.comm.across_hosts import HostLayout

__all__ = ["PeersToBe"]

_MOST_S = 30.0


class PeersToBe:
    """Connecting begins at once, on a thread, because it waits for the other ranks."""

    def __init__(self, layout: HostLayout, token: int, timeout_s: float) -> None:
        """`token`: a number that is this group's alone, equal on all of its ranks."""
        self._layout = layout
        self._timeout_s = timeout_s
        self._name = f"deepspeed/hosts/{token}/{layout.place}"
        self._group: Any = None
        self._problem = ""
        store = watch.private_store(timeout_s)
        self._thread = threading.Thread(target=self._connect, args=(store,), name="deepspeed-connect", daemon=True)
        self._thread.start()

    def problem(self) -> str:
        """Wait until all are connected: what went wrong, or nothing. The others have begun when this is called.

        Far shorter than the group's limit, so that nobody is missed in the calls that go on meanwhile.
        """
        limit_s = min(_MOST_S, self._timeout_s / 4)
        self._thread.join(limit_s)
        if self._thread.is_alive():
            self._problem = (
                f"no connection to the ranks at place {self._layout.place} of the other hosts in {limit_s:g} s"
            )
        return self._problem

    def take(self) -> Any:
        """The group, whose ranks are the numbers of the hosts."""
        group, self._group = self._group, None
        return group

    def _connect(self, store: Any) -> None:
        if store is None:
            self._problem = "the job has no store through which its hosts could find each other"
            return
        limit, layout = timedelta(seconds=self._timeout_s), self._layout
        try:
            named = torch_dist.PrefixStore(self._name, store)
            self._group = torch_dist.ProcessGroupGloo(named, layout.host, layout.hosts, limit)
        except (RuntimeError, ValueError) as error:
            self._problem = f"no connection to the ranks at place {layout.place} of the other hosts ({error})"
