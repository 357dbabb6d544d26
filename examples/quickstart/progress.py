"""What a person sees while training runs, and how Ctrl-C reaches the loop.

Owns: the live line (one line rewritten on a terminal, one line now and then elsewhere) and the stop flag.
Does not own: what the numbers mean, or how ranks agree to stop.
Invariant: nothing is written unless `enabled`, which is true on rank 0 alone.
"""

from __future__ import annotations

import signal
import sys
import time
from collections import deque
from types import FrameType, TracebackType

_SECONDS_BETWEEN_LINES = 5.0  # where there is no terminal to rewrite


class ProgressLine:
    """`update` once per step. Rates and the time left come from the last 20 steps."""

    def __init__(self, steps: int, tokens_per_step: int, *, enabled: bool) -> None:
        self._steps = steps
        self._tokens = tokens_per_step
        self._enabled = enabled
        self._live = enabled and sys.stdout.isatty()
        self._times = deque([time.monotonic()], maxlen=20)
        self._written_at = 0.0

    @property
    def tokens_per_second(self) -> float:
        elapsed = self._times[-1] - self._times[0]
        return self._tokens * (len(self._times) - 1) / elapsed if elapsed else 0.0

    def update(self, step: int, *, loss: float, lr: float, grad_norm: float | None) -> None:
        """`step` counts from 1; `loss` in nats; `grad_norm` None when the step was skipped."""
        now = time.monotonic()
        self._times.append(now)
        last = step == self._steps
        due = self._live or last or step == 1 or now - self._written_at >= _SECONDS_BETWEEN_LINES
        if not (self._enabled and due):
            return
        self._written_at = now
        rate = self.tokens_per_second
        left = (self._steps - step) * self._tokens / rate if rate else 0.0
        norm = "  skip" if grad_norm is None else f"{grad_norm:6.2f}"
        line = (
            f"step {step:4d}/{self._steps}  loss {loss:6.3f}  lr {lr:.2e}  grad norm {norm}  "
            f"{rate:7,.0f} tokens/s  ETA {int(left) // 60}:{int(left) % 60:02d}"
        )
        if self._live:
            sys.stdout.write(f"\r\x1b[2K{line}" + ("\n" if last else ""))
        else:
            sys.stdout.write(line + "\n")
        sys.stdout.flush()

    def close(self) -> None:
        """End a line that is still being rewritten."""
        if self._live and self._written_at:
            sys.stdout.write("\n")
            sys.stdout.flush()


class Interrupt:
    """Ctrl-C. Inside `with interrupt.deferred():` it only sets `requested`; elsewhere it raises KeyboardInterrupt.

    A rank that stopped in the middle of a step would leave the others waiting for it, so the loop looks at `requested`
    between steps, tells the other ranks, and all stop after the same step. A second Ctrl-C does not wait.
    """

    def __init__(self) -> None:
        self.requested = False
        self._deferred = False
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.requested or not self._deferred:
            self.requested = True
            raise KeyboardInterrupt
        self.requested = True

    def deferred(self) -> Interrupt:
        return self

    def __enter__(self) -> Interrupt:
        self._deferred = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._deferred = False
