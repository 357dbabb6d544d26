"""Named random streams, their seeds, and snapshots for recomputation."""

from __future__ import annotations

import pytest
import torch

from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint, configure, get_cuda_rng_tracker
from deepspeed.runtime.activation_checkpointing.rng import RngSnapshot


class Unit:
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def get_tensor_model_parallel_rank(self) -> int:
        return self._rank

    def get_tensor_model_parallel_world_size(self) -> int:
        return 4

    def get_tensor_model_parallel_group(self) -> None:
        return None


def first_draw(seed: int) -> float:
    return float(torch.rand((), generator=torch.Generator().manual_seed(seed)))


def fork_draw(name: str | None = None) -> float:
    with get_cuda_rng_tracker().fork(*([name] if name else [])):
        return float(torch.rand(()))


@pytest.mark.parametrize("rank", (0, 2))
def test_model_parallel_seed(rank: int) -> None:
    configure(Unit(rank))
    checkpointing.model_parallel_cuda_manual_seed(7)
    assert float(torch.rand(())) == first_draw(7)
    assert fork_draw() == first_draw(7 + 2718 + rank)
    checkpointing.model_parallel_reconfigure_tp_seed(11)
    assert fork_draw() == first_draw(11 + 2718 + rank)


def test_stream_goes_on_where_it_stopped_and_leaves_the_default_alone() -> None:
    tracker = get_cuda_rng_tracker()
    tracker.add("mine", 5)
    generator = torch.Generator().manual_seed(5)
    expected = [float(torch.rand((), generator=generator)) for _ in range(3)]
    torch.manual_seed(1)
    drawn = [fork_draw("mine") for _ in range(3)]
    assert drawn == expected
    assert float(torch.rand(())) == first_draw(1)


def test_stream_state_is_kept_when_the_body_fails() -> None:
    tracker = get_cuda_rng_tracker()
    tracker.add("mine", 5)
    torch.manual_seed(1)

    def failing_draw() -> None:
        with tracker.fork("mine"):
            torch.rand(1)
            raise KeyError

    with pytest.raises(KeyError):
        failing_draw()
    assert float(torch.rand(())) == first_draw(1)


def test_taken_names_and_seeds_are_refused() -> None:
    tracker = get_cuda_rng_tracker()
    tracker.add("mine", 5)
    with pytest.raises(ValueError, match="'other': seed 5 already exists"):
        tracker.add("other", 5)
    with pytest.raises(ValueError, match="'mine' already exists"):
        tracker.add("mine", 6)
    with pytest.raises(ValueError, match=r"'none' is not added; existing: \['mine'\]"), tracker.fork("none"):
        pass


def test_states_can_be_saved_and_put_back() -> None:
    tracker = get_cuda_rng_tracker()
    tracker.add("mine", 5)
    saved = tracker.get_states()
    first = fork_draw("mine")
    assert fork_draw("mine") != first
    tracker.set_states(saved)
    assert fork_draw("mine") == first


def test_historical_private_names() -> None:
    assert checkpointing._CUDA_RNG_STATE_TRACKER is get_cuda_rng_tracker()
    assert checkpointing._MODEL_PARALLEL_RNG_TRACKER_NAME == "model-parallel-rng"
    state = torch.get_rng_state()
    first = torch.rand(1)
    checkpointing._set_cuda_rng_state(state)
    assert torch.equal(torch.rand(1), first)


def test_recomputation_repeats_draws_from_streams() -> None:
    checkpointing.model_parallel_cuda_manual_seed(3)
    drawn: list[tuple[float, ...]] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        drawn.append((float(torch.rand(())), fork_draw(), float(torch.rand(())), fork_draw()))
        return x.sin()

    out = checkpoint(function, torch.ones(2, requires_grad=True)).sum()
    between = (float(torch.rand(())), fork_draw())
    out.backward()
    after = (float(torch.rand(())), fork_draw())
    assert drawn[0] == drawn[1]
    # Backward draws nothing of its own: the numbers go on as if it had not been.
    checkpointing.model_parallel_cuda_manual_seed(3)
    function(torch.ones(2))
    assert (float(torch.rand(())), fork_draw()) == between
    assert (float(torch.rand(())), fork_draw()) == after


def test_snapshot_replays_and_returns() -> None:
    snapshot = RngSnapshot.take()
    first = torch.rand(2)
    with snapshot.replay():
        assert torch.equal(torch.rand(2), first)
    second = torch.rand(2)
    snapshot.set()
    assert torch.equal(torch.rand(2), first)
    assert torch.equal(torch.rand(2), second)
