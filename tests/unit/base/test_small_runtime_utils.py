"""The helpers that need no file of their own, memory reports, and moving Adam's states."""

from __future__ import annotations

import random
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import utils
from deepspeed.runtime.summary import table


def test_the_start_table_shows_small_models_in_kilobytes() -> None:
    sizes = {"parameter": 4_000_000, "gradient": 0, "master": 999_000, "optimizer": 64, "host": 1_000}
    text = table(
        {
            "batch": dict.fromkeys(
                ("train_batch_size", "micro_batch_per_gpu", "gradient_accumulation_steps", "data_parallel_size"), 1
            ),
            "stage": 1,
            "parallel": {"dp": 1},
            "parameters": {"total": 1, "trainable": 1},
            "dtypes": {"weights": "float32"},
            "kept_fp32": [],
            "buffers_cast": [],
            "autocast": None,
            "optimizer": "AdamW",
            "gradient_clipping": 1.0,
            "loss_scale": None,
            "model_state_bytes": {"expected": sizes, "measured": None},
        }
    )
    line = text.splitlines()[-1].split("expected")[1].strip()
    parts = "parameter 4.0 MB, gradient 0.0 MB, master 999.0 KB, optimizer 0.1 KB; host 1.0 KB"
    assert line == f"5.0 MB = {parts}"


def test_seed_covers_python_numpy_and_torch() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(numpy.random.rand()), float(torch.rand(()))

    utils.set_random_seed(2**35 + 3)
    first = draw()
    assert draw() != first
    utils.set_random_seed(2**35 + 3)
    assert draw() == first


def test_folders_and_sizes(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "c.txt"
    utils.ensure_directory_exists(str(path))
    utils.ensure_directory_exists(str(path))
    path.write_text("12345")
    (tmp_path / "a" / "d").write_text("12")
    (tmp_path / "a" / "link").symlink_to(path)
    assert utils.get_checkpoint_folder_size(str(tmp_path), "a") == 7
    assert utils.get_checkpoint_folder_size(str(tmp_path / "a"), None, local_rank=0) == 7
    assert utils.get_checkpoint_folder_size(str(tmp_path), "a", local_rank=1) == 0


def test_texts_and_items() -> None:
    assert utils.call_to_str("f", 1, "a", b=2, c="x") == "f(1, 'a', b=2, c='x')"
    assert utils.call_to_str("f") == "f()"
    assert utils.get_only_unique_item([2, 2]) == 2
    for items in ([1, 2], []):
        with pytest.raises(RuntimeError, match="only one unique element"):
            utils.get_only_unique_item(items)


def test_alignment_and_empty_parameters() -> None:
    tensors = [torch.ones(3), torch.ones(2)]
    aligned = utils.align_dense_tensors(tensors, 4)
    assert [tensor.tolist() for tensor in aligned] == [[1.0] * 3, [1.0] * 2, [0.0] * 3]
    assert utils.align_dense_tensors([torch.ones(4)], 4)[0].numel() == 4
    full, empty = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(0))
    assert utils.filter_empty_parameters(iter([full, empty])) == [full]
    groups = [{"params": [empty, full], "lr": 1}]
    assert utils.filter_empty_parameters(groups) == [{"params": [full], "lr": 1}]
    assert groups[0]["params"] == [empty, full]


class Status(Enum):
    NOT_AVAILABLE = 1
    AVAILABLE = 2


def test_inactive_parameters() -> None:
    plain, away, here = (nn.Parameter(torch.ones(1)) for _ in range(3))
    for param, status in ((away, Status.NOT_AVAILABLE), (here, Status.AVAILABLE)):
        param.ds_id, param.ds_status = 1, status  # type: ignore[attr-defined]
    found = utils.get_inactive_params([plain, away, here])
    assert len(found) == 1
    assert found[0] is away


def test_cache_objects_are_known_without_importing_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "transformers.cache_utils", raising=False)
    assert not utils.is_transformers_cache(3)
    module = ModuleType("transformers.cache_utils")
    module.Cache = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers.cache_utils", module)
    assert utils.is_transformers_cache(SimpleNamespace())
    assert not utils.is_transformers_cache(3)


def test_noops() -> None:
    with utils.noop_context() as nothing:
        assert nothing is None
    assert utils.noop_decorator(sum) is sum


def test_memory_report_is_printed_only_when_forced(capsys: pytest.CaptureFixture[str]) -> None:
    utils.see_memory_usage("quiet")
    assert capsys.readouterr().out == ""
    utils.see_memory_usage("loud", force=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "loud"
    assert [part.split()[0] for part in lines[1].split("         ")] == ["MA", "Max_MA", "CA", "Max_CA"]
    assert lines[2].startswith("CPU Virtual Memory:  used = ")


def test_memory_line_shows_changes(capsys: pytest.CaptureFixture[str]) -> None:
    utils.memory_status("first")
    block = torch.ones(256 << 20, dtype=torch.uint8)
    utils.memory_status("second", print_rank=0, reset_max=True)
    utils.memory_status("third", print_rank=5)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("RANK=0 MEMSTATS second device=cpu current alloc=")
    assert 0.2 < float(lines[1].split("delta=")[1].split("GB")[0]) < 0.4
    del block


def test_memory_figures() -> None:
    assert utils.get_tensor_bytes(torch.ones(3, dtype=torch.bfloat16)) == 6
    assert utils.get_ma_status() > 0
    assert utils.torch_max_memory_reserved() >= utils.torch_memory_reserved() // 2 > 0
    utils.empty_cache()
    assert get_accelerator().max_memory_allocated() > 0


def test_adam_states_go_and_come_back() -> None:
    param = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([param], lr=0.1)
    param.grad = torch.ones(4)
    optimizer.step()
    state = optimizer.state[param]
    expected = {name: state[name].clone() for name in ("exp_avg", "exp_avg_sq")}
    identity = state["exp_avg"]
    addresses = {state[name].data_ptr() for name in expected}
    utils.offload_adam_states(optimizer, "cpu", pin_memory=True)
    assert addresses.isdisjoint(state[name].data_ptr() for name in expected)
    utils.reload_adam_states(optimizer, "cpu")
    assert state["exp_avg"] is identity
    for name, value in expected.items():
        assert torch.equal(state[name], value)
    assert state["step"].device.type == "cpu"


def test_dummy_optimizer_holds_parameters() -> None:
    params = [nn.Parameter(torch.ones(1))]
    assert utils.DummyOptim(params).param_groups == [{"params": params}]
