"""``Init``: models whose parameters are sharded while they are built; and the historical home of what goes with it.

The mechanics are those of ``init_patch.py`` (noticing what is built) and ``init_shard.py`` (sharding it). Clients
replace ``zero_wrapper_for_fp_tensor_constructor`` in this module, so ``Init`` looks it up here whenever it is entered.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import nn

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.rank_grid import refuse_uneven
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.swap_tensor.host_store import HostMemory, is_apart
from deepspeed.runtime.swap_tensor.mapped_files import MappedFiles
from deepspeed.runtime.zero import init_draws, init_patch
from deepspeed.runtime.zero.gathered_parameters import (
    GatheredParameters,
    register_external_parameter,
    unregister_external_parameter,
)
from deepspeed.runtime.zero.historical_params import ZeroParamStatus, ZeroParamType
from deepspeed.runtime.zero.init_patch import all_subclasses
from deepspeed.runtime.zero.init_send import Ranks
from deepspeed.runtime.zero.init_shard import InitGatherer, shard_module_parameters
from deepspeed.runtime.zero.sharded_parameter import block_of
from deepspeed.utils.argument_checks import flag
from deepspeed.utils.logging import log_dist

__all__ = [
    "DEFAULT_TENSOR_OVERRIDES", "DeepSpeedTensorOverride", "GatheredParameters", "Init",
    "InsertPostInitMethodToModuleSubClasses", "ZeroParamStatus", "ZeroParamType", "get_accelerator",
    "get_all_subclasses", "get_new_tensor_fn_for_dtype", "register_external_parameter", "restore_init_context",
    "shutdown_init_context", "unregister_external_parameter", "zero_wrapper_for_fp_tensor_constructor",
]  # fmt: skip

_orig_torch_arange = torch.arange
_orig_torch_empty = torch.empty
_orig_torch_eye = torch.eye
_orig_torch_full = torch.full
_orig_torch_ones = torch.ones
_orig_torch_rand = torch.rand
_orig_torch_randn = torch.randn
_orig_torch_tensor = torch.tensor
_orig_torch_zeros = torch.zeros

# What `Init` sends through the wrapper: what models make parameters and buffers with.
_CONSTRUCTORS: tuple[Callable[..., torch.Tensor], ...] = (
    _orig_torch_arange, _orig_torch_empty, _orig_torch_eye, _orig_torch_full, _orig_torch_ones, _orig_torch_rand,
    _orig_torch_randn, _orig_torch_tensor, _orig_torch_zeros,
)  # fmt: skip
# Those whose results models compute with while they are built (positions, rates, constants): only placed, never cast.
_EXACT = frozenset({_orig_torch_arange, _orig_torch_eye, _orig_torch_tensor})


class DeepSpeedTensorOverride(Enum):
    """What tensor constructors get from :class:`Init` where the call does not say."""

    dtype = 1
    device = 2


DEFAULT_TENSOR_OVERRIDES = [DeepSpeedTensorOverride.dtype, DeepSpeedTensorOverride.device]


def get_all_subclasses(cls: type, include_root: bool = True) -> set[type]:
    """Every class below ``cls``; with ``include_root`` itself too."""
    return all_subclasses(cls) | ({cls} if include_root else set())


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., torch.Tensor], target_fp_dtype: torch.dtype | None, target_device: torch.device | None = None
) -> Callable[..., torch.Tensor]:
    """Tensor constructor ``fn`` with this device and, for floating results, this dtype where the call names none.

    ``arange``, ``eye`` and ``tensor`` keep their dtype: models compute frequencies and constants with them.
    """
    allocates = fn in (_orig_torch_empty, _orig_torch_ones, _orig_torch_zeros)

    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is None and target_device is not None and torch.get_default_device().type == "cpu":
            kwargs["device"] = target_device
        if target_fp_dtype is None or kwargs.get("dtype") is not None or fn in _EXACT:
            return fn(*args, **kwargs)
        if allocates and kwargs.get("out") is None:
            return fn(*args, **{**kwargs, "dtype": target_fp_dtype})
        made = fn(*args, **kwargs)
        return made.to(target_fp_dtype) if made.is_floating_point() else made

    return wrapped


def get_new_tensor_fn_for_dtype(
    target_fp_dtype: torch.dtype | None, target_device: torch.device | None = None
) -> Callable[..., torch.Tensor]:
    """The same for ``torch.Tensor(...)``: ``new(cls, *args)``."""

    def new(cls: type[torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        made = cls(*args, **kwargs)
        return made.to(device=target_device, dtype=target_fp_dtype if made.is_floating_point() else None)

    return new


class InsertPostInitMethodToModuleSubClasses:
    """Context in which every module built by this thread is handed to :meth:`module_built` once its ``__init__`` is
    through, and tensor constructors have a device and a dtype of their own. Harmless when nested or entered again."""

    enabled: bool
    dtype: torch.dtype | None = None
    device: torch.device | None = None

    def __init__(
        self, enabled: bool = True, mem_efficient_linear: bool = True, ds_config: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.enabled = flag(enabled, "zero.Init(enabled)")
        self.mem_efficient_linear = mem_efficient_linear
        self.dtype = dtype
        self._modes: list[init_patch.ConstructorMode] = []

    def module_built(self, module: nn.Module) -> None:
        """``module`` and all below it have been constructed."""

    def left(self, *, completed: bool) -> None:
        """The context has been left. ``completed`` is False while an exception passes."""

    def patch_init_and_builtins(self) -> None:
        """What ``__enter__`` does."""
        device = self.device if self.device is not None and self.device.type != "cpu" else None
        wrap = globals()["zero_wrapper_for_fp_tensor_constructor"]  # clients replace it
        replacements = {fn: wrap(fn, self.dtype, target_device=device) for fn in _CONSTRUCTORS}
        replacements |= {fn: init_draws.drawn(fn) for fn in init_draws.DRAWING}
        mode = init_patch.ConstructorMode(replacements)
        init_patch.open_context(self)
        self._modes.append(mode)
        mode.__enter__()

    def unpatch_init_and_builtins(self, *, completed: bool = True) -> None:
        """What ``__exit__`` does."""
        if not self._modes:
            return
        mode = self._modes.pop()
        try:
            mode.__exit__(None, None, None)
        finally:
            try:
                init_patch.close_context(self, completed=completed)
            finally:
                self.left(completed=completed)

    def __enter__(self) -> Any:
        if self.enabled:
            self.patch_init_and_builtins()
        return self

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        if self.enabled:
            self.unpatch_init_and_builtins(completed=exc_type is None)


class Init(InsertPostInitMethodToModuleSubClasses):
    """Modules built inside the context keep only this rank's shard of their parameters, so a model need not fit.

        with deepspeed.zero.Init(config_dict_or_path=config):
            model = Model()
        engine, *_ = deepspeed.initialize(model=model, config=config)

    As soon as a module's ``__init__`` returns, its own parameters take the values of the first rank and are sharded.
    Until ``initialize`` takes over, torch functions gather them where every rank is sure to do the same: inside the
    context, in grad mode, in backward, in :class:`GatheredParameters`; elsewhere they raise and name that cure. Writes
    of whole values (``load_state_dict``, ``copy_``, ``fill_``) need no gather. ``nn.Module.apply`` inside the context
    sees whole parameters, and what it changes stays.

    One rank shards nothing and only adds the ``ds_*`` attributes, unless shards live outside the device. Contexts may
    be nested, left by exceptions and opened in several threads; a module belongs to the context of the thread that
    builds it.

    Args:
        module: a built module, whose parameters are sharded at once; the context may be left unused then.
        data_parallel_group, sequence_data_parallel_group, mpu: who shares the parameters; default: all ranks.
        mem_efficient_linear: accepted and without effect: no layer keeps gathered weights for backward here.
        remote_device: "cpu" or "nvme" put shards outside the device, the latter into ``offload_param.nvme_path`` of
            the config. Default: as ``offload_param`` of the config says. "none": on the device.
        pin_memory: of shards in host memory.
        config_dict_or_path, config: the config of ``initialize``; says the dtype, and whether the stage is 3 at all.
            Values that a wrapper fills in later may be "auto".
        enabled: False does nothing at all.
        dtype: of floating parameters; default: the config's, without a config what the model asks for.
        zero_param_parallel_group, zero_quantized_weights, zero_quantized_nontrainable_weights: accepted and without
            effect: gathers are exact until ``initialize`` takes over, whose config says how they travel then.
        tensor_overrides: what tensor constructors get where the call does not say.

    Raises:
        DeepSpeedConfigError: everything wrong with the config.
        NotImplementedError: an argument asks for something that is not built yet, by name.
    """

    param_id = 0
    param_persistence_threshold = 100_000
    model_persistence_threshold = sys.maxsize
    num_persisted_parameters = 0
    num_persisted_elements = 0
    apply_param_persistence = False
    override_module_apply = True

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Sequence[DeepSpeedTensorOverride] = tuple(DEFAULT_TENSOR_OVERRIDES),
    ) -> None:
        super().__init__(enabled=enabled, mem_efficient_linear=mem_efficient_linear)
        if not self.enabled:
            return
        check_module(module)
        _check_dtype(dtype)
        pin_memory = flag(pin_memory, "zero.Init(pin_memory)")
        source = config_dict_or_path if config_dict_or_path is not None else config
        self.config = DeepSpeedConfig.parse(source, partial=True) if source is not None else None
        if self.config is not None and int(self.config.zero_config.stage) < 3:
            stage = int(self.config.zero_config.stage)
            log_dist(f"zero.Init: zero_optimization.stage is {stage}, so parameters are not sharded", ranks=[0])
            self.enabled = False
            return
        self.device = _local_device()
        _refuse_missing({"param_swapper": param_swapper})
        overrides = list(tensor_overrides)
        self._places_tensors = DeepSpeedTensorOverride.device in overrides
        self._param_dtype = dtype if dtype is not None else _config_dtype(self.config)
        self.dtype = self._param_dtype if DeepSpeedTensorOverride.dtype in overrides else None
        if not dist.is_initialized():
            dist.init_distributed()
        self._group = _sharing_group(data_parallel_group, sequence_data_parallel_group, mpu)
        self._ranks = Ranks(self._group, dist.get_rank(self._group), dist.get_world_size(self._group))
        _check_shard_sizes(self.config, self._ranks.world)
        self._gatherer = InitGatherer(_home(remote_device, pin_memory, self.config, self.device))
        if module is not None:
            for part in module.modules():
                self.module_built(part)
            self._gatherer.finish_sends()

    def module_built(self, module: nn.Module) -> None:
        """Shard the parameters of ``module``, and settle what its constructor did to those of inner modules."""
        device = self.device or torch.device("cpu")
        with torch._C.DisableTorchFunction():  # a mode that sees every operation of ours doubles what they cost
            self._gatherer.settle()
            shard_module_parameters(module, self._gatherer, self._ranks, dtype=self._param_dtype, device=device)

    def left(self, *, completed: bool) -> None:
        """Nothing stays gathered or under way."""
        if completed:
            self._gatherer.finish_sends()
        else:
            self._gatherer.drop_sends()
        self._gatherer.settle(drop_edits=not completed)

    @property
    def num_partitions(self) -> int:
        """Ranks over which a parameter is sharded."""
        return self._ranks.world

    def get_partition_rank(self) -> int:
        """This rank's place among them."""
        return self._ranks.rank

    def get_dp_process_group(self) -> Any:
        """The process group of these ranks."""
        return self._group

    def get_partition_dp_group(self, param: nn.Parameter) -> Any:
        """The process group over which ``param`` is sharded."""
        block = block_of(param)
        return block.process_group if block is not None else self._group


