"""Initial values under zero.Init: bits, generator state and side effects are those of torch."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.native import build, isa
from deepspeed.native.build import NativeUnavailable, find_compiler
from deepspeed.runtime.zero import init_draws
from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Context

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler here")
LAWS = {"uniform": ((0.0, 1.0), (-0.03125, 0.03125), (-0.1234567, 0.3456789), (1.0, 1.0 + 2.0**-20), (5.0, 5.0),
                    (-0.0, 0.5), (-0.0, 0.0)),
        "normal": ((0.0, 1.0), (0.0, 0.02), (-0.1234567, 0.3456789), (3.0, 0.0), (-0.0, 0.0))}  # fmt: skip
# Around the 624 words of the generator, the 16 values of a group, the vectors and the runs of the library.
NUMELS = (0, 1, 15, 16, 17, 31, 40, 608, 623, 624, 625, 1247, 1248, 2047, 2048, 2049, 2064, 40_000, 3, 100_003)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Of each operation that may be drawn by the library, in order: whether it was. Small tensors are, too."""
    seen: list[bool] = []
    fill, known = init_draws._fill, init_draws._kernel

    def spy(*args: Any, **kwargs: Any) -> bool:
        seen.append(fill(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(init_draws, "_WORTH_IT", 0)
    monkeypatch.setattr(init_draws, "_fill", spy)
    known.cache_clear()
    yield seen
    known.cache_clear()


def by_both(draw: Callable[[], Any]) -> tuple[Any, Any]:
    """What ``draw`` gives by torch and in a context; the generator is left in the same state."""
    torch.manual_seed(3)
    right, state = draw(), torch.get_rng_state()
    torch.manual_seed(3)
    with Context():
        found = draw()
    assert torch.equal(torch.get_rng_state(), state)
    return right, found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers, of which 0 and -0 are two."""
    return tensor.view(torch.uint8)


def available(law: str, dtype: torch.dtype = torch.float32) -> bool:
    there = init_draws._kernel(law, dtype) is not None
    if find_compiler() and isa.choose().name == "avx2" and torch.backends.cpu.get_cpu_capability() == "AVX2":
        assert there  # elsewhere torch may draw in another way, and is left to it
    return there


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("law", LAWS)
def test_bits_and_state_are_those_of_torch(law: str, dtype: torch.dtype, drawn: list[bool]) -> None:
    def draw() -> list[torch.Tensor]:
        values = []
        for numbers in LAWS[law]:
            for numel in NUMELS:
                values.append(getattr(torch.full((numel,), 7.0, dtype=dtype), f"{law}_")(*numbers))
                values += [torch.randperm(5), torch.randn(numel % 3, dtype=torch.float64), torch.rand(numel % 5)]
        return values

    right, found = by_both(draw)
    assert [torch.equal(bits(a), bits(b)) for a, b in zip(found, right, strict=True)] == [True] * len(right)
    taken = [available(law, dtype) and (law == "uniform" or numel >= 16) for numel in NUMELS] * len(LAWS[law])
    assert drawn == taken


def test_modules_and_functions_of_nn_init(drawn: list[bool]) -> None:
    def draw() -> list[torch.Tensor]:
        linear = nn.Linear(40, 50)
        parts: list[nn.Module] = [
            linear, nn.Embedding(20, 30), nn.Conv2d(4, 8, 3), nn.LSTM(8, 8), nn.MultiheadAttention(8, 2),
            nn.Bilinear(5, 6, 7),
        ]  # fmt: skip
        weight = linear.weight
        made = [param.detach().clone() for part in parts for param in part.parameters()]
        for fill in (
            nn.init.uniform_, nn.init.normal_, nn.init.xavier_uniform_, nn.init.xavier_normal_,
            nn.init.kaiming_uniform_, nn.init.kaiming_normal_, nn.init.trunc_normal_, nn.init.orthogonal_,
        ):  # fmt: skip
            assert fill(weight) is weight
            made.append(weight.detach().clone())
        nn.init.kaiming_uniform_(tensor=weight, a=2, mode="fan_out", nonlinearity="relu")
        with torch.no_grad():
            weight[:20].uniform_(to=3)
            weight.data.t().normal_(std=2)  # not contiguous
        return [*made, weight.detach().clone(), torch.tensor(weight._version)]

    right, found = by_both(draw)
    assert [torch.equal(a, b) for a, b in zip(found, right, strict=True)] == [True] * len(right)
    assert len(drawn) > 20
    assert drawn[-2:] == [available("uniform"), False]


def test_what_torch_does_around_a_draw_it_still_does(drawn: list[bool]) -> None:
    generator = torch.Generator()

    def draw() -> list[torch.Tensor]:
        leaf = torch.ones(64, requires_grad=True)
        with pytest.raises(RuntimeError, match="leaf Variable"):
            leaf.uniform_()
        with pytest.raises(RuntimeError, match="expects to return a"):
            torch.empty(64).uniform_(2, 1)
        with pytest.raises(RuntimeError, match="out of bounds"):
            torch.empty(64).uniform_(float("nan"), 1)
        with pytest.raises(RuntimeError, match="std >= 0"):
            torch.empty(64).normal_(0, -1)
        inner = leaf * 2
        inner.uniform_()  # a step of the graph, whose gradient is 0
        (inner * inner).sum().backward()
        assert leaf.grad is not None
        base = torch.zeros(128)
        base[64:].normal_()
        own = torch.empty(64).uniform_(-1, 1, generator=generator.manual_seed(5))
        wide = torch.empty(64, dtype=torch.float64).normal_()
        large = torch.empty(64).uniform_(-1e30, 1e30)
        return [leaf.grad, inner.detach(), base, own, generator.get_state(), wide, large, torch.tensor(base._version)]

    right, found = by_both(draw)
    assert [torch.equal(a, b) for a, b in zip(found, right, strict=True)] == [True] * len(right)
    assert drawn[-5:] == [available("uniform"), available("normal"), available("uniform"), False, False]


def test_modes_and_classes_that_watch_operations_see_them(drawn: list[bool]) -> None:
    class Watch(TorchDispatchMode):
        seen: list[str] = []

    def watch(self: Watch, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})

    Watch.__torch_dispatch__ = watch  # type: ignore[assignment,method-assign]
    with Context(), Watch():
        nn.Linear(20, 20)
    with Watch(), Context():
        nn.Linear(20, 20)
    assert Watch.seen.count("uniform_") == 4
    assert True not in drawn
    with Context():
        assert nn.Linear(20, 20, device="meta").weight.is_meta
    assert True not in drawn
    # As a method of the class torch would load the compiler for it.
    assert init_draws._Draws.__torch_dispatch__ is init_draws._dispatch


def test_small_tensors_never_enter_a_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init_draws, "_Draws", None)
    with Context():
        nn.Linear(100, 100)
        with pytest.raises(TypeError, match="NoneType"):
            nn.Linear(400, 400)


def test_contexts_nested_and_left_by_errors(drawn: list[bool]) -> None:
    def draw() -> torch.Tensor:
        with Context(), contextlib.suppress(ZeroDivisionError), Context():
            nn.Linear(30, 30)
            raise ZeroDivisionError
        return nn.Linear(30, 30).weight.detach()

    right, found = by_both(draw)
    assert torch.equal(found, right)
    expected = [available("uniform")] * 6  # of the first call only those in its own contexts
    assert drawn == expected
    nn.Linear(30, 30)
    assert drawn == expected
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0


def test_values_another_thread_has_drawn_meanwhile_are_not_drawn_again(
    drawn: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not available("uniform"):
        pytest.skip("torch draws here")
    kernel = init_draws._kernel("uniform", torch.float32)
    assert kernel is not None
    stolen: list[torch.Tensor] = []

    def interrupted(*args: Any) -> bool:
        stolen.append(torch.rand(100))  # as another thread would while the library draws
        return kernel(*args)

    monkeypatch.setattr(init_draws, "_kernel", lambda law, dtype: interrupted)
    torch.manual_seed(3)
    right = torch.rand(200)
    torch.manual_seed(3)
    with Context():
        found = torch.empty(100).uniform_()
    assert torch.equal(torch.cat([stolen[0], found]), right)
    assert drawn == [False]


def test_the_compiler_sees_torch_alone(drawn: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a library is nothing it could trace: it would warn, or refuse under ``fullgraph``."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    right, found = by_both(lambda: torch.empty(3000).normal_(0.0, 0.1))
    assert torch.equal(found, right)
    assert drawn == []


def test_16_bit_numbers_are_drawn_where_fp32_ones_are(drawn: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Few of them show that torch rounds once more than the library: a short comparison proves nothing."""
    monkeypatch.setattr(init_draws, "_as_torch", lambda kernel, law, dtype: dtype is not torch.float32)
    right, found = by_both(lambda: torch.empty(3000, dtype=torch.bfloat16).uniform_(-1.0, 0.3))
    assert torch.equal(found, right)
    assert drawn == [False]


@pytest.mark.parametrize("why", ("switched off", "draws otherwise", "fails"))
def test_without_the_library_torch_draws(why: str, drawn: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(init_draws.logger, "debug", lambda text, *args: lines.append(text % args))
    if why == "switched off":
        monkeypatch.setattr(build, "_loaded", {})
        monkeypatch.setenv("DS_SKIP_DRAWS", "1")
    else:
        result = int(why == "fails")
        library = SimpleNamespace(ds_uniform=lambda *args: result, ds_normal=lambda *args: result)
        monkeypatch.setattr(init_draws, "load", lambda name: library)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        right, found = by_both(lambda: nn.Linear(30, 30).weight.detach())
    assert torch.equal(found, right)
    assert drawn == [False, False]
    assert len(lines) == 1
    assert ("DS_SKIP_DRAWS=1" if why == "switched off" else "draws otherwise") in lines[0]


def test_a_library_that_cannot_be_built_is_told(
    drawn: list[bool], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(name: str) -> None:
        raise NativeUnavailable("no C++ compiler found, that time")

    monkeypatch.setattr(init_draws, "load", missing)
    right, found = by_both(lambda: nn.Linear(30, 30).weight.detach())
    assert torch.equal(found, right)
    lines = [record for record in caplog.records if "drawn by torch" in record.getMessage()]
    assert [record.levelname for record in lines] == ["WARNING"]
    assert "no C++ compiler found, that time" in lines[0].getMessage()
