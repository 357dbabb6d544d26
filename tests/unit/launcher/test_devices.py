"""Finding devices from files of the system, and which of them a run on one node uses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deepspeed.launcher import devices
from deepspeed.launcher.devices import Devices, find_devices, visible_ids
from deepspeed.launcher.selection import Request, select_local_slots

GPUS = Devices("cuda", (0, 1, 2, 3), "CUDA_VISIBLE_DEVICES", unbounded=False, why="4 GPUs found")
CPU = Devices("cpu", (0,), "CUDA_VISIBLE_DEVICES", unbounded=True, why="no GPU found")
NPU = Devices("npu", None, "ASCEND_RT_VISIBLE_DEVICES", unbounded=False, why="DS_ACCELERATOR=npu")


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_nvidia_gpu_count", lambda: 4)
    monkeypatch.setattr(devices, "torch_build", lambda: "cuda")


@pytest.mark.parametrize(
    ("text", "ids"),
    (("", []), ("0,2", [0, 2]), (" 3 , 1", [3, 1]), ("0,-1,1", [0]), ("-1", []), ("GPU-ab,1", ["GPU-ab", 1]),
     ("NoDevFiles", [])),
)  # fmt: skip
def test_visible_list_ends_where_cuda_ends_it(text: str, ids: list[int | str]) -> None:
    assert visible_ids(text) == ids


def test_gpus_are_chosen_when_torch_can_use_them(four_gpus: None) -> None:
    assert find_devices({}).accelerator == "cuda"
    assert find_devices({}).ids == (0, 1, 2, 3)


def test_cpu_is_chosen_with_the_reason(four_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_devices({"DS_ACCELERATOR": "cpu"}).why == "DS_ACCELERATOR=cpu"
    assert find_devices({"CUDA_VISIBLE_DEVICES": ""}).why == "CUDA_VISIBLE_DEVICES hides all GPUs"
    monkeypatch.setattr(devices, "torch_build", lambda: "cpu")
    found = find_devices({})
    assert (found.accelerator, found.unbounded) == ("cpu", True)
    assert "CPU-only build" in found.why


def test_amd_gpus_are_narrowed_through_the_variable_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_nvidia_gpu_count", lambda: 0)
    monkeypatch.setattr(devices, "_amd_gpu_count", lambda: 2)
    monkeypatch.setattr(devices, "torch_build", lambda: "hip")
    assert find_devices({}).visible_variable == "CUDA_VISIBLE_DEVICES"
    assert find_devices({"HIP_VISIBLE_DEVICES": "1"}).visible_variable == "HIP_VISIBLE_DEVICES"


def test_amd_gpus_are_the_nodes_with_simd_units_that_may_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node, simd, minor in (("0", 0, 0), ("1", 304, 128), ("2", 304, 129)):
        (tmp_path / node).mkdir()
        (tmp_path / node / "properties").write_text(f"simd_count {simd}\ndrm_render_minor {minor}\n")
    monkeypatch.setattr(devices, "_accessible", lambda path: path == "/dev/dri/renderD128")
    assert devices._amd_gpu_count(str(tmp_path)) == 1
    assert devices._amd_gpu_count(str(tmp_path / "none")) == 0


def test_naming_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_gpus", lambda environ: ((), "CUDA_VISIBLE_DEVICES"))
    with pytest.raises(ValueError, match="DS_ACCELERATOR=cuda: no CUDA or ROCm device"):
        find_devices({"DS_ACCELERATOR": "cuda"})


@pytest.mark.parametrize(("text", "count"), (("0", 1), ("0-1", 2), ("0,2-3", 3), ("", 1)))
def test_numa_nodes(tmp_path: Path, text: str, count: int) -> None:
    listing = tmp_path / "has_cpu"
    listing.write_text(text + "\n")
    assert devices._num_numa_nodes(str(listing)) == count
    assert devices._num_numa_nodes(str(tmp_path / "none")) == 1


def test_build_of_the_installed_torch_is_read_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    version = tmp_path / "torch" / "version.py"
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    for cuda, hip, expected in (("'12.8'", "None", "cuda"), ("None", "'6.4'", "hip"), ("None", "None", "cpu")):
        version.write_text(f"cuda: Optional[str] = {cuda}\nhip: Optional[str] = {hip}\n")
        assert devices.torch_build() == expected
    monkeypatch.setattr("sys.path", [str(tmp_path / "none")])
    assert devices.torch_build() is None


@pytest.mark.parametrize(
    ("request_", "environ", "slots"),
    (
        (Request(), {}, (0, 1, 2, 3)),
        (Request(), {"CUDA_VISIBLE_DEVICES": "3,1"}, (3, 1)),
        (Request(), {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, ("GPU-a", "GPU-b")),
        (Request(num_devices=2), {}, (0, 1)),
        (Request(num_devices=2), {"CUDA_VISIBLE_DEVICES": "1,3"}, (1, 3)),
        (Request(num_devices=1), {"CUDA_VISIBLE_DEVICES": "3,1"}, (3,)),
        (Request(include="localhost:1,3"), {}, (1, 3)),
        (Request(include="localhost:3"), {"CUDA_VISIBLE_DEVICES": "1,3"}, (3,)),
        (Request(include="localhost"), {"CUDA_VISIBLE_DEVICES": "1,3"}, (1, 3)),
        (Request(exclude="localhost:0"), {}, (1, 2, 3)),
        (Request(exclude="localhost:3"), {"CUDA_VISIBLE_DEVICES": "1,3"}, (1,)),
        (Request(include="box:2", aliases=("box",)), {}, (2,)),
        (Request(host="w0", hostfile_slots=2), {}, (0, 1)),
        (Request(include="w0:1", host="w0", hostfile_slots=2), {}, (1,)),
    ),
)
def test_precedence_on_gpus(request_: Request, environ: dict[str, str], slots: tuple[int | str, ...]) -> None:
    """Flags choose among what the variable makes visible; without flags it is all of that."""
    assert select_local_slots(request_, GPUS, environ).slots == slots


@pytest.mark.parametrize(
    ("request_", "environ", "said"),
    (
        (Request(num_devices=5), {}, r"--num_gpus 5: only 4 visible \(0,1,2,3"),
        (Request(num_devices=3), {"CUDA_VISIBLE_DEVICES": "1,3"}, r"only 2 visible \(1,3; CUDA_VISIBLE_DEVICES=1,3"),
        (Request(include="localhost:0"), {"CUDA_VISIBLE_DEVICES": "1,3"}, r"no slot 0; its slots: 1, 3 \(CUDA_VIS"),
        (Request(include="localhost:4"), {}, "no slot 4"),
        (Request(exclude="localhost:9"), {}, "no slot 9"),
        (Request(include="other:0"), {}, "host 'other' is not part of this run"),
        (Request(), {"CUDA_VISIBLE_DEVICES": "0,9"}, "this host has no cuda device 9; it has 0,1,2,3"),
        (Request(), {"CUDA_VISIBLE_DEVICES": "0,0"}, "named twice"),
        (Request(host="w0", hostfile_slots=8), {}, "no cuda device 4,5,6,7"),
    ),
)
def test_more_than_is_visible_is_refused(request_: Request, environ: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        select_local_slots(request_, GPUS, environ)


def test_nothing_left_is_refused() -> None:
    with pytest.raises(RuntimeError, match="no cuda device is left"):
        select_local_slots(Request(exclude="localhost"), GPUS, {})


@pytest.mark.parametrize(
    ("request_", "environ", "slots"),
    (
        (Request(), {}, (0,)),
        (Request(num_devices=7), {}, tuple(range(7))),
        (Request(num_devices=3), {"CUDA_VISIBLE_DEVICES": "0"}, (0, 1, 2)),
        (Request(), {"CUDA_VISIBLE_DEVICES": "0,5"}, (0, 5)),
        (Request(include="localhost:4,2"), {}, (2, 4)),
        (Request(include="localhost:0,1"), {"CUDA_VISIBLE_DEVICES": "0"}, (0, 1)),
        (Request(host="w0", hostfile_slots=3), {}, (0, 1, 2)),
        (Request(num_devices=2), {"CUDA_VISIBLE_DEVICES": ""}, (0, 1)),
    ),
)
def test_any_number_of_ranks_is_fine_on_the_cpu(
    request_: Request, environ: dict[str, str], slots: tuple[int, ...]
) -> None:
    assert select_local_slots(request_, CPU, environ).slots == slots


def test_unknown_number_of_devices_needs_a_number() -> None:
    assert select_local_slots(Request(num_devices=2), NPU, {}).slots == (0, 1)
    assert select_local_slots(Request(), NPU, {"ASCEND_RT_VISIBLE_DEVICES": "4,6"}).slots == (4, 6)
    with pytest.raises(RuntimeError, match="name a number with --num_gpus"):
        select_local_slots(Request(), NPU, {})


def test_reason_names_what_decided() -> None:
    def reason(request: Request, found: Devices = GPUS, **environ: str) -> str:
        return select_local_slots(request, found, environ).reason

    assert reason(Request(), CUDA_VISIBLE_DEVICES="1,3") == "CUDA_VISIBLE_DEVICES=1,3"
    assert reason(Request(num_devices=1), CUDA_VISIBLE_DEVICES="1,3") == (
        "--num_gpus 1, the first of CUDA_VISIBLE_DEVICES=1,3"
    )
    assert reason(Request()) == "all of this host: 4 GPUs found"
    on_cpu = reason(Request(num_devices=2), CPU, CUDA_VISIBLE_DEVICES="0")
    assert "CUDA_VISIBLE_DEVICES=0 does not limit the CPU" in on_cpu


def test_a_gpu_withheld_by_the_scheduler_is_not_counted(tmp_path: Path) -> None:
    node = tmp_path / "nvidia0"
    node.touch(mode=0o000)
    readable = os.access(node, os.R_OK)  # root reads everything
    assert devices._accessible(str(node)) is readable
    assert not devices._accessible(str(tmp_path / "nvidia1"))