def check_module(module: Any) -> None:
    """Raise TypeError for a first argument that is no module."""
    if module is not None and not isinstance(module, nn.Module):
        raise TypeError(
            f"zero.Init(module): expected a torch.nn.Module, found {type(module).__name__}; a config is passed as "
            "config_dict_or_path=..."
        )


def _check_dtype(dtype: Any) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"zero.Init(dtype): expected a floating torch dtype such as torch.bfloat16, found {dtype!r}")


def _check_shard_sizes(config: DeepSpeedConfig | None, ranks: int) -> None:
    """What `initialize` would refuse, before the model is built: it shards over these ranks, or over a part of them."""
    zero = config.zero_config if config is not None else None
    for key in ("mics_shard_size", "zero_hpz_partition_size"):
        size = getattr(zero, key, None)
        if isinstance(size, int) and size > 1:
            refuse_uneven(f"zero_optimization.{key}", size, ranks, "that build the model")


def _home(
    remote: str | None, pin_memory: bool, config: DeepSpeedConfig | None, device: torch.device
) -> HostMemory | None:
    """Where shards live while no engine holds them; None: on the device. Raises ValueError for an unusable device."""
    section = config.zero_config.offload_param if config is not None else None
    if remote is None:
        remote = section.device if section is not None else "none"
    remote = getattr(remote, "value", remote)
    if remote == "nvme":
        if section is None or section.nvme_path is None:
            raise ValueError(
                'zero.Init(remote_device="nvme") needs a config with zero_optimization.offload_param.nvme_path'
            )
        return MappedFiles(section.nvme_path, rank=dist.get_rank() if dist.is_initialized() else 0)
    if remote not in ("none", "cpu", device.type):
        raise ValueError(f'zero.Init(remote_device={remote!r}): expected "cpu", "nvme" or "none"')
    if remote != "cpu" or not is_apart(device):
        return None
    return HostMemory(pin=pin_memory or (section is not None and section.pin_memory))


