"""One try of `offload_capacity.py`: build a model of so many layers and train two steps. Public API only."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    settings, layers, width, groups = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    for group in groups:  # the memory control group that caps this process
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
    import torch
    from torch import nn

    import deepspeed

    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    with deepspeed.zero.Init(config_dict_or_path=settings):  # does nothing below stage 3
        parts = [nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(layers)]
        model = nn.Sequential(*parts)
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    x = torch.ones(1, width, dtype=torch.bfloat16)
    for _ in range(2):
        began = time.monotonic()
        engine.backward(engine(x).float().square().mean())
        engine.step()
    print("RESULT " + json.dumps({"step_s": time.monotonic() - began}), flush=True)
    engine.destroy()


if __name__ == "__main__":
    main()
