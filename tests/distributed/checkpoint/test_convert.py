"""``convert --to deepspeed``: every element is where DeepSpeed's order has it; the reader of its tags confirms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.checkpoint import CheckpointError, trusted
from deepspeed.checkpoint import __main__ as tool
from deepspeed.checkpoint.index import FragmentIndex
from deepspeed.checkpoint.reference.layout import add_shard
from deepspeed.runtime.zero.layout import ShardLayout
from tests.distributed.checkpoint import runs
from tests.harness.pool import WorkerPool
from tests.interchange import cases

NAMES = ("stage1_bf16", "stage2_bf16", "stage3_fp32", "stage2_sgd")


def save(folder: str, names: tuple[str, ...]) -> None:
    import deepspeed

    for name in names:
        case = cases.CASES[name]
        module = cases.build(case)
        groups = cases.parameter_groups(case, module)
        engine, *_ = deepspeed.initialize(model=module, model_parameters=groups, config=cases.config(case))
        for index in range(2):
            cases.step(engine, index, dist.get_rank())
        engine.save_checkpoint(f"{folder}/{name}", tag="saved", client_state={"note": name})
        engine.destroy()


@pytest.fixture(scope="module")
def saved(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("convert")
    pool.run(2, save, str(folder), NAMES)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_the_converted_tag_holds_the_same(
    saved: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, out = saved / name, tmp_path / "out"
    assert tool.main(["convert", "--to", "deepspeed", str(ours), str(out)]) == 0
    assert (out / "latest").read_text() == "saved"
    assert "random states" in capsys.readouterr().out
    # Masters, weights and states one by one; the reader of DeepSpeed's tags checks lengths and mappings on the way.
    assert tool.main(["diff", str(ours), str(out)]) == 0, capsys.readouterr().out
    files = sorted(path.name for path in (out / "saved").iterdir())
    assert files == sorted(path.name for path in (ours / "saved").glob("*_states.pt"))


def test_partitions_are_cut_as_theirs(saved: Path, tmp_path: Path) -> None:
    """One cut through the whole group: 150 elements on two ranks are 76, with 2 of padding on the last one."""
    assert tool.main(["convert", "--to", "deepspeed", str(saved / "stage2_bf16"), str(tmp_path / "out")]) == 0
    fixture = Path(__file__).resolve().parents[2] / "data/reference_checkpoints/0.19.8/stage2_bf16/saved"
    for path in fixture.glob("*optim_states.pt"):
        theirs = trusted.load_file(path)["optimizer_state_dict"]
        ours = trusted.load_file(tmp_path / "out/saved" / path.name)["optimizer_state_dict"]
        assert set(ours) == set(theirs)
        assert ours["group_paddings"] == theirs["group_paddings"]
        for key in ("single_partition_of_fp32_groups", "param_slice_mappings"):
            left, right = ours[key], theirs[key]
            if key == "param_slice_mappings":
                assert [[(n, vars(a)) for n, a in m.items()] for m in left] == [
                    [(n, vars(a)) for n, a in m.items()] for m in right
                ]
            else:
                assert [tensor.shape for tensor in left] == [tensor.shape for tensor in right]
        for number, state in theirs["base_optimizer_state"]["state"].items():
            mine = ours["base_optimizer_state"]["state"][number]
            assert {key: value.shape for key, value in mine.items()} == {
                key: value.shape for key, value in state.items()
            }
            assert torch.is_tensor(mine["step"])


def test_refusals(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, out = str(saved / "stage2_bf16"), str(tmp_path / "out")
    assert tool.main(["convert", "--to", "deepspeed", ours, out]) == 0
    assert tool.main(["convert", "--to", "deepspeed", ours, out]) == 2
    assert "exists; give another folder" in capsys.readouterr().err
    assert tool.main(["convert", "--to", "deepspeed", out, str(tmp_path / "again")]) == 2
    assert "was not written by this release" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


class Counted(nn.Module):
    """A parameter without dimensions beside larger ones, and a frozen layer that the optimizer is given, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.still, self.last = nn.Linear(5, 3), nn.Linear(3, 3), nn.Linear(3, 1)
        self.still.requires_grad_(False)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.still(torch.tanh(self.first(x)))) * self.gain


def counted(folder: str, stage: int, precision: str) -> None:
    def start(seed: int) -> Any:
        return runs.start(runs.config(stage, precision), module=runs.build(seed, Counted))

    def step(engine: Any) -> None:
        x = torch.linspace(-1, 1, 10).view(2, 5).to(engine.module.gain.dtype)
        engine.backward(engine(x).float().square().mean())
        engine.step()

    engine = start(1)
    step(engine)
    step(engine)
    engine.save_checkpoint(folder)
    assert tool.main(["convert", "--to", "deepspeed", folder, f"{folder}/out"]) == 0
    if stage == 0:  # their fp32 optimizer keeps the frozen ones it is given, their 16-bit one does not
        converted = trusted.load_file(Path(folder) / "out/global_step2/mp_rank_00_model_states.pt")["optimizer"]
        plain = converted.get("optimizer_state_dict", converted)
        assert [len(group["params"]) for group in plain["param_groups"]] == [7 if precision == "fp32" else 5]
    other = start(2)
    other.load_checkpoint(f"{folder}/out")
    keys = ("weights", "masters", "states", "counters", "schedule")
    expected, found = runs.snapshot(engine), runs.snapshot(other)
    runs.same({key: expected[key] for key in keys}, {key: found[key] for key in keys})
    step(other)
    engine.destroy()
    other.destroy()


@pytest.mark.parametrize(("stage", "precision"), ((0, "fp32"), (0, "bf16"), (2, "bf16"), (3, "fp32")))
def test_parameters_without_dimensions_and_frozen_ones(
    pool: WorkerPool, tmp_path: Path, stage: int, precision: str
) -> None:
    pool.run(1, counted, str(tmp_path), stage, precision)


def test_a_moment_that_is_one_number_is_refused() -> None:
    """A fused update would write past its end."""
    record = {"zero_stage": 2, "groups": [{"layout": ShardLayout.by_element([("w", 4)], 1).as_record()}]}
    shard = {
        "single_partition_of_fp32_groups": [torch.zeros(4)],
        "base_optimizer_state": {
            "state": {0: {"exp_avg": torch.zeros(()), "step": torch.tensor(1.0)}},
            "param_groups": [{"params": [0]}],
        },
    }
    with pytest.raises(CheckpointError, match=r"F: group 0, 'exp_avg' has shape \(\); expected one dimension of 4"):
        add_shard(FragmentIndex(), record, shard, 0, "f", "F", mapped=False)