def _refuse_missing(asked: dict[str, Any]) -> None:
    for name, value in asked.items():
        if value:
            raise NotImplementedError(
                f"zero.Init({name}={value!r}) is not built yet; leave {name} out (parameters stay on the device, "
                "sharded over all data-parallel ranks, in their own dtype)"
            )


def _config_dtype(config: DeepSpeedConfig | None) -> torch.dtype | None:
    if config is None:
        return None
    if config.float16_config.enabled:
        return torch.float16
    return torch.bfloat16 if config.bfloat16_config.enabled else torch.float32


def _sharing_group(data: Any, sequence_data: Any, mpu: Any) -> Any:
    """The ranks that hold the same parameters, from what the caller says of them; None: all ranks."""
    if sequence_data is not None or data is not None:
        return sequence_data if sequence_data is not None else data
    for name in ("get_sequence_data_parallel_group", "get_data_parallel_group"):
        if mpu is not None and hasattr(mpu, name):
            return getattr(mpu, name)()
    return dist.get_world_group() if dist.is_initialized() else None


def _local_device() -> torch.device:
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    accelerator.set_device(local)
    return torch.device(accelerator.device_name(local))


def shutdown_init_context() -> None:
    """Until :func:`restore_init_context`, this thread builds modules as if no :class:`Init` were open."""
    init_patch.park()


def restore_init_context() -> None:
    """Undo :func:`shutdown_init_context`."""
    init_patch.unpark()
