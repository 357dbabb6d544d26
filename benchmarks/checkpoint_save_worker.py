"""One rank of ``checkpoint_save.py``: times saving and loading, under this package or under a peer's interpreter.

    checkpoint_save_worker.py FOLDER MIB ROUNDS COMPUTE

A bf16 model at stage 2 whose masters and moments are MIB per rank. COMPUTE: seconds of each step in which a device
would run forward and backward, and this process sleeps. Prints one JSON object on rank 0: seconds of the
slowest rank each. What only this package and torch can do (background saves) is left out under a peer.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import deepspeed

BYTES_PER_PARAMETER = 12  # fp32 master and two moments
ROWS = 1  # of a micro-batch: the step is all optimizer and communication
DECOUPLED = {"writer": {"type": "FAST", "decoupled": True}}


def make(mib: int, world: int, **config: Any) -> Any:
    """An engine whose optimizer state is ``mib`` MiB on each rank."""
    width = 1024
    layers = max(1, round(mib * 2**20 * world / BYTES_PER_PARAMETER / width**2))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    settings = {
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        **config,
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)[0]


def step(engine: Any, compute_s: float = 0.0) -> None:
    time.sleep(compute_s)
    x = torch.randn(ROWS, 1024, dtype=torch.bfloat16, device=engine.device)
    engine.backward(engine(x).float().square().mean())
    engine.step()


def slowest(work: Callable[[], Any]) -> float:
    """Seconds until the last rank has done ``work``, which all begin together."""
    dist.barrier()
    begun = time.perf_counter()
    work()
    spent = torch.tensor(time.perf_counter() - begun)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent)


def state_of(engine: Any) -> dict[str, torch.Tensor]:
    """This rank's masters and moments as tensors of their own names: what torch is given to save."""
    found = {}
    base = engine.optimizer.optimizer
    for number, group in enumerate(base.param_groups):
        for index, leaf in enumerate(group["params"]):
            name = f"{dist.get_rank()}.{number}.{index}"
            found[f"{name}.master"] = leaf.detach()
            found |= {f"{name}.{key}": value for key, value in base.state[leaf].items() if torch.is_tensor(value)}
    return found


def background_saves(folder: Path, mib: int, rounds: int, compute_s: float) -> dict[str, Any]:
    """How long training stands still for a background save, and its next step: this package and torch."""
    import torch.distributed.checkpoint as dcp

    engine = make(mib, dist.get_world_size(), checkpoint=DECOUPLED)
    group = dist.new_group(backend="gloo")
    result: dict[str, list[float]] = {"step": [], "stall": [], "next": [], "torch_stall": [], "torch_next": []}
    for _ in range(3):
        step(engine)
    for number in range(rounds):
        result["step"] += [slowest(lambda: step(engine, compute_s)) for _ in range(2)]
        tag = f"{number % 2}"
        result["stall"].append(slowest(lambda tag=tag: engine.save_checkpoint(folder / "ours", tag=tag)))
        result["next"].append(slowest(lambda: step(engine, compute_s)))
        engine.checkpoint.background.wait()
        pending: list[Any] = []
        target = folder / "torch" / str(number)

        def torch_save(pending: list[Any] = pending, target: Path = target) -> None:
            pending.append(dcp.async_save(state_of(engine), checkpoint_id=target, process_group=group))

        result["torch_stall"].append(slowest(torch_save))
        result["torch_next"].append(slowest(lambda: step(engine, compute_s)))
        pending[0].result()
        remove(target)
    engine.destroy()
    return result


def save_with_torch(state: dict[str, torch.Tensor], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def remove(folder: Path) -> None:
    import shutil

    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()


def disk_reads() -> int:
    """Bytes this process made the disk deliver."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def forget_cache(folder: Path) -> None:
    """The files of ``folder`` leave the page cache, so that reading them is counted."""
    dist.barrier()
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)
    dist.barrier()


def durable_saves(folder: Path, mib: int, rounds: int, ours: bool) -> dict[str, Any]:
    """Saving to the end, and loading into the same engine, beside ``torch.save`` + fsync of the same state."""
    engine = make(mib, dist.get_world_size())
    step(engine)
    result: dict[str, Any] = {"save": [], "torch_save": [], "load": [], "load_warm": []}
    state = state_of(engine) if ours else {}
    for _ in range(rounds):
        result["save"].append(slowest(lambda: engine.save_checkpoint(str(folder / "saved"), tag="a")))
        if ours:
            path = folder / "plain" / f"{dist.get_rank()}.pt"
            result["torch_save"].append(slowest(lambda path=path: save_with_torch(state, path)))
            remove(folder / "plain")
        forget_cache(folder / "saved")
        before = disk_reads()
        result["load"].append(slowest(lambda: engine.load_checkpoint(str(folder / "saved"), tag="a")))
        result["read_nbytes"] = disk_reads() - before
        result["load_warm"].append(slowest(lambda: engine.load_checkpoint(str(folder / "saved"), tag="a")))
    sizes = {path.name: path.stat().st_size for path in (folder / "saved" / "a").iterdir()}
    result["own_nbytes"] = sum(size for name, size in sizes.items() if "pp_rank_0" in name or "model_states" in name)
    result["disk_nbytes"] = sum(sizes.values())
    numel = sum(param.numel() for param in engine.module.parameters())
    random = sum(size for name, size in sizes.items() if name.startswith("rng_state"))
    result["state_nbytes"] = numel * (BYTES_PER_PARAMETER + 2) + random
    if hasattr(engine, "destroy"):
        engine.destroy()
    return result


def main() -> None:
    folder, mib, rounds, compute_s = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    ours = Path(deepspeed.__file__).resolve().is_relative_to(Path(__file__).resolve().parent.parent)
    result = durable_saves(folder, mib, rounds, ours)
    if ours:
        result |= background_saves(folder, mib, rounds, compute_s)
    remove(folder)
    if dist.get_rank() == 0:
        shown = {key: value if not isinstance(value, list) else [round(one, 4) for one in value] for key, value in
                 result.items()}  # fmt: skip
        shown["median"] = {key: statistics.median(value) for key, value in result.items() if value and
                           isinstance(value, list)}  # fmt: skip
        print(json.dumps(shown), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
