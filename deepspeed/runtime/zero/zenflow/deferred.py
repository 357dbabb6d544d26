"""``DeferredPart``: what is not important: summed up in host memory, and applied once per window, beside training.

    each step          sums += gradient * scale             (the accumulator's thread, with ``overlap``)
    end of a window    masters, moments <- sums / steps     (the updater's thread, with ``overlap``)
                       new weights wait in host memory, in the model's dtype
    landing            they go to the device: at once, or with ``overlap`` at the end of the next window

Whole fragments pass through the optimizer, one pass over memory as without ZenFlow; what becomes of the important
elements in them is overwritten by their packed copies before anybody reads it.

Owns: sums, staged weights, the two threads. Does not own: when a window ends (``executor.py``).
Invariants: a job sees the hyper-parameters of the step that gave it; jobs of one kind run in their order; the model
changes in :meth:`land` alone, on the caller's thread. A failure in a thread comes out of the next call that waits; with
``told_at_boundary`` out of :meth:`failure`, and until then steps go on as if the job had done nothing, because other
ranks wait for this one in the collectives between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from deepspeed.accelerator.real_accelerator import get_accelerator
from deepspeed.runtime.zero.fused_update import Row, settings_of
from deepspeed.runtime.zero.zenflow.pieces import Piece, state_of
from deepspeed.utils.logging import logger

_CHUNK = 1 << 18  # elements: scaled gradients stay in cache on their way into the sums

_Result = TypeVar("_Result")
# A piece and its gradient in host memory.
PieceGrad = tuple[Piece, torch.Tensor]


class DeferredPart:
    """``pieces``: those with elements that may be unimportant. ``threads``: of the host update; None: torch's."""

    def __init__(
        self,
        base: torch.optim.Optimizer,
        pieces: Sequence[Piece],
        *,
        overlap: bool,
        measure: bool = False,
        threads: int | None = None,
        told_at_boundary: bool = False,
    ) -> None:
        """``measure``: :meth:`wait_for_gradients` is to know the size of the sums."""
        self.base: Any = base
        self.pieces = list(pieces)
        self.overlap = overlap
        self.measure = measure
        self.threads = threads
        self.steps = 0  # of this window
        self.bytes_to_device = 0  # landed so far, for counters
        self._sums: list[dict[int, torch.Tensor]] = [{}, {}]  # id(unit) -> 1D fp32; of this window and of the last
        self._side = 0
        self._staged: dict[int, torch.Tensor] = {}  # id(unit) -> 1D, the model's dtype
        self._accumulated: Future[float] | None = None
        self._updated: Future[None] | None = None
        self._to_land: list[Piece] = []
        self._restage = False  # masters may have been written to since the update
        self._workers: list[ThreadPoolExecutor] = []
        self._told_at_boundary = told_at_boundary
        self._failure: Exception | None = None

    # ---- gradients in ----------------------------------------------------------------------------------------------

    def add(self, grads: Sequence[PieceGrad], scale: float, *, ends: bool) -> None:
        """One step's gradients, each of a piece with unimportant elements. They are read until
        :meth:`wait_for_gradients` returns. ``ends``: the step is the last of the window, whose update begins.
        """
        self.steps += 1
        if ends and self.steps == 1:  # nothing to sum up
            self._accumulated = None
            self._begin_update(grads, scale)
            return
        pairs = []
        for piece, grad in grads:
            pairs.append((self._sum_of(piece), grad, not piece.waiting))
            piece.waiting = True
        self._accumulated = self._run(0, self._accumulate, pairs, scale, self._measured())
        if ends:
            self.begin_update()

    def _measured(self) -> list[tuple[Piece, torch.Tensor]]:
        waiting = [piece for piece in self.pieces if piece.waiting] if self.measure else []
        return [(piece, self._sum_of(piece)) for piece in waiting]

    def wait_for_gradients(self) -> float:
        """The gradients given so far have been read. The sum of the squares of the unimportant sums, if measured."""
        update = self._updated
        if update is not None and (self._accumulated is None or update.done()):  # it reads them itself, or has failed
            self._wait(update, None)
        return self._wait(self._accumulated, 0.0)

    def _sum_of(self, piece: Piece) -> torch.Tensor:
        sums, unit = self._sums[self._side], piece.unit
        held = sums.get(id(unit))
        if held is None:
            assert unit.group.host is not None
            held = sums[id(unit)] = unit.group.host.zeros(unit.numel, torch.float32, unit.group.device)
        return unit.part(piece.bound, held)

    @torch.no_grad()
    def _accumulate(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor, bool]],
        scale: float,
        measured: Sequence[tuple[Piece, torch.Tensor]],
    ) -> float:
        for total, grad, first in pairs:
            chunks = zip(total.view(-1).split(_CHUNK), grad.reshape(-1).split(_CHUNK), strict=True)
            for into, part in chunks:
                if first:
                    into.copy_(part).mul_(scale)
                else:
                    into.add_(part if scale == 1.0 else part.to(torch.float32, copy=True).mul_(scale))
        squares = 0.0
        for piece, total in measured:
            assert piece.cut is not None
            important = torch.empty(piece.cut.packed_numel, dtype=torch.float32)
            piece.cut.gather(total, important)
            squares += _squares(total) - _squares(important[: piece.cut.numel])
        return max(squares, 0.0)

    # ---- the update ------------------------------------------------------------------------------------------------

    def begin_update(self) -> None:
        """Apply the sums of this window, and begin the next one."""
        rows = [(piece, self._sum_of(piece)) for piece in self.pieces if piece.waiting]
        self._begin_update(rows, 1.0 / max(self.steps, 1))
        self._side = 1 - self._side if self.overlap else 0

    def _begin_update(self, grads: Sequence[PieceGrad], scale: float) -> None:
        assert not self._to_land, "the last update has not landed"
        for piece, _ in grads:
            state_of(self.base, piece)  # dictionaries grow on this thread
        self._to_land = [piece for piece, _ in grads]
        for piece in self.pieces:
            piece.waiting = False
        self.steps = 0
        rows = [(piece.bound.leaf, grad, self._stage_of(piece)) for piece, grad in grads]
        sent: Any = None
        if not get_accelerator().is_synchronized_device():  # what has landed may still be on its way
            sent = get_accelerator().Event()
            sent.record()
        self._restage = False
        self._updated = self._run(1, self._update, _twin(self.base), rows, scale, self._accumulated, sent)

    @staticmethod
    def _update(driven: Any, rows: Sequence[Row], scale: float, after: Future[float] | None, sent: Any) -> None:
        if after is not None:
            after.result()
        if sent is not None:
            sent.synchronize()
        if rows:
            driven.update_from(rows, scale)

    def _stage_of(self, piece: Piece) -> torch.Tensor:
        unit = piece.unit
        staged = self._staged.get(id(unit))
        if staged is None:
            assert unit.group.host is not None
            staged = unit.group.host.zeros(unit.numel, unit.group.dtype, unit.group.device)
            self._staged[id(unit)] = staged
        return unit.part(piece.bound, staged)

    @torch.no_grad()
    def land(self) -> list[Piece]:
        """Put what an update has made into this rank's part of the model; returns the pieces whose elements changed.

        Their important elements are out of date then, until they are published.
        """
        self._wait(self._updated, None)
        self._updated = None
        landed, self._to_land = self._to_land, []
        if self._failure is not None:  # what is staged may be anything
            return []
        for piece in landed:
            staged = self._stage_of(piece)
            if self._restage:
                staged.copy_(piece.bound.leaf.detach())
            piece.bound.model.copy_(staged, non_blocking=True)
            self.bytes_to_device += staged.nbytes
        self._restage = False
        return landed

    # ---- between steps ---------------------------------------------------------------------------------------------

    @property
    def lands_later(self) -> list[Piece]:
        """Pieces whose masters are ahead of the model's weights."""
        return self._to_land

    def hold_still(self) -> None:
        """No thread reads or writes when this returns; masters may be written to. See :meth:`refuse_spoilt`."""
        self._wait(self._accumulated, 0.0)
        self._wait(self._updated, None)
        self._restage = True

    def pending(self, piece: Piece) -> torch.Tensor | None:
        """The sum of this window's scaled gradients of ``piece``, or None.  # shape of the leaf, fp32"""
        return self._sum_of(piece) if piece.waiting else None

    @torch.no_grad()
    def take_over(self, steps: int, sums: dict[int, torch.Tensor | None], lands_later: Sequence[Piece]) -> None:
        """Go on from a window of ``steps`` steps with these sums, by ``id`` of the piece, as :meth:`pending` gave them.

        ``lands_later``: pieces whose masters are ahead of the model.
        """
        self.steps = steps
        self._accumulated = self._updated = None
        self._to_land, self._restage = list(lands_later), True
        for piece in self.pieces:
            saved = sums.get(id(piece))
            piece.waiting = saved is not None
            if saved is not None:
                self._sum_of(piece).copy_(saved)
        if self.measure:
            self._accumulated = self._run(0, self._accumulate, [], 1.0, self._measured())

    # ---- failures --------------------------------------------------------------------------------------------------

    def failure(self) -> Exception | None:
        """The first failure of a job, of those the boundary waits for and of others that have ended."""
        if self._told_at_boundary:
            self.wait_for_gradients()
            if self._updated is not None and self._updated.done():
                self._wait(self._updated, None)
        return self._failure

    def forget_failure(self) -> None:
        """Wait for all jobs, whatever becomes of them: their masters and states are to be written over."""
        for job in (self._accumulated, self._updated):
            if job is not None:
                job.exception()
        self._accumulated = self._updated = self._failure = None

    def refuse_spoilt(self) -> None:
        """Raise RuntimeError where a failure has left masters and states in any state: they are about to be saved."""
        if self._failure is not None:
            raise RuntimeError(f"the update in host memory has failed: {_in_words(self._failure)}") from self._failure

    def _wait(self, job: Future[_Result] | None, otherwise: _Result) -> _Result:
        try:
            return job.result() if job is not None else otherwise
        except Exception as error:
            if not self._told_at_boundary:
                raise
            if self._failure is None:
                self._failure = error
                logger.error(f"ZenFlow's host update has failed; all ranks will raise at the next step: {error!r}")
            return otherwise

    # ---- threads ---------------------------------------------------------------------------------------------------

    def _run(self, worker: int, function: Any, *args: Any) -> Any:
        """The result's future; without ``overlap`` it is there already."""
        if not self.overlap:
            done: Future[Any] = Future()
            done.set_result(function(*args))
            return done
        if not self._workers:
            self._workers = [
                ThreadPoolExecutor(1, thread_name_prefix=f"deepspeed-zenflow-{name}", initializer=start)
                for name, start in (("sums", None), ("update", self._limit_threads))
            ]
            if self.threads is not None:
                own = torch.get_num_threads()
                self._workers[1].submit(int).result()
                torch.set_num_threads(own)  # what the worker has set is also the default of threads to come
        return self._workers[worker].submit(function, *args)

    def _limit_threads(self) -> None:
        if self.threads is not None:
            torch.set_num_threads(self.threads)

    def close(self) -> None:
        """Wait for the threads and end them. A failure of theirs that nobody has heard of is logged."""
        for job in (self._accumulated, self._updated) if self._failure is None else ():
            if job is not None and (error := job.exception()) is not None:
                logger.error(f"ZenFlow's host update failed, and no step followed to raise it: {error!r}")
        for worker in self._workers:
            worker.shutdown()
        self._workers = []
        self._accumulated = self._updated = None
        self._to_land = []
        self._sums, self._staged = [{}, {}], {}

    def storages(self) -> Iterator[torch.Tensor]:
        """Host memory held."""
        for sums in self._sums:
            yield from sums.values()
        yield from self._staged.values()


def _twin(base: Any) -> Any:
    """``base`` with the hyper-parameters of now, and the same states: what is changed later does not reach a job."""
    twin = object.__new__(type(base))
    twin.__dict__.update(base.__dict__)
    twin.param_groups = [{**settings_of(group), "params": group["params"]} for group in base.param_groups]
    twin._places = None
    return twin


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _squares(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
