"""Calls of ArcticTraining and of ray's examples."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from tests.conformance.calls.table import Mpu, backward, calls, changed, model, refused, settings, start, train, weights

# ---- ArcticTraining --------------------------------------------------------------------------------------------------


@calls(
    "ArcticTraining",
    "initialize(model=, optimizer=, args=config, lr_scheduler=, config=, mpu=), (model=, config=)",
    "runtime.engine.autocast_if_enabled(engine)",
    "comm.init_distributed(dist_backend=, dist_init_required=True | auto_mpi_discovery=)",
    "engine.{global_steps,skipped_steps,zero_optimization_stage(),get_global_grad_norm()}",
    "engine.{is_gradient_accumulation_boundary(),wall_clock_breakdown(),get_wall_clock_timers}",
    "utils.logging.print_dist(msg, ranks=), utils.logger.setLevel",
    "utils.timer.SynchronizedWallClockTimer.Timer",
    "git_version_info.{version,installed_ops,accelerator_name,torch_info}",
    "a float train_batch_size",
)
def arctic_trains(folder: Path) -> None:
    from deepspeed import git_version_info
    from deepspeed.runtime.engine import autocast_if_enabled
    from deepspeed.utils.logging import print_dist
    from deepspeed.utils.timer import SynchronizedWallClockTimer

    deepspeed.comm.init_distributed(dist_backend="gloo", dist_init_required=True)
    deepspeed.comm.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    config = settings(1, optimizer=None, train_batch_size=4.0)
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=optimizer,
        args=Namespace(anything=1),
        lr_scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer),
        config=config,
        mpu=Mpu(),
    )
    with autocast_if_enabled(engine):
        loss = engine(torch.ones(2, 4)).sum()
    engine.backward(loss)
    assert engine.is_gradient_accumulation_boundary() is True
    engine.step()
    assert (engine.global_steps, engine.skipped_steps, engine.zero_optimization_stage()) == (1, 0, 1)
    assert (float(engine.get_global_grad_norm()) > 0, engine.wall_clock_breakdown()) == (True, False)
    assert callable(engine.get_wall_clock_timers)
    engine.global_steps = 12
    engine.destroy()
    print_dist("from rank 0", ranks=[0])
    timer = SynchronizedWallClockTimer.Timer("mine")
    timer.start()
    timer.stop()
    assert timer.elapsed() >= 0
    assert git_version_info.installed_ops.get("no_such_op", False) is False
    assert isinstance(git_version_info.torch_info, dict)
    assert git_version_info.accelerator_name


@calls(
    "ArcticTraining",
    "DeepSpeedEngine.module_state_dict(engine, exclude_frozen_parameters=), unbound",
    "runtime.checkpoint_engine.TorchCheckpointEngine(), engine.checkpoint_engine.preserves_storage_sharing()",
    "checkpoint.utils.clone_tensors_for_torch_save",
    "zero.GatheredParameters([p] or [], enabled=True)",
    "param.{ds_id,ds_status,ds_numel,ds_tensor,ds_active_sub_modules}, ZeroParamStatus.{NOT_AVAILABLE,INFLIGHT}",
)
def arctic_saves(folder: Path) -> None:
    from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

    for stage in (0, 2, 3):
        net = model()
        net[0].bias.requires_grad_(False)
        engine = deepspeed.initialize(model=net, config=settings(stage))[0]
        train(engine)
        unbound = deepspeed.DeepSpeedEngine.module_state_dict
        with deepspeed.zero.GatheredParameters(list(net.parameters()), enabled=stage == 3):
            state = clone_tensors_for_torch_save(unbound(engine, exclude_frozen_parameters=True))
            assert sorted(state) == ["0.weight", "2.bias", "2.weight"]
            assert state["0.weight"].shape == (8, 4)
            assert len(unbound(engine, exclude_frozen_parameters=False)) == 4
        shares = TorchCheckpointEngine().preserves_storage_sharing()
        assert engine.checkpoint_engine.preserves_storage_sharing() is shares
        assert isinstance(shares, bool)
        if stage == 3:
            param = net[0].weight
            assert param.ds_status in (ZeroParamStatus.NOT_AVAILABLE, ZeroParamStatus.INFLIGHT)
            mine = torch.tensor(param.ds_tensor.numel())
            dist.all_reduce(mine)
            assert (mine.item(), len(param.ds_active_sub_modules)) == (param.ds_numel, 0)
            for given in ([param], []):
                with deepspeed.zero.GatheredParameters(given, enabled=True):
                    assert param.shape == (8, 4)
        engine.destroy()


@calls(
    "ArcticTraining",
    "param._hp_mapping.get_lp_grad_fragment(param._index_in_param_group)",
    "utils.safe_get_{full,local}_{fp32_param,grad,optimizer_state}",
)
def arctic_looks_at_gradients(folder: Path) -> None:
    from deepspeed import utils

    for stage in (1, 2):
        engine = start(stage)
        backward(engine)
        found = {}
        for name, param in engine.module.named_parameters():
            whole = utils.safe_get_full_grad(param)
            mine = torch.zeros(param.numel())
            if param._hp_mapping is not None:
                held = param._hp_mapping.get_lp_grad_fragment(param._index_in_param_group)
                assert torch.equal(held.view(-1), utils.safe_get_local_grad(param))
                assert held.shape == (param.shape if held.numel() == param.numel() else (held.numel(),))
                mine[: held.numel()] = held.view(-1)
            counts = [torch.zeros(1), torch.zeros(1)]
            dist.all_gather(counts, torch.tensor([float(0 if param._hp_mapping is None else held.numel())]))
            assert sum(count.item() for count in counts) == param.numel()
            dist.all_reduce(mine)
            assert torch.allclose(mine.sum(), whole.sum())
            found[name] = whole
        assert all(grad.abs().sum() > 0 for grad in found.values())
        engine.step()
        for param in engine.module.parameters():
            link = param._hp_mapping
            if link is not None:
                assert torch.equal(link.get_hp_fragment(), utils.safe_get_local_fp32_param(param))
                assert sorted(link.get_optim_state_keys()) == ["exp_avg", "exp_avg_sq"]
                moment = utils.safe_get_local_optimizer_state(param, "exp_avg")
                assert torch.equal(link.get_optim_state_fragment("exp_avg"), moment)
                assert link.get_hp_fragment_address().numel > 0
                with pytest.raises(ValueError, match="no_such_state"):
                    link.get_optim_state_fragment("no_such_state")
            assert utils.safe_get_full_fp32_param(param).shape == param.shape
            assert utils.safe_get_full_optimizer_state(param, "exp_avg").shape == param.shape
        param = engine.module[0].weight
        engine.destroy()
        assert not hasattr(param, "_hp_mapping")


@calls(
    "ArcticTraining",
    "groups._create_expert_data_and_model_parallel(ep, mpu=, use_data_before_expert_parallel_=)",
    "groups.{_get_expert_parallel_group(name),_get_expert_parallel_rank(name)}",
)
def arctic_experts(folder: Path) -> None:
    from deepspeed.utils import groups

    engine = start(1)
    groups._create_expert_data_and_model_parallel(2, mpu=Mpu(), use_data_before_expert_parallel_=False)
    assert deepspeed.comm.get_world_size(groups._get_expert_parallel_group("ep_size_2")) == 2
    assert groups._get_expert_parallel_rank("ep_size_2") == dist.get_rank()
    engine.destroy()


@calls(
    "ArcticTraining",
    "ulysses_sp.TiledMLP.apply(fn, mod, x, shards, params)",
    "ulysses_sp.TiledFusedLogitsLoss.apply(fn, mod, hidden, labels, mask, shards, params, reduction)",
)
def arctic_tiles(folder: Path) -> None:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, TiledMLP

    head = nn.Linear(4, 6)
    hidden, labels = torch.randn(1, 8, 4, requires_grad=True), torch.randint(0, 6, (1, 8))
    mask = torch.ones(1, 8, dtype=torch.bool)

    def loss(module: nn.Module, x: torch.Tensor, y: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(module(x), y, reduction="none")[keep].sum()

    tiled = TiledFusedLogitsLoss.apply(loss, head, hidden, labels, mask, 2, list(head.parameters()), "sum")
    assert torch.allclose(tiled, loss(head, hidden[0], labels[0], mask[0]))
    assert torch.allclose(TiledMLP.apply(lambda m, x: m(x), head, hidden, 2, list(head.parameters())), head(hidden))


refused(
    "ArcticTraining",
    {
        "deepspeed.runtime.engine.MoE": "mixture of experts",
        "engine._save_moe_checkpoint('x', 'y')": "mixture of experts",
        "engine.load_moe_state_dict": "mixture of experts",
        "engine.print_forward_breakdown": "mixture of experts",
        "deepspeed.runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF": "sequence parallelism",
        "deepspeed.runtime.sequence_parallel.ulysses_sp.UlyssesSPDataLoaderAdapter": "sequence parallelism",
    },
)

# ---- ray -------------------------------------------------------------------------------------------------------------


@calls(
    "ray",
    "initialize(model=, model_parameters=, config=) with gradient_clipping: true",
    "get_accelerator().device_name(engine.local_rank), engine.global_rank",
    "optimizer.step(), lr_scheduler.step(), optimizer.zero_grad() driven by the client",
)
def ray(folder: Path) -> None:
    net = model()
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_min_lr": 0.05, "warmup_max_lr": 0.1}}
    config = settings(2, gradient_clipping=True, scheduler=schedule)
    engine, optimizer, _, schedule = deepspeed.initialize(
        model=net, model_parameters=net.parameters(), config=config
    )
    assert torch.device(deepspeed.get_accelerator().device_name(engine.local_rank)).type == "cpu"
    assert engine.global_rank == dist.get_rank()
    before = weights(engine)
    for _ in range(2):
        backward(engine)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert changed(before, weights(engine))
    assert engine.optimizer.norm is not None
    engine.destroy()
