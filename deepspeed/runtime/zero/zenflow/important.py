"""``ImportantPart``: masters and moments of the important elements, packed, on the device, updated in every step.

Owns: the packed tensors and their optimizer (``FusedAdam``, so one launch where there is one), their gradients, putting
new values into the model. Does not own: which elements these are (``selection.py``), when a step is made
(``executor.py``).
Invariants: packed tensors hold this rank's elements alone, so the ranks hold one set together. After :meth:`load` they
count, after :meth:`store` the host's copies are equal to them.

Bytes on the device, for k important elements of a rank's shard: masters and moments 12 k (4 k with ``offload``: moments
are in host memory between steps), gradients g k, g the width of the accumulation dtype; packing adds at most 60 bytes
per fragment and tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from deepspeed.ops.adam.fused_adam import FusedAdam
from deepspeed.runtime.swap_tensor.host_store import HostMemory
from deepspeed.runtime.zero.zenflow.pieces import Piece, rule_of, state_of


class _Packed:  # compared by identity
    """The tensors of one piece. ``away``: host copies of the moments, where these are not on the device."""

    def __init__(self, piece: Piece, state: dict[str, torch.Tensor]) -> None:
        assert piece.cut is not None
        leaf, device = piece.bound.leaf, piece.group.device
        numel = piece.cut.packed_numel
        self.leaf = nn.Parameter(torch.zeros(numel, dtype=leaf.dtype, device=device))
        self.grad = torch.zeros(numel, dtype=piece.group.accum_dtype, device=device)
        self.moments = {key: torch.zeros(numel, dtype=value.dtype, device=device) for key, value in state.items()}
        self.away: dict[str, torch.Tensor] = {}


def _goes_by_rows(packed: _Packed) -> bool:
    """Whether ``update_from`` does it in one pass; where it would go tensor by tensor, ``step`` takes all at once."""
    return packed.leaf.is_cpu or packed.leaf.dtype != torch.float32


class ImportantPart:
    """See the module docstring. ``base`` is the optimizer of the leaves in host memory, ``pieces`` all fragments."""

    def __init__(self, base: Any, pieces: Sequence[Piece], host: HostMemory, *, offload: bool) -> None:
        self.base = base
        self.pieces = list(pieces)
        self.host = host
        self.offload = offload
        self.optimizer = FusedAdam(
            [{"params": [nn.Parameter(torch.zeros(0))]}],
            adam_w_mode=self.base.adam_w_mode,
            fp32_optimizer_states=self.base.fp32_optimizer_states,
        )
        self._packed: dict[int, _Packed] = {}  # id(piece) ->
        self.optimizer.param_groups.clear()

    # ---- to and from the host's copies -----------------------------------------------------------------------------

    @torch.no_grad()
    def load(self) -> None:
        """Take masters and moments from leaves and states, cut as the pieces are now."""
        self._packed, old = {}, self._packed
        self.optimizer.state.clear()
        for piece in self.pieces:
            assert piece.cut is not None
            state = state_of(self.base, piece)
            held = {key: state[key] for key in rule_of(self.base, piece).state_keys}
            packed = old.get(id(piece))
            if packed is None or packed.leaf.numel() != piece.cut.packed_numel or packed.moments.keys() != held.keys():
                packed = _Packed(piece, held)
                piece.landed = -1
            self._packed[id(piece)] = packed
            piece.cut.gather(piece.bound.leaf.detach(), packed.leaf.detach())
            for key, value in held.items():
                piece.cut.gather(value, packed.moments[key])
            self.optimizer.state[packed.leaf] = {"step": piece.count, **packed.moments}
        for packed in self._packed.values():
            self._send_away(packed)
        self._fill_groups()

    def _fill_groups(self) -> None:
        members: list[list[nn.Parameter]] = [[] for _ in self.base.param_groups]
        for piece in self.pieces:
            members[piece.group.group_index].append(self._packed[id(piece)].leaf)
        self.optimizer.param_groups[:] = [
            {**group, "params": leaves} for group, leaves in zip(self.base.param_groups, members, strict=True)
        ]

    def drop(self) -> None:
        """Let go of everything on the device; what the host has counts, and :meth:`load` makes it anew."""
        self._packed = {}
        self.optimizer.state.clear()
        for piece in self.pieces:
            piece.landed = -1

    @torch.no_grad()
    def store(self) -> None:
        """Leaves and states in host memory are those of the last step, also where they are important."""
        for piece in self.pieces:
            packed = self._packed.get(id(piece))
            if packed is None or piece.cut is None or not piece.cut.numel:
                continue
            state = self.base.state[piece.bound.leaf]
            piece.cut.scatter(packed.leaf.detach(), piece.bound.leaf.detach())
            for key, value in (packed.away or packed.moments).items():
                piece.cut.scatter(value, state[key])
            if piece.whole:
                state["step"] = piece.count

    # ---- one step --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def take(self, piece: Piece, grad: torch.Tensor) -> bool:
        """Pack the important elements of ``grad``, the piece's gradient as reduced, on any device.

        False where there is nothing to pack them into yet.
        """
        packed = self._packed.get(id(piece))
        if packed is None or piece.cut is None:
            return False
        piece.cut.gather(grad, packed.grad)
        return True

    @torch.no_grad()
    def squares(self, pieces: Sequence[Piece], scale: float) -> float:
        """Sum of the squares of the important gradients of ``pieces``, times ``scale`` squared."""
        grads = [packed.grad for piece in pieces if (packed := self._packed[id(piece)]).grad.numel()]
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]
        return float(torch.stack(norms).square().sum()) * scale * scale if norms else 0.0

    @torch.no_grad()
    def update(self, pieces: Sequence[Piece], scale: float) -> None:
        """One Adam step of ``pieces`` from the gradients taken, multiplied by ``scale`` in fp32."""
        for own, group in zip(self.optimizer.param_groups, self.base.param_groups, strict=True):
            own.update({key: value for key, value in group.items() if key != "params"})
        for batch in self._batches(pieces):
            chosen = [(piece, self._packed[id(piece)]) for piece in batch]
            chosen = [(piece, packed) for piece, packed in chosen if packed.leaf.numel()]
            for piece, packed in chosen:
                self._bring_back(packed, piece.group.device)
                self.optimizer.state[packed.leaf].update(packed.moments)
            by_rows = [packed for _, packed in chosen if _goes_by_rows(packed)]
            self.optimizer.update_from([(packed.leaf, packed.grad, None) for packed in by_rows], scale)
            self._step_together([packed for _, packed in chosen if packed not in by_rows], scale)
            for _, packed in chosen:
                self._send_away(packed)
        for piece in pieces:
            piece.count += 1

    def _step_together(self, packed: Sequence[_Packed], scale: float) -> None:
        """One launch for all of them, where the device has one; the bits are those of ``update_from``."""
        if not packed:
            return
        grads = [one.grad.float() for one in packed]  # fp32: the same tensor
        scaled = torch._foreach_mul(grads, scale)
        for one, grad in zip(packed, scaled, strict=True):
            one.leaf.grad = grad
        self.optimizer.step()
        for one in packed:
            one.leaf.grad = None

    @torch.no_grad()
    def publish(self, pieces: Iterable[Piece]) -> None:
        """Put the important elements of ``pieces`` into this rank's part of the model, rounded to its dtype."""
        for piece in pieces:
            if piece.cut is not None and piece.cut.numel:
                piece.cut.scatter(self._packed[id(piece)].leaf.detach(), piece.bound.model)

    # ---- moments in host memory between steps ------------------------------------------------------------------------

    def _batches(self, pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
        """What is updated at once: all, or where moments come and go, what is updated at once in host memory."""
        if not self.offload:
            yield list(pieces)
            return
        by_unit: dict[int, list[Piece]] = {}
        for piece in pieces:
            by_unit.setdefault(id(piece.unit), []).append(piece)
        yield from by_unit.values()

    def _send_away(self, packed: _Packed) -> None:
        if not self.offload:
            return
        for key, value in packed.moments.items():
            home = packed.away.get(key)
            if home is None:
                home = packed.away[key] = self.host.zeros(value.numel(), value.dtype, value.device)
            home.copy_(value)
        packed.moments = dict(packed.away)
        self.optimizer.state[packed.leaf].update(packed.moments)

    def _bring_back(self, packed: _Packed, device: torch.device) -> None:
        if self.offload:
            packed.moments = {key: home.to(device, copy=True) for key, home in packed.away.items()}

    # ---- accounts --------------------------------------------------------------------------------------------------

    def storages(self) -> Iterator[tuple[str, torch.Tensor]]:
        """``(kind, tensor)`` as ``ShardGroup.storages`` gives them."""
        for packed in self._packed.values():
            yield "master", packed.leaf
            yield "gradient", packed.grad
            yield from (("host" if self.offload else "optimizer", value) for value in packed.moments.values())
