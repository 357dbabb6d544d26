"""Counters, schedule, data position, callbacks and random states: from a saved tag into a live engine.

Owns: which part of the engine takes which entry. Does not own: tensors (``restore.py``), what is written
(``writer.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import names, random_state, trusted
from deepspeed.checkpoint.reader import SavedTag
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.runtime.zero import state_dict as zero_state

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


@dataclass
class EnginePlan:
    """The entries to restore, checked; see :func:`plan_engine`."""

    saved: SavedTag
    scheduler: Any = None
    data_loader: Any = None
    callbacks: dict[str, Any] = field(default_factory=dict)
    random: dict[str, Any] | None = None
    scaler: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def apply(self, engine: DeepSpeedEngine) -> None:
        """Restore everything but the random states, which come last (:meth:`apply_random`)."""
        self._counters(engine)
        if self.scheduler is not None:
            engine.lr_scheduler.load_state_dict(self.scheduler)
        if self.data_loader is not None:
            engine.training_dataloader.load_state_dict(self.data_loader)
        engine.callbacks.load_state_dict(self.callbacks)
        if self.scaler:
            reason = zero_state.restore_scaler(getattr(engine.zero_optimizer, "loss_scaler", None), self.scaler)
            if reason:
                self.notes.append(reason)

    def _counters(self, engine: DeepSpeedEngine) -> None:
        model, state = self.saved.model, self.saved.engine_state
        steps = int(model[keys.GLOBAL_STEPS])
        engine.global_steps = steps
        engine.global_samples = int(model.get(keys.GLOBAL_SAMPLES, steps * engine.train_batch_size()))
        engine.skipped_steps = int(model.get(keys.SKIPPED_STEPS, 0))
        accumulation = engine.accumulation
        same_window = state.get("gradient_accumulation_steps") == accumulation.steps
        accumulation.begin_window_at(int(state["micro_steps"]) if same_window else steps * accumulation.steps)

    def apply_random(self) -> None:
        if self.random is not None:
            random_state.restore(self.random)


def plan_engine(
    engine: DeepSpeedEngine, saved: SavedTag, rank: int, *, scheduler_states: bool, optimizer_states: bool
) -> EnginePlan:
    """Look at every entry before anything is changed. Raises CheckpointError for entries that cannot be trusted."""
    plan = EnginePlan(saved)
    state = saved.engine_state
    found = saved.model.get(keys.LR_SCHEDULER)
    if scheduler_states and engine.lr_scheduler is not None:
        if found is None:
            plan.notes.append("the checkpoint holds no state of a learning-rate schedule: it starts afresh")
        else:
            plan.scheduler = _own_copy(saved.check_trust(keys.LR_SCHEDULER, found))
    loader = engine.training_dataloader
    if hasattr(loader, "load_state_dict") and state.get("data_loader") is not None:
        plan.data_loader = _own_copy(saved.check_trust("data loader state", state["data_loader"]))
    plan.callbacks = _own_copy(saved.check_trust("callback states", state.get("callbacks", {})))
    if optimizer_states:
        plan.scaler = saved.loss_scaler
        if engine._config.checkpoint.load_rng_state:
            plan.random = _random_states(plan, saved, rank)
    return plan


def _random_states(plan: EnginePlan, saved: SavedTag, rank: int) -> dict[str, Any] | None:
    path = saved.folder / names.rng_file(rank)
    if path.exists():
        return dict(_own_copy(trusted.load_file(path)))
    if saved.ours:
        plan.notes.append(
            f"no random state was saved for rank {rank} and later ones (fewer ranks then): theirs stay as they are"
        )
    return None


def client_state(
    saved: SavedTag, *, scheduler_loaded: bool, optimizer_loaded: bool, module_only: bool
) -> dict[str, Any]:
    """What ``load_checkpoint`` hands back: the user's own keys and, as ever, some of the library's.

    Raises CheckpointError for a key whose value needs trust.
    """
    hidden = {keys.MODULE, keys.LAYOUT_RECORD, keys.ENGINE_STATE}
    if not module_only:
        hidden |= {
            keys.SKIPPED_STEPS, keys.GLOBAL_STEPS, keys.DP_WORLD_SIZE, keys.MP_WORLD_SIZE, keys.DATA_SAMPLER,
            keys.RANDOM_LTD,
        }  # fmt: skip
    if scheduler_loaded:
        hidden.add(keys.LR_SCHEDULER)
    if optimizer_loaded:
        hidden.add(keys.OPTIMIZER)
    shown = {key: value for key, value in saved.model.items() if key not in hidden}
    for key, value in shown.items():
        if key not in keys.LIBRARY_KEYS - {keys.LR_SCHEDULER}:
            saved.check_trust(f"client_state[{key!r}]", value)
    return dict(_own_copy(shown))


def _own_copy(value: Any) -> Any:
    """``value`` with tensors in memory instead of mapped from the file."""
    return clone_tensors_for_torch_save(value)
