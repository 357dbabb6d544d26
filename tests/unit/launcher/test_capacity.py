"""How many workers a host is let start: nothing here starts any."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepspeed.launcher import capacity, launch, runner
from deepspeed.launcher.capacity import check_number_of_workers
from deepspeed.launcher.devices import Devices
from deepspeed.launcher.hostfile import encode_world_info

CPU = Devices("cpu", (0,), "CUDA_VISIBLE_DEVICES", unbounded=True, why="no GPU found")
NPU = Devices("npu", None, "ASCEND_RT_VISIBLE_DEVICES", unbounded=False, why="DS_ACCELERATOR=npu")
GPUS = Devices("cuda", tuple(range(64)), "CUDA_VISIBLE_DEVICES", unbounded=False, why="64 GPUs found")


@pytest.fixture(autouse=True)
def small_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "_usable_cores", lambda: 4)
    monkeypatch.setattr(capacity, "_memory", lambda: 8 << 30)
    monkeypatch.delenv(capacity.LIMIT_VARIABLE, raising=False)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


@pytest.mark.parametrize("devices", (CPU, NPU))
def test_cores_draw_the_line(devices: Devices) -> None:
    check_number_of_workers(32, "--num_gpus 32", devices, {})
    with pytest.raises(ValueError, match=r"--num_gpus 5000: 5000 .* 4 cores and 8\.0 GiB .* about 32 .*RANKS=5000"):
        check_number_of_workers(5000, "--num_gpus 5000", devices, {})


def test_memory_draws_it_where_it_is_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "_memory", lambda: 3 << 30)
    check_number_of_workers(24, "", CPU, {})
    with pytest.raises(ValueError, match="enough for about 24"):
        check_number_of_workers(25, "", CPU, {})
    monkeypatch.setattr(capacity, "_memory", lambda: 1 << 30)
    check_number_of_workers(16, "", CPU, {})


def test_counted_devices_are_their_own_limit() -> None:
    check_number_of_workers(64, "", GPUS, {})


def test_the_variable_is_the_users_own_limit() -> None:
    check_number_of_workers(5000, "", CPU, {"DS_LAUNCH_MAX_RANKS": "5000"})
    with pytest.raises(ValueError, match="DS_LAUNCH_MAX_RANKS=2 allows 2"):
        check_number_of_workers(3, "", CPU, {"DS_LAUNCH_MAX_RANKS": "2"})
    for wrong in ("", "0", "many", "-1", "²"):
        with pytest.raises(ValueError, match=f"DS_LAUNCH_MAX_RANKS={wrong}: expected the number"):
            check_number_of_workers(1, "", CPU, {"DS_LAUNCH_MAX_RANKS": wrong})


def _never(*arguments: object, **named: object) -> int:
    raise AssertionError("workers were about to be started")


@pytest.mark.parametrize(
    "words",
    (
        ["--num_gpus", "5000"],
        ["--num_gpus", "1000000000000"],
        ["--force_multi", "--num_gpus", "5000"],
        ["--no_ssh", "--num_nodes", "2", "--node_rank", "0", "--master_addr", "h", "--num_gpus", "5000"],
        ["--hostfile", "HOSTS", "--num_gpus", "5000"],
    ),
)
def test_every_way_to_a_node_asks_first(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=6000\n")
    monkeypatch.setattr(runner, "run_node", _never)
    monkeypatch.setattr("deepspeed.launcher.multinode.run", _never)
    words = [str(hosts) if word == "HOSTS" else word for word in words]
    with pytest.raises(ValueError, match="each an interpreter of its own"):
        runner.main([*([] if "--hostfile" in words else ["--hostfile", "/nonexistent"]), "-q", *words, __file__])


def test_so_does_the_launcher_of_one_of_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_worker_specs", _never)
    world = encode_world_info({"w0": [0], "w1": list(range(5000))})
    with pytest.raises(ValueError, match="slots of w1: 5000 workers"):
        launch.main([f"--world_info={world}", "--node_rank=1", __file__])
