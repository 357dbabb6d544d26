"""Building native libraries: two at once, no compiler, a broken one, switched off; registry and op builders."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepspeed.native import build
from deepspeed.native.build import NativeUnavailable, find_compiler
from deepspeed.ops import op_builder
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.op_builder.all_ops import ALL_OPS
from deepspeed.ops.registry import OPS, Implementation, Op, get_op
from deepspeed.utils import logging
from tests.harness.project import ROOT

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler here")
TINY = '#include "answer.h"\nextern "C" __attribute__((visibility("default"))) int answer() { return ANSWER; }\n'


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library `tiny` of one function, and an empty cache."""
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "tiny.cpp").write_text(TINY)
    (sources / "answer.h").write_text("#define ANSWER 42\n")
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(build, "LIBRARIES", {"tiny": ()})
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setenv("DS_NATIVE_CACHE", str(tmp_path / "cache"))
    return sources


@needs_compiler
def test_two_processes_that_build_at_once_build_once(tiny: Path) -> None:
    code = (
        "import sys, ctypes, json; from pathlib import Path; from deepspeed.native import build; "
        "build.SOURCES = Path(sys.argv[1]); build.LIBRARIES['tiny'] = (); built = build.build('tiny'); "
        "print(json.dumps([built.seconds, str(built.path), build.load('tiny').answer()]))"
    )
    command = [sys.executable, "-c", code, str(tiny)]
    started = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    results = [json.loads(process.communicate(timeout=60)[0]) for process in started]
    assert sorted(seconds > 0 for seconds, _, _ in results) == [False, False, True]
    assert {(path, answer) for _, path, answer in results} == {(results[0][1], 42)}
    assert sorted(path.suffix for path in (tiny.parent / "cache").iterdir()) == [".lock", ".so"]


@needs_compiler
def test_a_changed_header_is_compiled_again(tiny: Path) -> None:
    first = build.build("tiny")
    assert build.build("tiny").seconds == 0
    (tiny / "answer.h").write_text("#define ANSWER 7\n")
    (tiny / "unrelated.h").write_text("nothing")
    second = build.build("tiny")
    assert second.seconds > 0
    assert [ctypes.CDLL(str(b.path)).answer() for b in (first, second)] == [42, 7]


@needs_compiler
def test_a_library_cut_short_is_built_again(tiny: Path) -> None:
    """Loading one would kill the process, with nothing said."""
    path = build.build("tiny").path
    whole = path.read_bytes()
    for nbytes in (0, 63, 64, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:nbytes])
        assert build.build("tiny").seconds > 0, nbytes
        assert len(path.read_bytes()) == len(whole)
    assert build.build("tiny").seconds == 0
    assert build.load("tiny").answer() == 42


@needs_compiler
def test_a_library_that_is_none_is_told_with_the_remedy(tiny: Path) -> None:
    path = build.build("tiny").path
    path.write_bytes(b"no library" * 100)
    with pytest.raises(NativeUnavailable, match=rf"cannot be loaded: {path}.*Remove the file, and it is built again"):
        build.load("tiny")


@needs_compiler
def test_parts_of_a_library_are_compiled_and_linked(tiny: Path) -> None:
    (tiny / "tiny.cpp").write_text(
        TINY.replace("return ANSWER", "return half() * 2").replace("extern", "int half();\nextern")
    )
    (tiny / "tiny_half.cpp").write_text('#include "answer.h"\nint half() { return ANSWER / 2; }\n')
    assert build.load("tiny").answer() == 42
    (tiny / "tiny_half.cpp").write_text("int half() { return 4; }\n")
    assert ctypes.CDLL(str(build.build("tiny").path)).answer() == 8
    (tiny / "tiny_half.cpp").write_text("int half() { return four; }\n")
    with pytest.raises(NativeUnavailable, match=r"(?s)the compiler failed: .*tiny_half.cpp.*four"):
        build.build("tiny")
    assert {path.suffix for path in (tiny.parent / "cache").iterdir()} == {".lock", ".so"}


