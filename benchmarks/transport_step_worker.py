"""One rank of ``transport.py --hosts``: whole training steps, plain data parallel up to stage 3.

Prints one JSON line on rank 0: {"carrier": what carries host tensors, "stage N": [best, median] seconds of a step}.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time

import torch

LAYERS, WIDTH, BATCH = 8, 512, 4


def steps(stage: int, count: int) -> list[float]:
    import deepspeed
    from deepspeed import comm as dist

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "Adam"},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "overlap_comm": True, "reduce_bucket_size": 1 << 20},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    data, found = torch.randn(BATCH, WIDTH).bfloat16(), []
    for _ in range(count + 3):
        dist.barrier()
        begin = time.perf_counter()
        engine.backward(engine(data).float().square().mean())
        engine.step()
        found.append(time.perf_counter() - begin)
    engine.destroy()
    return found[3:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    import deepspeed
    from deepspeed import comm as dist
    from deepspeed.comm import same_host

    deepspeed.init_distributed("gloo")
    found: dict[str, object] = {}
    for stage in (0, 1, 2, 3):
        times = steps(stage, options.steps)
        found[f"stage {stage}"] = [min(times), statistics.median(times)]
    found["carrier"] = same_host.describe()
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
