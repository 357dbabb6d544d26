"""``DeepSpeedEngine``: the model as the user trains it. A coordinator that owns no algorithm.

    engine(x) -> engine.backward(loss) -> engine.step()

forwards to collaborators: ``precision`` (casts, autocast), ``accumulation`` (micro-steps, boundary), ``optimizer``
(reduction, update), ``lr_scheduler``, ``callbacks`` (everything that watches), ``checkpoint`` (save, load). It does
not know which ZeRO stage or feature is on; ``runtime/build.py`` chose the collaborators.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from deepspeed.runtime.accumulation import GradAccumulation
from deepspeed.runtime.callbacks import CallbackList
from deepspeed.runtime.client_steps import ClientSteps
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine_accessors import EngineAccessors
from deepspeed.runtime.engine_history import EngineHistory
from deepspeed.runtime.optimizer_protocol import EngineOptimizer
from deepspeed.runtime.precision import PrecisionPolicy, cast_floating
from deepspeed.runtime.scheduler_step import refuse_step_without
from deepspeed.runtime.summary import describe
from deepspeed.runtime.torch_autocast import autocast_if_enabled as autocast_if_enabled
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from deepspeed.unbuilt import attribute_or_submodule, refusal_of_member
from deepspeed.utils.logging import log_dist

__path__: list[str] = []  # `from ...engine import MoE` is then a question to `deepspeed.unbuilt`, as in a package

COMPILE_PREFIX = "_orig_mod."  # what torch.compile puts into the names of the modules it wraps


def __getattr__(name: str) -> Any:
    return attribute_or_submodule(__name__, name)


@dataclass
class EngineParts:
    """What ``runtime/build.py`` hands to an engine."""

    module: nn.Module
    config: DeepSpeedConfig
    mesh: Any
    precision: PrecisionPolicy
    accumulation: GradAccumulation
    device: torch.device
    param_names: dict[int, str]
    sharded_module: Any = None  # who gathers the parameters at stage 3
    parameter_offload: Any = None  # the hooks of stage 3 under their historical name
    optimizer: Any = None
    basic_optimizer: torch.optim.Optimizer | None = None
    lr_scheduler: Any = None
    client_lr_scheduler: Any = None
    training_dataloader: Any = None
    collate_fn: Any = None
    args: Any = None
    mpu: Any = None
    callbacks: CallbackList = field(default_factory=CallbackList)
    make_checkpoint_manager: Any = None
    make_dataloader: Any = None
    cast_report: dict[str, list[str]] = field(default_factory=dict)


class DeepSpeedEngine(EngineHistory, EngineAccessors, nn.Module):
    """Wraps ``module``; unknown attributes fall through to it. Built by ``deepspeed.initialize``."""

    def __init__(self, parts: EngineParts) -> None:
        super().__init__()
        self.module = parts.module
        self._config = parts.config
        self.mesh = parts.mesh
        self.precision = parts.precision
        self.accumulation = parts.accumulation
        self.device = parts.device
        self.sharded_module: Any = parts.sharded_module
        self.zero_optimizer: Any = parts.optimizer
        self.parameter_offload: Any = parts.parameter_offload
        self.basic_optimizer = parts.basic_optimizer
        self.lr_scheduler = parts.lr_scheduler
        self.client_lr_scheduler = parts.client_lr_scheduler
        self.training_dataloader = parts.training_dataloader
        self.collate_fn = parts.collate_fn
        self.args, self.mpu = parts.args, parts.mpu
        self.callbacks = parts.callbacks
        self.param_names = parts.param_names
        self.cast_report = parts.cast_report
        self.global_steps = 0
        self.global_samples = 0
        self.skipped_steps = 0
        self.loaded_checkpoint_tag: str | None = None
        self._make_dataloader = parts.make_dataloader
        self._step_applied = False
        self._window_mode: str | None = None  # "managed" or "raw": who scaled the losses of this window
        self._user_scaled = False  # engine.scale was used since the last step
        self._told_no_sync = False
        self._destroyed = False
        self.checkpoint: Any = parts.make_checkpoint_manager(self) if parts.make_checkpoint_manager else None
        if self.zero_optimizer is not None:
            self.zero_optimizer.should_reduce = self._should_reduce
            self.zero_optimizer.at_boundary = self.accumulation.is_boundary
            self.zero_optimizer.on_raw_begin = self._on_raw_begin
            self.zero_optimizer.client_steps = self._client_steps = ClientSteps(self)
        self._follow_accumulation()

    def _follow_accumulation(self) -> None:
        self._watch_outputs = self.zero_optimizer is not None and (
            self.mesh.size("zero") > 1 or self.accumulation.loss_divisor > 1 or self.zero_optimizer.needs_scaler()
        )

    # ---- forward ---------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module (autocast, input cast and callbacks as configured). Same outputs as the module's."""
        if self.callbacks:
            self.callbacks.fire("on_forward_begin", self)
        if self._window_mode is None and self.zero_optimizer is not None and self.module.training:
            self._adopt_unfrozen()
        if self.precision.cast_inputs:
            inputs, kwargs = cast_floating((inputs, kwargs), self.precision.model)
        if self.precision.autocast is None:
            outputs = self.module(*inputs, **kwargs)
        else:
            with self.precision.forward_context(self.device.type):
                outputs = self.module(*inputs, **kwargs)
        if self._watch_outputs and torch.is_grad_enabled() and self.module.training:
            self.zero_optimizer.watch.watch_outputs(outputs)
        if self.callbacks:
            self.callbacks.fire("on_forward_end", self)
        return outputs

    # ---- backward --------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Backward of a scalar ``loss``, divided by the accumulation steps (unless ``scale_wrt_gas`` is False).

        Reduces gradients when this micro-step ends its window (every time where gradients are sharded). Returns the
        divided loss. Raises RuntimeError without an optimizer, TypeError for a loss that is not a tensor with a graph,
        ValueError for one of several elements.
        """
        optimizer = self._need_optimizer("backward")
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            raise TypeError(
                "engine.backward(loss): loss must be a tensor that requires grad; found "
                f"{type(loss).__name__}{'' if not isinstance(loss, torch.Tensor) else ' without a graph'}. Was forward "
                "run under torch.no_grad(), or was the loss detached?"
            )
        if loss.numel() != 1:
            raise ValueError(
                f"engine.backward(loss): found a loss of shape {tuple(loss.shape)}; expected one element: reduce it, "
                "as in loss.mean()"
            )
        if self.callbacks:
            self.callbacks.fire("on_backward_begin", self)
        divisor = self.accumulation.loss_divisor if scale_wrt_gas else 1
        if self._window_mode == "raw":
            divisor = 1  # the whole window is divided at its boundary
        else:
            self._window_mode = "managed"
        self.accumulation.begin_pass()
        self._client_steps.expect_steps()
        if divisor != 1:
            loss = loss / divisor
        optimizer.backward(loss, retain_graph=retain_graph)
        if self.callbacks:
            self.callbacks.fire("on_backward_end", self, loss)
        return loss

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss`` times the loss scale, for your own ``.backward()``. Raises ValueError unless it is a scalar."""
        optimizer = self._need_optimizer("scale")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(f"engine.scale(loss) takes a scalar tensor; found {shape}")
        self._user_scaled = True
        return optimizer.scale_if_loss(loss)

    def _on_raw_begin(self) -> None:
        """The user's own ``loss.backward()`` starts."""
        optimizer = self.zero_optimizer
        if optimizer.needs_scaler() and not self._user_scaled:
            raise RuntimeError(
                f"loss.backward() in fp16 needs the loss scale ({optimizer.loss_scale:g}): call "
                "engine.scale(loss).backward(), or engine.backward(loss)"
            )
        if self._window_mode == "managed" and self.accumulation.loss_divisor > 1:
            optimizer.rescale_grads(float(self.accumulation.loss_divisor))
        optimizer.grad_multiplier = 1.0 / self.accumulation.loss_divisor
        self._window_mode = "raw"
        self.accumulation.begin_pass()
        self._client_steps.expect_steps()

    def _should_reduce(self) -> bool:
        if self.accumulation.in_no_sync:
            return False
        if self.zero_optimizer.placement.reduces_every_backward:
            return True
        return self.accumulation.managed and self.accumulation.is_boundary()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside keep gradients local; the next one outside (or ``step``) reduces the sum.

        Works with every stage; sharded gradients are then held whole until they are reduced (told once).
        """
        optimizer = self.zero_optimizer
        if optimizer is not None and optimizer.placement.reduces_every_backward and not self._told_no_sync:
            self._told_no_sync = True
            log_dist("engine.no_sync(): full gradients are held on every rank until the next reduction", [0])
        with self.accumulation.no_sync():
            yield

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Several backward calls inside, one gradient reduction at the exit."""
        with self.accumulation.no_sync():
            yield
        if self.zero_optimizer is not None and self._should_reduce():
            self.zero_optimizer.reduce_now()

    # ---- step ------------------------------------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """True when the current micro-step ends its window (or the value set by hand)."""
        return self.accumulation.is_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide by hand whether the current micro-step ends the window; stays until it is set again.

        Raises RuntimeError under ``managed_gradient_accumulation: false``, where every ``step()`` is a boundary.
        """
        if not self.accumulation.managed:
            raise RuntimeError(
                "set_gradient_accumulation_boundary has no meaning with managed_gradient_accumulation=false: "
                "every engine.step() is a boundary"
            )
        self.accumulation.force(bool(is_boundary))

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """At a boundary: optimizer step, then scheduler step. Elsewhere only the micro-step counter moves.

        Raises RuntimeError at a boundary inside :meth:`no_sync`: its gradients have not been reduced.
        """
        optimizer = self._need_optimizer("step")
        if self.accumulation.in_no_sync and self.accumulation.is_boundary():
            raise RuntimeError("engine.step() inside engine.no_sync() at a boundary: leave the context first")
        if self._client_steps.already_stepped():
            return
        self._step_applied = False
        if self.accumulation.is_boundary():
            if self.callbacks:
                self.callbacks.fire("on_step_begin", self)
            self._boundary_step(optimizer, lr_kwargs or {})
            if self.callbacks:
                self.callbacks.fire("on_step_end", self, self._step_applied)
        self.accumulation.finish_micro_step()

    def _boundary_step(self, optimizer: EngineOptimizer, lr_kwargs: dict[str, Any]) -> None:
        if self.lr_scheduler is not None:
            refuse_step_without(self.lr_scheduler, lr_kwargs)
        divisor = self.accumulation.loss_divisor
        if divisor > 1 and self._window_mode != "managed":
            optimizer.grad_multiplier = 1.0 / divisor
        with self._client_steps.by_engine():
            (optimizer if self._assigned is None else self.optimizer).step()
        self.count_update()
        if self._step_applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)

    def count_update(self) -> None:
        """After the optimizer's step at the end of a window: counters move, and the next window may begin."""
        self._window_mode, self._user_scaled = None, False
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        self._step_applied = not self.zero_optimizer.overflow
        self.skipped_steps += not self._step_applied

    def _adopt_unfrozen(self) -> None:
        names = self.zero_optimizer.adopt_unfrozen()
        if names:
            shown = ", ".join(names[:8]) + (" ..." if len(names) > 8 else "")
            log_dist(f"{len(names)} unfrozen parameters joined the optimizer with fresh state: {shown}", [0])

    def was_step_applied(self) -> bool:
        """True when the last ``step()`` really changed the weights."""
        return self._step_applied

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the window, those already reduced included. The micro-step counter does not move."""
        if self.zero_optimizer is not None:
            self.zero_optimizer.clear_window()
            self._window_mode, self.accumulation.passes = None, 0
        for param in self.module.parameters():
            param.grad = None

    def _need_optimizer(self, call: str) -> Any:
        if self.zero_optimizer is None or self._assigned == (None,):
            given = "no optimizer was given" if self._assigned is None else "engine.optimizer has been set to None"
            why = "the engine has been destroyed" if self._destroyed else given
            raise RuntimeError(
                f"engine.{call}: {why}. Pass optimizer= to deepspeed.initialize or configure an `optimizer`"
            )
        return self.zero_optimizer

    def _need_checkpoints(self, call: str) -> Any:
        if self.checkpoint is None:
            raise RuntimeError(
                f"engine.{call}: the engine has been destroyed; call it before. The weights are in engine.module"
            )
        return self.checkpoint

    # ---- module behaviour ------------------------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a DeepSpeedEngine holds process groups and cannot be copied, pickled or passed to torch.save. Save it "
            "with engine.save_checkpoint; copy the model as copy.deepcopy(engine.module) (at stage 3 inside "
            "deepspeed.zero.GatheredParameters(engine.module.parameters()))"
        )

    def __getattr__(self, name: str) -> Any:
        # Contract with clients: engine.<attribute of the model> works. Only the module is asked.
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is not None and hasattr(module, name):
                return getattr(module, name)
            unbuilt = refusal_of_member(name)
            if unbuilt is None:
                raise
            raise AttributeError(unbuilt) from None

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        self.training = mode
        self.module.train(mode)
        return self

    def eval(self) -> DeepSpeedEngine:
        return self.train(False)

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The module's state dict under names without compile wrappers.

        ``exclude_frozen_parameters`` leaves out parameters that do not require grad.
        """
        state = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, param in self.module.named_parameters(remove_duplicate=False):
                if not param.requires_grad:
                    state.pop(prefix + name, None)
        for name in [name for name in state if COMPILE_PREFIX in name]:
            state[name.replace(COMPILE_PREFIX, "")] = state.pop(name)
        return state

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str,
        tag: Any = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save model, optimizer, schedule, counters and ``client_state`` under ``save_dir/tag``. Collective."""
        checkpoints = self._need_checkpoints("save_checkpoint")
        self._absorb_edits()
        return checkpoints.save(save_dir, tag, client_state or {}, save_latest, exclude_frozen_parameters)

    def _absorb_edits(self) -> None:
        """Masters and shards take the weights that the user has written in place."""
        if self.zero_optimizer is not None:
            self.zero_optimizer.absorb_edits()
        if self.sharded_module is not None:
            self.sharded_module.gatherer.absorb_edits()

    def load_checkpoint(
        self,
        load_dir: str,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load what :meth:`save_checkpoint` wrote; returns ``(path, client_state)``. Collective."""
        if self.zero_optimizer is not None and self._window_mode is None:
            self.zero_optimizer.absorb_edits()
            self._adopt_unfrozen()  # so that state saved for a parameter unfrozen meanwhile finds its place
        return self._need_checkpoints("load_checkpoint").load(
            load_dir,
            tag,
            strict=load_module_strict,
            optimizer_states=load_optimizer_states,
            scheduler_states=load_lr_scheduler_states,
            module_only=load_module_only,
            custom_load_fn=custom_load_fn,
        )

    def load_module_state_dict(
        self,
        checkpoint: dict[str, Any],
        strict: bool = True,
        custom_load_fn: Any = None,
        fetch_z3_params: bool = False,
        z3_params_to_fetch: Any = None,
        allowed_missing_keys: Any = None,
    ) -> None:
        """Load ``checkpoint["module"]`` into the module, compiled or not on either side; masters follow.

        Every rank passes whole values, the same ones, and sharded parameters take their own elements of them. With
        ``fetch_z3_params`` these (or ``z3_params_to_fetch``) are gathered meanwhile and rank 0's values count.
        """
        fetched = list(z3_params_to_fetch or self.module.parameters()) if fetch_z3_params else []
        with GatheredParameters(fetched, modifier_rank=0, enabled=fetch_z3_params):
            if custom_load_fn is not None:
                custom_load_fn(src=checkpoint["module"], dst=self.module)
            else:
                own = {name.replace(COMPILE_PREFIX, ""): name for name in self.module.state_dict()}
                renamed = {}
                for name, value in checkpoint["module"].items():
                    clean = name.replace(COMPILE_PREFIX, "")
                    renamed[own.get(clean, clean)] = value
                self.module.load_state_dict(renamed, strict=strict)
        if self.zero_optimizer is not None:
            self.zero_optimizer.refresh_fp32_params()

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the whole module's state dict in its own dtype to ``save_dir/save_filename``. Collective."""
        return self._need_checkpoints("save_16bit_model").save_16bit(save_dir, save_filename, exclude_frozen_parameters)

    def save_fp16_model(self, save_dir: str, save_filename: str = "pytorch_model.bin") -> bool:
        return self.save_16bit_model(save_dir, save_filename)

    @property
    def checkpoint_engine(self) -> Any:
        """The storage back end of checkpoints."""
        return self.checkpoint.storage

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """The whole module's state dict on the host: a dict on rank 0, None elsewhere. Collective. Used by clients."""
        state: dict[str, Any] | None = self.checkpoint.consolidated_16bit_state_dict(exclude_frozen_parameters)
        return state

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """The same under the name clients use with sharded parameters."""
        return self._consolidated_16bit_state_dict(exclude_frozen_parameters)

    # ---- data ------------------------------------------------------------------------------------------------------

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """A DeepSpeedDataLoader over ``dataset`` with this engine's micro-batch size and ranks."""
        return self._make_dataloader(
            dataset,
            batch_size=batch_size or self.train_micro_batch_size_per_gpu(),
            route=route,
            pin_memory=pin_memory,
            data_sampler=data_sampler,
            collate_fn=collate_fn or self.collate_fn,
            num_local_io_workers=num_local_io_workers,
        )

    def empty_partition_cache(self) -> None:
        """Release every gathered parameter that no graph needs; does nothing below stage 3."""
        if self.parameter_offload is not None:
            self.parameter_offload.empty_partition_cache()

    def offload_states(
        self,
        include: Container[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states to host memory until :meth:`reload_states`; see ``zero/offload_states.py``.

        Raises AssertionError without an optimizer, or where ``offload_param`` keeps weights off the device anyway.
        """
        optimizer = self.zero_optimizer
        if optimizer is None:
            raise AssertionError("offload_states: this engine has no optimizer, so there are no states to move")
        if optimizer.sharding is not None and optimizer.sharding.host is not None:
            raise AssertionError(
                "offload_states: zero_optimization.offload_param keeps the weights off the device already; use one of "
                "the two"
            )
        optimizer.offload_states(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move everything back that :meth:`offload_states` has moved."""
        if self.zero_optimizer is not None:
            self.zero_optimizer.reload_states(non_blocking)

    def summary(self) -> dict[str, Any]:
        """What this run is, as plain data: batch, stage, dtypes, parallel sizes, bytes per rank. See ``summary.py``."""
        return describe(self)

    def collect_python_gc(self) -> None:
        """Collect cyclic garbage now; does something only under ``disable_python_gc``, where nothing else does it."""
        if self._config.disable_python_gc:
            gc.collect()

    # ---- life ------------------------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Give back hooks, shards and buffers and leave ``engine.module`` a plain module. Safe to call twice."""
        if self._destroyed:
            return
        self._destroyed = True
        try:
            if self.checkpoint is not None:
                self.checkpoint.close()
        finally:  # a save in the background may have failed: that is raised, after everything has been given back
            self._give_back()

    def _give_back(self) -> None:
        self.callbacks.fire("on_destroy", self)
        if self.zero_optimizer is not None:
            self.zero_optimizer.destroy()
        if self.parameter_offload is not None:
            self.parameter_offload.destroy()
        if self.sharded_module is not None:
            self.sharded_module.destroy()
        self.mesh.retire()
        self.sharded_module = self.parameter_offload = None
        self.zero_optimizer = self.basic_optimizer = self.lr_scheduler = self.checkpoint = self._assigned = None
        self._watch_outputs = False