@needs_compiler
def test_a_package_carries_every_variant_and_is_preferred(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.parent / "lib"
    made = build.build_package(folder)
    assert len(made) == len(build.for_this_machine())
    monkeypatch.setattr(build, "PACKAGED", folder)
    monkeypatch.setenv("CXX", "no-such-compiler")
    built = build.build("tiny")
    assert (built.path in made, built.seconds) == (True, 0)
    assert build.load("tiny").answer() == 42


def test_without_a_compiler_the_text_says_what_to_do(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler found: CXX='no-such-compiler' .*or unset CXX"):
        build.load("tiny")


@needs_compiler
def test_flags_the_compiler_refuses_are_told_in_the_first_line(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_NATIVE_FLAGS", "-Werror -fno-such-flag")
    with pytest.raises(NativeUnavailable) as caught:
        build.build("tiny")
    first = str(caught.value).splitlines()[0]
    assert "native library 'tiny': the compiler failed:" in first
    assert "-fno-such-flag" in first.partition("(with")[0]
    assert "(with DS_NATIVE_FLAGS='-Werror -fno-such-flag')" in first
    monkeypatch.setenv("DS_NATIVE_FLAGS", "-DNAME='open")
    with pytest.raises(NativeUnavailable, match=r"DS_NATIVE_FLAGS=.* cannot be split .*: No closing quotation"):
        build.build("tiny")


def test_a_cache_that_is_a_file_is_called_one(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tiny.parent / "file").write_text("")
    monkeypatch.setenv("DS_NATIVE_CACHE", str(tiny.parent / "file"))
    with pytest.raises(NativeUnavailable, match=r"DS_NATIVE_CACHE=\S+/file is a file; set DS_NATIVE_CACHE to a folder"):
        build.build("tiny")


def test_a_broken_compiler_is_quoted(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tiny.parent / "cxx"
    broken.write_text("#!/bin/sh\necho 'internal compiler error' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(NativeUnavailable, match=r"(?s)the compiler failed: .*internal compiler error"):
        build.load("tiny")
    assert not list((tiny.parent / "cache").glob("*.so*tmp"))


def test_optimizers_go_on_without_a_library_and_say_so_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DS_SKIP_CPU_ADAM", "1")
    if hasattr(logging.warning_once, "cache_clear"):
        logging.warning_once.cache_clear()
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    for param in params:
        param.grad = torch.ones(3)
        optimizer = DeepSpeedCPUAdam([param], lr=0.5)
        assert not optimizer.takes_rows([(param, torch.ones(3), None)])
        optimizer.step()
        optimizer.update_from([(param, torch.ones(3, dtype=torch.bfloat16), None)], 1.0)
    assert params[0].tolist() == pytest.approx([0.0] * 3, abs=1e-6)
    text = capsys.readouterr().out
    assert text.count("DeepSpeedCPUAdam uses torch's kernels: op 'cpu_adam': DS_SKIP_CPU_ADAM=1 is set") == 1


# ---- registry


def test_every_op_has_one_way_that_always_works_and_an_existing_reference() -> None:
    for op in OPS.values():
        assert op.implementations[-1].library is None
        assert op.choose() is not None
        assert Implementation("reference", op.reference).load() is not None
        assert op.load() is not None


def test_the_choice_falls_to_the_next_with_the_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_BUILD_CPU_LION", "0")
    first, second = get_op("cpu_lion").candidates()
    assert first[1] == "DS_BUILD_CPU_LION=0 is set"
    assert (second[0].name, second[1]) == ("torch foreach operations", "")
    assert get_op("fused_adam").choose("meta") is None
    with pytest.raises(RuntimeError, match=r"(?s)cannot be used on meta: native kernel: for tensors on the CPU.*torch"):
        get_op("fused_adam").load("meta")
    with pytest.raises(ValueError, match="op 'fused_adma' is unknown; expected one of cpu_adam"):
        get_op("fused_adma")
    assert Op("none", "", (), "").choose() is None


# ---- historical builders


def test_builders_under_their_historical_names() -> None:
    assert set(ALL_OPS) >= {"cpu_adam", "cpu_adagrad", "cpu_lion", "fused_adam", "async_io", "pin_memory"}
    adam = op_builder.CPUAdamBuilder()
    assert adam.is_compatible()
    assert (adam.name, adam.BUILD_VAR) == ("cpu_adam", "DS_BUILD_CPU_ADAM")
    assert adam.absolute_name() == "deepspeed.ops.adam.cpu_adam_op"
    assert adam.sources() == ["native/csrc/optimizers.cpp"]
    assert hasattr(op_builder.AsyncIOBuilder().load(), "aio_handle")
    assert op_builder.ShareMemCommBuilder().load().vector_kernel_level() in (0, 1, 2)
    assert not op_builder.CCLCommBuilder().is_compatible()
    with pytest.raises(ValueError, match=r"CCLCommBuilder: .*init_distributed\('gloo'\)"):
        op_builder.CCLCommBuilder().load()
    missing = op_builder.EvoformerAttnBuilder()
    assert isinstance(missing, op_builder.NotImplementedBuilder)
    assert not missing.is_compatible()
    with pytest.raises(ValueError, match="EvoformerAttnBuilder: this op has not been implemented on the cpu backend"):
        missing.load()
    with pytest.raises(AttributeError, match="NoSuchBuilder"):
        op_builder.NoSuchBuilder  # noqa: B018


@pytest.mark.parametrize("native", (True, False))
def test_functions_of_a_loaded_op_update_as_the_optimizers_do(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        for name in ("CPU_ADAM", "CPU_LION", "CPU_ADAGRAD", "FUSED_ADAM"):
            monkeypatch.setenv(f"DS_SKIP_{name}", "1")
    start, grad = torch.linspace(-1, 1, 50), torch.linspace(1, -2, 50)

    def fresh(states: int) -> list[torch.Tensor]:
        return [start.clone(), grad.clone(), *(torch.zeros(50) for _ in range(states))]

    expected = torch.nn.Parameter(start.clone())
    expected.grad = grad.clone()
    torch.optim.AdamW([expected], lr=0.1, weight_decay=0.01, fused=True).step()
    adam = op_builder.CPUAdamBuilder().load()
    adam.create_adam(3, 0.1, 0.9, 0.999, 1e-8, 0.01, True, False)
    row = fresh(2)
    assert adam.adam_update(3, 1, 0.1, 0.9, 0.999, 1e-8, 0.01, True, *row) == 0
    assert torch.equal(row[0], expected)
    adam.destroy_adam(3)
    many = fresh(2)
    lists = [[many[1]], [many[0]], [many[2]], [many[3]]]
    fused = op_builder.FusedAdamBuilder().load()
    fused.multi_tensor_adam(2048, torch.ones(1), lists, 0.1, 0.9, 0.999, 1e-8, 1, 1, 1, 0.01)
    assert torch.equal(many[0], start)
    fused.multi_tensor_adam(2048, torch.zeros(1), lists, 0.1, 0.9, 0.999, 1e-8, 1, 1, 1, 0.01)
    assert torch.equal(many[0], expected)
    row = fresh(1)
    op_builder.CPULionBuilder().load().lion_update(0, 1, 0.1, 0.9, 0.99, 0.0, *row)
    torch.testing.assert_close(row[0], start - 0.1 * grad.sign())
    row = fresh(1)
    op_builder.CPUAdagradBuilder().load().adagrad_update(0, 1, 0.1, 1e-10, 0.0, *row)
    torch.testing.assert_close(row[0], start - 0.1 * grad / (grad.abs() + 1e-10))


def test_scripts_build_ops_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, 'scripts'); import build_ops; build = build_ops.load_build(); "
        "print('torch' in sys.modules, sorted(build.LIBRARIES))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, env=dict(os.environ), check=True
    )
    assert done.stdout == f"False {sorted(build.LIBRARIES)}\n"
