"""``deepspeed.initialize``: looks at the arguments, then hands over to ``runtime/build.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT
from deepspeed.runtime.build import build_engine
from deepspeed.runtime.zero.init_patch import parked as outside_init_contexts
from deepspeed.utils.logging import logger

if TYPE_CHECKING:
    from deepspeed.runtime.dataloader import DeepSpeedDataLoader
    from deepspeed.runtime.engine import DeepSpeedEngine

Result = tuple["DeepSpeedEngine", Any, "DeepSpeedDataLoader | None", Any]


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    model_parameters: Any = None,
    training_data: torch.utils.data.Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Any = None,
    mesh_param: tuple[int, int] | None = None,
    config_params: Any = None,
) -> Result:
    """Make the engine that trains ``model``.

    Args:
        args: parsed command line; ``args.deepspeed_config`` is the config when ``config`` is not given.
        model: any ``torch.nn.Module``. Its parameters may become views of flat buffers; the object stays the same.
        optimizer: a torch optimizer over the model's parameters, or a callable that makes one from parameter groups.
            It wins over the config's ``optimizer`` block.
        model_parameters: parameters or group dicts for the config's optimizer; default: all trainable ones.
        training_data: a dataset; the third result is then a loader over this rank's share.
        lr_scheduler: a scheduler, or a callable that makes one from the optimizer.
        distributed_port: rendezvous port when this call has to create the process group.
        mpu: a Megatron-style model-parallel unit.
        dist_init_required: False: never create the process group; None or True: create it if there is none.
        collate_fn: for the loader.
        config: dict, path of a JSON/HJSON file, or base64 text; ``config_params`` is its old name.
        mesh_param: ``(data-parallel, sequence-parallel)`` sizes.

    Returns:
        ``(engine, optimizer, loader, scheduler)``; the last three are None when there is none.

    Raises:
        DeepSpeedConfigError: everything wrong with the config, in one text.
        ValueError, TypeError: an argument that cannot be used, named.
    """
    if model is None:
        raise ValueError("deepspeed.initialize: model is required")
    if not isinstance(model, nn.Module):
        raise TypeError(f"deepspeed.initialize: model must be a torch.nn.Module; found {type(model).__name__}")
    with outside_init_contexts():  # what is built below is no part of a model under zero.Init
        engine = build_engine(
            args=args,
            model=model,
            optimizer=optimizer,
            model_parameters=model_parameters,
            training_data=training_data,
            lr_scheduler=lr_scheduler,
            distributed_port=distributed_port,
            mpu=mpu,
            dist_init_required=dist_init_required,
            collate_fn=collate_fn,
            config=_one_config(args, config, config_params),
            mesh_param=mesh_param,
        )
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _one_config(args: Any, config: Any, config_params: Any) -> Any:
    """The config from the three places it may stand in. ValueError when two differ or there is none."""
    given = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
        "args.deepscale_config": getattr(args, "deepscale_config", None),
    }
    found = {name: value for name, value in given.items() if value is not None}
    if "args.deepscale_config" in found:
        logger.warning("args.deepscale_config is deprecated: use args.deepspeed_config")
    if not found:
        raise ValueError(
            "deepspeed.initialize: no config. Pass config=<dict or path>, or args with deepspeed_config (the "
            "--deepspeed_config option of deepspeed.add_config_arguments)"
        )
    if len(found) > 1 and len({repr(value) for value in found.values()}) > 1:
        raise ValueError(f"deepspeed.initialize: {' and '.join(found)} are both given and differ; pass one of them")
    return next(iter(found.values()))
