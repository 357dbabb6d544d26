"""Lightning Fabric's DeepSpeedStrategy: trains as plain PyTorch, saves, resumes, loads whole weights, infers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.harness.project import ROOT

STEPS, ACCUMULATION, CLIPPING = 3, 2, 0.5


class Net(nn.Module):
    """Two layers that Fabric builds inside its own context."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(torch.tanh(self.first(inputs.to(self.first.weight.dtype))))
        return result.float()


def whole_net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One pair per micro-batch of the whole run, for both ranks together (rows 0-3 and 4-7)."""
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(8, 8, generator=generator), torch.randint(0, 2, (8,), generator=generator))
        for _ in range(2 * STEPS * ACCUMULATION)
    ]


def fabric(stage: int, precision: str = "32-true", **settings: Any) -> Any:
    from lightning.fabric import Fabric
    from lightning.fabric.accelerators.cuda import CUDAAccelerator
    from lightning.fabric.strategies import DeepSpeedStrategy

    sys.path.insert(0, str(ROOT / "examples" / "lightning"))
    from host_accelerator import HostAccelerator as OfTheTrainer

    names = ("setup_device", "teardown", "parse_devices", "get_parallel_devices", "auto_device_count", "is_available")
    host = type("HostAccelerator", (CUDAAccelerator,), {name: OfTheTrainer.__dict__[name] for name in names})
    config: dict[str, Any] = {
        "zero_optimization": {"stage": stage, "offload_param": {"device": "none"}},
        "gradient_clipping": CLIPPING,
        "gradient_accumulation_steps": ACCUMULATION,
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
    }
    strategy = DeepSpeedStrategy(config=config, process_group_backend="gloo", logging_level=30, **settings)
    made = Fabric(accelerator=host(), devices=2, strategy=strategy, precision=precision)
    made.launch()
    return made


def set_up(run: Any) -> tuple[Any, Any]:
    with run.init_module(empty_init=run.strategy.zero_stage_3):
        torch.manual_seed(0)
        net = Net()
    return run.setup(net, torch.optim.AdamW(net.parameters(), lr=0.01))


def steps(run: Any, model: Any, optimizer: Any, first: int, last: int) -> list[float]:
    losses = []
    for inputs, labels in batches()[first * ACCUMULATION : last * ACCUMULATION]:
        mine = slice(4 * run.global_rank, 4 * run.global_rank + 4)
        loss = nn.functional.cross_entropy(model(inputs[mine]), labels[mine])
        run.backward(loss, model=model)  # named, as there are two of them in the end
        optimizer.step()
        optimizer.zero_grad()
        losses.append(run.all_reduce(loss.detach()).item())
    return losses


def train(stage: int, precision: str, folder: str) -> dict[str, Any]:
    run = fabric(stage, precision)
    model, optimizer = set_up(run)
    losses = steps(run, model, optimizer, 0, STEPS)
    run.save(folder, {"model": model, "optimizer": optimizer, "epoch": 7})
    unbroken = steps(run, model, optimizer, STEPS, 2 * STEPS)

    again, optimizer = set_up(run)
    state = {"model": again, "optimizer": optimizer, "epoch": 0}
    run.load(folder, state)
    return {
        "losses": losses,
        "unbroken": unbroken,
        "resumed": steps(run, again, optimizer, STEPS, 2 * STEPS),
        "epoch": state["epoch"],
    }


def plain() -> list[float]:
    net = whole_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    losses = []
    for index, (inputs, labels) in enumerate(batches()):
        loss = nn.functional.cross_entropy(net(inputs), labels)
        (loss / ACCUMULATION).backward()
        losses.append(loss.item())
        if (index + 1) % ACCUMULATION == 0:
            nn.utils.clip_grad_norm_(net.parameters(), CLIPPING)
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.flow
@pytest.mark.parametrize("precision", ("32-true", "bf16-mixed"))
@pytest.mark.parametrize("stage", (1, 2, 3))
def test_trains_as_plain_pytorch_and_resumes(ranks: Any, stage: int, precision: str, tmp_path: Path) -> None:
    first, second = ranks(train, stage, precision, str(tmp_path / "saved"))
    assert first == second
    assert first["epoch"] == 7
    assert first["resumed"] == first["unbroken"]
    found = first["losses"] + first["unbroken"]
    # fp32: two ranks' means of halves are added in another order than one mean of eight rows.
    near = {"rel": 1e-5} if precision == "32-true" else {"abs": 0.02}
    assert found == pytest.approx(plain(), **near)


def load_whole(folder: str) -> list[float]:
    run = fabric(3, load_full_weights=True)
    with run.init_module(empty_init=True):
        net = Net()
    model = run.setup_module(net)
    run.load(folder, {"model": model})
    model.eval()
    with torch.no_grad():
        found: list[float] = model(batches()[0][0]).flatten().tolist()
    return found


@pytest.mark.flow(stage="3", dtype="fp32")
def test_whole_weights_are_loaded_for_inference(ranks: Any, tmp_path: Path) -> None:
    net = whole_net(seed=5)
    # Fabric hands the saved dict to the engine, whose own names have a prefix.
    torch.save({"model": {f"module.{name}": value for name, value in net.state_dict().items()}}, tmp_path / "whole.pt")
    first, second = ranks(load_whole, str(tmp_path / "whole.pt"))
    with torch.no_grad():
        expected = net(batches()[0][0]).flatten().tolist()
    assert first == second == pytest.approx(expected, rel=1e-6)
