"""One rank of ``step_time.py``: times the same model bare, under DDP and under the engine, interleaved.

Runs under any interpreter that has torch and some ``deepspeed``; prints one JSON line on rank 0: milliseconds per step
of every system, one entry per round, as wall time and as CPU time of this process.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

Step = Callable[[], None]


def llama() -> nn.Module:
    path = Path(__file__).resolve().parent.parent / "examples" / "quickstart" / "model.py"
    spec = importlib.util.spec_from_file_location("quickstart_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["quickstart_model"] = module
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    return module.ByteLlama(module.ModelConfig())


def tiny() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(25, 25) for _ in range(50)])


class Task:
    """A model, its input and its loss."""

    def __init__(self, name: str, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(1)
        self.dtype = torch.bfloat16 if name == "llama" else torch.float32
        self.build = llama if name == "llama" else tiny
        self.device = device
        if name == "llama":
            tokens = torch.randint(0, 256, (1, 9), generator=generator)  # short: the model itself is not what is timed
            self.inputs = (tokens[:, :-1].to(device), tokens[:, 1:].to(device))
        else:
            self.inputs = (torch.randn(4, 25, generator=generator).to(device),)
        self.is_llama = name == "llama"

    def model(self) -> nn.Module:
        return self.build().to(self.device, self.dtype)

    def loss(self, model: nn.Module) -> torch.Tensor:
        output = model(*self.inputs)
        return output if self.is_llama else output.float().pow(2).mean()


def bare(task: Task) -> Step:
    model = task.model()

    def step() -> None:
        task.loss(model).backward()
        for param in model.parameters():
            param.grad = None

    return step


def plain(task: Task) -> Step:
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        task.loss(model).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def ddp(task: Task) -> Step:
    model = DistributedDataParallel(task.model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        task.loss(model).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def fsdp2(task: Task) -> Step:
    """torch's sharded data parallel, one unit per layer, as its documentation has it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = task.model()
    mesh = init_device_mesh(task.device.type, (dist.get_world_size(),))
    for layer in model.blocks if task.is_llama else model:  # type: ignore[union-attr, operator]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)  # fused is not there for its tensors

    def step() -> None:
        task.loss(model).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


FORCED = {
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
}


def engine(task: Task, stage: int, torch_adam: bool, **zero: int) -> Step:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": task.dtype == torch.bfloat16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": torch_adam}},
        "zero_optimization": {"stage": stage, **zero},
    }
    wrapped, *_ = deepspeed.initialize(model=task.build().to(task.device), config=config)

    def step() -> None:
        wrapped.backward(task.loss(wrapped))
        wrapped.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=("llama", "tiny"), default="llama")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=2, help="steps per round")
    parser.add_argument("--stage-3", action="store_true", help="stage 3 and FSDP2 instead of stages 0 to 2 and DDP")
    parser.add_argument("--torch-adam", action="store_true", help="the engine's AdamW is torch's")
    options = parser.parse_args()
    torch_adam = options.torch_adam
    torch.set_num_threads(1)
    cuda = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    task = Task(options.task, device)
    systems: dict[str, Step] = {"bare": bare(task), "plain": plain(task)}
    if options.stage_3:
        systems["fsdp2"] = fsdp2(task)
        systems["stage3"] = engine(task, 3, torch_adam)
        systems["stage3_released"] = engine(task, 3, torch_adam, **FORCED)
    else:
        systems |= {"ddp": ddp(task), **{f"stage{stage}": engine(task, stage, torch_adam) for stage in (0, 1, 2)}}
    for step in systems.values():
        for _ in range(2):
            step()
    wall: dict[str, list[float]] = {name: [] for name in systems}
    cpu: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(options.rounds):
        for name, step in systems.items():
            dist.barrier()
            started, used = time.perf_counter(), time.process_time()
            for _ in range(options.steps):
                step()
            if cuda:
                torch.cuda.synchronize()
            dist.barrier()
            wall[name].append(1e3 * (time.perf_counter() - started) / options.steps)
            cpu[name].append(1e3 * (time.process_time() - used) / options.steps)
    if dist.get_rank() == 0:
        print(json.dumps({"wall": wall, "cpu": cpu}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
