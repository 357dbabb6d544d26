"""Masters and optimizer states in a file: a unit's tensors are views of the mapped file, and buffers in its update.

    between steps   leaves and states are views of a shared mapping of the file: whoever reads or writes one (a
                    checkpoint, ``safe_get_full_fp32_param``, an optimizer that knows nothing of this) finds it there,
                    and the system keeps as much of it in memory as is free
    in an update    that goes by rows (``fused_update.py``), the unit's tensors are read into buffers past the page
                    cache, the next unit's are on their way, and the last one's on their way back

Owns: which file a tensor of a unit lies in, and where leaves and states point. Does not own: the files and buffers
(``swap_tensor/nvme_store.py``), the arithmetic.
Invariant: outside :meth:`DiskStates.at_hand` no buffer is in use and every write has reached its file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from deepspeed.runtime.swap_tensor.nvme_store import NvmeStore

if TYPE_CHECKING:
    from deepspeed.runtime.zero.shard_group import BoundFragment
    from deepspeed.runtime.zero.stepper import Unit

_MASTER = "master"


class DiskStates:
    """The units whose masters and states are in ``store``, updated by ``base``."""

    def __init__(
        self, store: NvmeStore, base: torch.optim.Optimizer, units: Sequence[Unit], earlier: DiskStates | None = None
    ) -> None:
        """``earlier``: whose fragments have their values already; it is closed."""
        self.store = store
        self.base = base
        self.units = [unit for unit in units if unit.group.on_disk and unit.fragments and unit.numel]
        self._after = {id(unit): later for unit, later in zip(self.units, self.units[1:], strict=False)}
        self._names = {id(unit): f"group{unit.number}.from{unit.shard_start}" for unit in self.units}
        self._keys: dict[int, list[str]] = {id(unit): [] for unit in self.units}  # what is in files: master first
        self._mapped: dict[tuple[int, str], torch.Tensor] = {}
        self._unit_of = {id(bound): unit for unit in self.units for bound in unit.fragments}
        held = set(earlier._unit_of) if earlier is not None else set()
        for unit in self.units:
            self._adopt(unit, held)
        self.finish()
        if earlier is not None:
            earlier.store.close()

    def _adopt(self, unit: Unit, held: set[int]) -> None:
        """Masters take the model's values, in a file; those of the fragments ``held`` come from an earlier one."""
        values = [bound.leaf.detach() if id(bound) in held else bound.model for bound in unit.fragments]
        whole = self._write(unit, _MASTER, list(zip(unit.fragments, values, strict=True)), unit.group.master_dtype)
        for bound in unit.fragments:
            bound.leaf.data = unit.part(bound, whole)
        self.settle_unit(unit)

    @torch.no_grad()
    def _write(
        self, unit: Unit, key: str, values: Sequence[tuple[BoundFragment, torch.Tensor]], dtype: torch.dtype
    ) -> torch.Tensor:
        """Put values of fragments into the file of ``key``, which is made if there is none; the mapped file.

        Most of a unit goes through a buffer and past the page cache, which else would fill with what nobody reads.
        """
        name = self._file(unit, key)
        if (id(unit), key) not in self._mapped:
            self.store.create(name, unit.numel, dtype)
            self._keys[id(unit)].append(key)
            self._mapped[id(unit), key] = self.store.mapped(name)
        mapped = self._mapped[id(unit), key]
        most = 2 * sum(bound.fragment.numel for bound, _ in values) >= unit.numel
        whole = self.store.fetch(name) if most else mapped
        for bound, value in values:
            unit.part(bound, whole).copy_(value)
        if most:
            self.store.commit(name)
        return mapped

    def _file(self, unit: Unit, key: str) -> str:
        return f"{self._names[id(unit)]}.{key}"

    # ---- states made elsewhere -------------------------------------------------------------------------------------

    def settle(self, bounds: Sequence[BoundFragment]) -> None:
        """States of these fragments that were put into memory (a loaded checkpoint) go to their files."""
        for unit in {id(unit): unit for bound in bounds if (unit := self._unit_of.get(id(bound)))}.values():
            self.settle_unit(unit)
        self.finish()

    def settle_unit(self, unit: Unit) -> None:
        """:meth:`settle` for the fragments of ``unit``, as far as to start it. Step counts stay in memory."""
        found: dict[str, list[tuple[BoundFragment, torch.Tensor]]] = {}
        for bound in unit.fragments:
            for key, value in self.base.state.get(bound.leaf, {}).items():
                if _is_in_file(value, bound):
                    there = self._mapped.get((id(unit), key))
                    if there is None or unit.part(bound, there).data_ptr() != value.data_ptr():
                        found.setdefault(key, []).append((bound, value))
        for key, values in found.items():
            whole = self._write(unit, key, values, values[0][1].dtype)
            for bound, _ in values:
                self.base.state[bound.leaf][key] = unit.part(bound, whole)

    # ---- updates ---------------------------------------------------------------------------------------------------

    def holds(self, unit: Unit) -> bool:
        """Whether ``unit`` is one of these."""
        return id(unit) in self._keys

    @contextlib.contextmanager
    def at_hand(self, unit: Unit) -> Iterator[None]:
        """Inside, leaves and states of ``unit`` are buffers in memory; afterwards they are on their way to the file."""
        keys = list(self._keys[id(unit)])
        if len(keys) > self.store.buffer_count:
            raise ValueError(
                f"zero_optimization.offload_optimizer.buffer_count is {self.store.buffer_count}; this optimizer needs "
                f"{len(keys)}: one buffer for the weights and one for each of its states ({', '.join(keys[1:])})"
            )
        files = [self._file(unit, key) for key in keys]
        try:
            for file in files:
                self.store.prefetch(file)
            buffers = {key: self.store.fetch(file) for key, file in zip(keys, files, strict=True)}
            later = self._after.get(id(unit))
            if later is not None:
                for key in self._keys[id(later)]:
                    self.store.prefetch(self._file(later, key))
            self._point(unit, buffers)
            yield
        except BaseException:
            self.store.let_go(files)
            self._point(unit, {key: self._mapped[id(unit), key] for key in keys})
            raise
        self._gather_fresh(unit, buffers)
        self._point(unit, {key: self._mapped[id(unit), key] for key in keys})
        self.store.commit_all(files)

    def _gather_fresh(self, unit: Unit, buffers: dict[str, torch.Tensor]) -> None:
        """States that the update has made go along: of a first gradient, or after a checkpoint that had none."""
        for bound in unit.fragments:
            for key, value in self.base.state.get(bound.leaf, {}).items():
                if key in buffers and _is_in_file(value, bound):
                    part = unit.part(bound, buffers[key])
                    if part.data_ptr() != value.data_ptr():
                        part.copy_(value)

    def _point(self, unit: Unit, wholes: dict[str, torch.Tensor]) -> None:
        for bound in unit.fragments:
            state = self.base.state.get(bound.leaf, {})
            for key, whole in wholes.items():
                part = unit.part(bound, whole)
                if key == _MASTER:
                    bound.leaf.data = part
                elif _is_in_file(state.get(key), bound):
                    state[key] = part

    def finish(self) -> None:
        """Every update has reached its file. Raises OSError naming the file of one that has not."""
        self.store.flush()

    def close(self) -> None:
        """Remove the files. Leaves and states lose their values."""
        for unit in self.units:
            for bound in unit.fragments:
                bound.leaf.data = torch.empty(0, dtype=bound.leaf.dtype)
        self._mapped.clear()
        self.units = []
        self.store.close()


def _is_in_file(value: Any, bound: BoundFragment) -> bool:
    """Whether a state of ``bound`` goes to a file. Those of a number (0-dim) stay, as step counts do."""
    return isinstance(value, torch.Tensor) and value.shape == bound.leaf.shape and value.dim() > 0
