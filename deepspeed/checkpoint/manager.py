"""``CheckpointManager``: what ``engine.save_checkpoint``, ``load_checkpoint`` and ``save_16bit_model`` do.

    save    agree on tag and space -> write all files aside -> agree that all succeeded -> manifest, rename -> latest
    load    open, check, plan on every rank -> agree -> copy -> agree

Both are collective over all ranks. Every step ends in an agreement (``agree.py``), so one rank's failure is everyone's
error, and up to the last step nothing that was there before has changed: no file on saving, no tensor on loading.

Owns: the order of these steps and the rules about tags. Does not own: content (``writer.py``, ``restore.py``,
``engine_state.py``), what follows once a save is agreed on (``disk/publish.py``), doing that beside training
(``disk/background.py``).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed import comm as dist
from deepspeed.checkpoint import agree, engine_state, export, names, reader, restore, trusted, writer
from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint.disk import durable
from deepspeed.checkpoint.disk.background import BackgroundSaver
from deepspeed.checkpoint.disk.publish import Gather, Publication, SaveJob, SaveRequest
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.universal.reader import open_tag
from deepspeed.runtime.checkpoint_engine.utils import create_checkpoint_engine
from deepspeed.runtime.zero import state_dict as zero_state
from deepspeed.utils.logging import logger
from deepspeed.utils.torch_file import TorchFile

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


class CheckpointManager:
    """See the module docstring. Holds no files between calls, and no tensors but a kept copy for background saves."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.engine: Any = engine
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.config = engine._config.checkpoint
        self.storage = create_checkpoint_engine(engine._config)
        self.publication = Publication(self.rank, self.world, self._leads(), self.config)
        self.background: BackgroundSaver | None = None
        if self.config.writer is not None and self.config.writer.decoupled:
            self.background = BackgroundSaver(
                for_device=engine.device.type != "cpu", expected_nbytes=self._expected_nbytes
            )
            engine.callbacks.add(self.background)
        if not self.config.checkpoint_serialization:
            self._say("checkpoint.checkpoint_serialization=false has no effect: files are always zip archives")

    def close(self) -> None:
        """Wait for the save under way, if there is one, and forget the engine. Raises the failure of that save."""
        self.storage.cleanup()
        self.engine = None
        if self.background is not None:
            self.background.close()

    def _expected_nbytes(self) -> int:
        """What this rank would copy for a save of the state as it is."""
        contents = writer.contents(self.engine, self.rank, {}, False, self._writes_model())
        return sum(TorchFile(content).room_nbytes for content in contents.values())

    # ---- save ------------------------------------------------------------------------------------------------------

    def save(
        self,
        save_dir: str | os.PathLike[str],
        tag: Any = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write everything an exact resume needs to ``save_dir/tag`` (default tag: ``global_step{N}``).

        When it returns, the checkpoint is complete and on disk, on every rank's account; True. With
        ``checkpoint.writer.decoupled`` it returns after a copy of the weights (``disk/background.py``). Raises
        ValueError for an empty folder or a tag that is refused, KeyError for a reserved key in ``client_state``,
        CheckpointError (the same on all ranks) when writing failed anywhere; then what was there is untouched.
        """
        folder = names.check_folder("save_checkpoint", "save_dir", save_dir)
        if not os.fspath(save_dir):
            raise ValueError("save_checkpoint: save_dir is empty")
        text = names.check_tag(names.DEFAULT_TAG.format(self.engine.global_steps) if tag is None else tag)
        extra = self._own_client_state(client_state or {})
        if self.background is not None:
            self.background.wait(say=self.rank == 0)
        files, requests = agree.together(
            f"saving checkpoint {text!r} to {folder}",
            lambda: self._prepare(extra, exclude_frozen_parameters),
            lambda made: SaveRequest(text, durable.new_token(), sum(f.nbytes for f in made.values()), self._leads()),
        )
        text = self._agreed_tag(requests)
        job = SaveJob(folder, text, files, requests, save_latest, int(self.engine.global_steps))
        background = self.background
        if background is None:
            self.publication.carry_out(job, agree.gather)
            return True

        optimizer = self.engine.zero_optimizer
        later = optimizer.memory_of_states() if optimizer is not None else frozenset()

        def copy() -> None:
            room = background.room(sum(content.room_nbytes for content in files.values()))
            for content in files.values():
                content.move_to(room, later)
                room = room[content.room_nbytes :]

        def copy_states() -> None:
            for content in files.values():
                content.finish_moving()

        def write(gather: Gather, failure: Exception | None) -> None:
            if failure is not None:
                for content in files.values():
                    content.give_up(failure)
            self.publication.carry_out(job, gather)

        agree.together(job.doing, copy)
        if optimizer is not None:
            optimizer.await_readers = background.wait_for_copy
        background.start(job.doing, copy_states, write)
        return True

    def _own_client_state(self, client_state: dict[str, Any]) -> dict[str, Any]:
        """The user's keys; those the library owns (handed out by ``load_checkpoint``) are left out.

        Who steps a schedule of their own may keep its state under the key that is free then.
        """
        own = {keys.CHECKPOINT_PARALLEL_DIMS: writer.parallel_dimensions(self.engine)}
        reserved = [key for key, value in own.items() if key in client_state and client_state[key] != value]
        if reserved:
            raise KeyError(f"client_state: {', '.join(reserved)} belongs to the library; use another key")
        owned = keys.LIBRARY_KEYS - ({keys.LR_SCHEDULER} if self.engine.lr_scheduler is None else set())
        kept = {key: value for key, value in client_state.items() if key not in owned}
        lost = [key for key in client_state if key in keys.NEVER_HANDED_OUT & owned and client_state[key] is not None]
        if lost:
            self._say(
                f"client_state: {', '.join(map(repr, lost))} belong to the library, which saves its own value there; "
                "yours are NOT saved, use other keys"
            )
        if self.rank == 0:
            self._warn_of_trust(kept)
        return kept

    def _warn_of_trust(self, client_state: dict[str, Any]) -> None:
        for key, value in client_state.items():
            if zero_state.is_plain(value):
                continue
            with contextlib.suppress(Exception):  # what cannot be pickled at all is reported by the save itself
                asked = trusted.foreign_classes(value, lambda item: TorchFile(item).pickled)
                if asked:
                    self._say(
                        f"client_state[{key!r}] holds objects of {', '.join(asked)}: loading it will need "
                        "torch.serialization.add_safe_globals for these classes; weights and optimizer state will not"
                    )

    def _prepare(self, client_state: dict[str, Any], exclude_frozen: bool) -> dict[str, TorchFile]:
        engine = self.engine
        accumulation = engine.accumulation
        if accumulation.managed and accumulation.in_window:
            self._say(
                f"saving inside a window of {accumulation.steps} micro-steps: the gradients of the first "
                f"{accumulation.in_window} are not saved, a resumed run begins the window anew"
            )
        elif engine.holds_gradients:  # the client counts micro-steps by itself, or has not called step() yet
            self._say(
                "saving between backward and the optimizer step: the gradients since the last optimizer step are not "
                "saved. To lose none, save after engine.step() (with Accelerate: where accelerator.sync_gradients)"
            )
        if engine.zero_optimizer is not None and zero_state.unsaved_settings(engine.zero_optimizer):
            self._say(
                "these settings of the optimizer's parameter groups are not plain data and stay out of the checkpoint: "
                + ", ".join(zero_state.unsaved_settings(engine.zero_optimizer))
            )
        contents = writer.contents(engine, self.rank, client_state, exclude_frozen, self._writes_model())
        made = {}
        for name, content in contents.items():
            try:
                made[name] = TorchFile(content)
            except Exception as error:
                raise CheckpointError(f"{_unpicklable(content)} cannot be pickled: {error}") from error
        return made

    def _writes_model(self) -> bool:
        """Data-parallel rank 0 writes the weights; with node-local disks the first rank of every node does."""
        return self.engine.mesh.rank("zero") == 0 or (self.config.use_node_local_storage and self._leads())

    def _leads(self) -> bool:
        """The rank that renames folders: the first of the job, or of its node where every node has its own disk."""
        if self.config.use_node_local_storage:
            return dist.get_local_rank() == 0 if dist.is_initialized() else True
        return self.rank == 0

    def _agreed_tag(self, requests: list[SaveRequest]) -> str:
        tags = [request.tag for request in requests]
        if len(set(tags)) > 1 and self.config.tag_validation.upper() != "IGNORE":
            shown = ", ".join(f"rank {rank}: {tag!r}" for rank, tag in enumerate(tags))
            message = f"the ranks save under different tags ({shown})"
            if self.config.tag_validation.upper() == "FAIL":
                raise AssertionError(f"{message}; checkpoint.tag_validation is Fail, so nothing was saved")
            self._say(f"{message}; all of them save under {tags[0]!r}, the tag of rank 0")
        return tags[0]

    # ---- load ------------------------------------------------------------------------------------------------------

    def load(
        self,
        load_dir: str | os.PathLike[str],
        tag: Any = None,
        *,
        strict: bool = True,
        optimizer_states: bool = True,
        scheduler_states: bool = True,
        module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Restore what :meth:`save` wrote, at any number of ranks, stage or precision; ``(path, client_state)``.

        ``tag`` None: the one ``latest`` names; without such a file nothing is loaded and ``(None, None)`` returned,
        with a warning that says what the folder holds. Raises CheckpointError (the same on all ranks, engine
        untouched) when the tag or one of its files is missing or damaged or does not fit the model.
        """
        if self.background is not None:
            self.background.settle()  # what is being written may be what is asked for
        folder = names.check_folder("load_checkpoint", "load_dir", load_dir)
        wanted = None if tag is None else names.check_tag(tag, loading=True)
        doing = f"loading checkpoint {wanted or '(latest)'} from {folder}"
        plan, tags = agree.together(
            doing,
            lambda: self._plan(folder, wanted, strict, optimizer_states, scheduler_states, module_only, custom_load_fn),
            lambda made: None if made is None else made.saved.tag,
        )
        if len(set(tags)) > 1:
            raise CheckpointError(f"{doing}: the ranks see different tags in {names.LATEST}: {tags}")
        if plan is None:
            self._say(
                f"nothing was loaded: there is no {names.LATEST} file and no tag was given. {reader.describe(folder)}. "
                "Training starts from scratch unless load_checkpoint is given the right folder or a tag",
            )
            return None, None
        agree.together(doing, plan.apply)
        plan.finish()
        for note in plan.notes():
            self._say(f"checkpoint {plan.saved.tag!r}: {note}")
        return str(plan.saved.path), plan.client_state

    def _plan(
        self,
        folder: Path,
        wanted: str | None,
        strict: bool,
        optimizer_states: bool,
        scheduler_states: bool,
        module_only: bool,
        custom_load_fn: Callable[..., Any] | None,
    ) -> LoadPlan | None:
        tag = wanted if wanted is not None else self._latest(folder)
        if tag is None:
            return None
        engine = self.engine
        self._refuse_pinned()
        shard_rank, shards, _ = writer.shard_place(engine)
        mp_rank, universal = writer.model_parallel_rank(engine), self.config.load_universal
        local = bool(self.config.use_node_local_storage)
        saved = open_tag(folder, tag, mp_rank, shard_rank, shards, universal=universal, node_local=local)
        optimizer = engine.zero_optimizer if not module_only else None
        if optimizer is not None:
            saved.take_order(*restore.given_orders(optimizer))
        wants_masters = optimizer_states or engine.zero_load_from_fp32_weights()
        shard_files: list[str] = []
        if saved.stage >= 3 or (
            optimizer is not None
            and saved.stage >= 1
            and (optimizer_states or (wants_masters and saved.has_optim_files()))
        ):
            shard_files = saved.optim_files()
        saved.check_files([*saved.model_files(), *shard_files], self.rank, self.world, self._leads())
        plan = LoadPlan(engine, saved, restore.plan_module(engine.module, saved, strict, custom_load_fn))
        if optimizer is not None:
            with_masters = wants_masters and (saved.stage == 0 or bool(shard_files))
            self._plan_optimizer(plan, optimizer_states, with_masters)
        if not module_only:
            plan.engine_plan = engine_state.plan_engine(
                engine, saved, self.rank, scheduler_states=scheduler_states, optimizer_states=optimizer_states
            )
        plan.client_state = engine_state.client_state(
            saved,
            scheduler_loaded=scheduler_states and not module_only and engine.lr_scheduler is not None,
            optimizer_loaded=optimizer is not None and optimizer_states,
            module_only=module_only,
        )
        return plan

    def _latest(self, folder: Path) -> str | None:
        if not self.config.load_universal:
            return reader.read_latest(folder)
        tag = reader.read_latest(folder, names.LATEST_UNIVERSAL)
        if tag is None:
            raise ValueError(
                f"checkpoint.load_universal is true, but there is no {names.LATEST_UNIVERSAL} file and no tag was "
                f"given. {reader.describe(folder)}"
            )
        return tag

    def _refuse_pinned(self) -> None:
        """Shards are written by loading: nobody may hold whole parameters meanwhile."""
        sharded = self.engine.sharded_module
        pinned = [block for block in sharded.gatherer.blocks if block.pins] if sharded is not None else []
        if pinned:
            raise CheckpointError(
                f"load_checkpoint inside `with deepspeed.zero.GatheredParameters(...)` ({pinned[0].places[0].name} "
                "and others are gathered): leave the context first"
            )

    def _plan_optimizer(self, plan: LoadPlan, with_states: bool, with_masters: bool) -> None:
        saved = plan.saved
        if not saved.holds_optimizer:
            if with_states:
                held = (
                    "holds no optimizer state"
                    if saved.ours
                    else "was written by another release, whose layout is not known"
                )
                raise CheckpointError(
                    f"{saved.folder} {held}; load with load_optimizer_states=False or load_module_only=True"
                )
            return
        if with_states or with_masters:
            module_names = {
                names.clean_name(name) for name, _ in self.engine.module.named_parameters(remove_duplicate=False)
            }
            plan.optimizer_plan = restore.plan_optimizer(
                self.engine.zero_optimizer, saved, with_states=with_states, module_names=module_names
            )
        elif saved.stage >= 1:
            plan.extra_notes.append("fp32 masters are rebuilt from the weights")

    # ---- export ----------------------------------------------------------------------------------------------------

    def save_16bit(
        self, save_dir: str | os.PathLike[str], save_filename: str, exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the whole module's state dict to ``save_dir/save_filename``, atomically, from rank 0. Collective.

        A name that ends in ``.safetensors`` gives that format, beyond 5 GB in numbered files with an index.

        At stage 3 that means gathering the weights, which the config must allow: else nothing is written, and False.
        """
        path = names.check_folder("save_16bit_model", "save_dir", save_dir) / _plain_file_name(save_filename)
        if self.engine.zero_optimization_stage() >= 3 and not self.engine.zero_gather_16bit_weights_on_model_save():
            self._say(
                f"{path} was NOT written: zero_optimization.stage3_gather_16bit_weights_on_model_save is false. Set it "
                "to true, or use save_checkpoint and its zero_to_fp32.py"
            )
            return False

        def work() -> None:
            if path.suffix == export.SAFETENSORS:
                export.save_safetensors(self.engine, path, exclude_frozen_parameters, keep=self.rank == 0)
                return
            state = self.consolidated_16bit_state_dict(exclude_frozen_parameters)
            if state is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                durable.write_torch(path, TorchFile(state))

        agree.together(f"saving {path}", work)
        return True

    def consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """The whole module's state dict in its own dtype, on the host: a dict on rank 0, None elsewhere.

        Buffers, frozen and tied tensors are in it (tied ones share memory); names hold no compile wrappers. Sharded
        parameters are gathered block by block, by all ranks; the others keep nothing.
        """
        return export.whole_state_dict(self.engine, exclude_frozen_parameters, keep=self.rank == 0)

    def _say(self, message: str) -> None:
        if self.rank == 0:
            logger.warning(message)


class LoadPlan:
    """Everything one load will do to this rank's engine."""

    def __init__(self, engine: Any, saved: reader.SavedTag, module: restore.ModulePlan) -> None:
        self.engine, self.saved, self.module = engine, saved, module
        self.optimizer_plan: restore.OptimizerPlan | None = None
        self.engine_plan: engine_state.EnginePlan | None = None
        self.client_state: dict[str, Any] = {}
        self.extra_notes: list[str] = []

    def apply(self) -> None:
        """Copy. Local to this rank."""
        engine, optimizer = self.engine, self.engine.zero_optimizer
        if optimizer is not None:
            engine.zero_grad()
        if engine.sharded_module is not None:
            engine.sharded_module.gatherer.release_all()  # what was gathered would be of the old weights
        self.module.apply(engine.module)
        if optimizer is not None:
            optimizer.refresh_fp32_params()
            if self.optimizer_plan is not None:
                self.optimizer_plan.apply(optimizer)
        if self.engine_plan is not None:
            self.engine_plan.apply(engine)
        engine.loaded_checkpoint_tag = self.saved.tag

    def finish(self) -> None:
        """What needs all ranks, and what comes last."""
        optimizer = self.engine.zero_optimizer
        if self.optimizer_plan is not None and self.optimizer_plan.publish:
            optimizer.publish_masters()
        if optimizer is not None:
            optimizer.states_loaded(with_states=self.optimizer_plan is not None and self.optimizer_plan.with_states)
        if optimizer is not None:
            for group in optimizer.groups:
                group.forget_edits()  # what loading wrote are no edits of the user's, whose weights win over masters
        if self.engine_plan is not None:
            self.engine_plan.apply_random()

    def notes(self) -> list[str]:
        """What was skipped or is new, one line each."""
        found = [*self.module.notes, *self.extra_notes]
        if self.optimizer_plan is not None:
            found += self.optimizer_plan.notes
        if self.engine_plan is not None:
            found += self.engine_plan.notes
        return found


def _unpicklable(content: dict[str, Any]) -> str:
    for key, value in content.items():
        try:
            TorchFile(value)
        except Exception:  # only the name of the culprit is wanted here
            return f"client_state[{key!r}]" if key not in keys.LIBRARY_KEYS else key
    return "the state"


def _plain_file_name(name: str) -> str:
    if os.path.basename(name) != name or name in ("", ".", ".."):
        raise ValueError(f"save_filename {name!r} must be a file name without folders")
    return name
