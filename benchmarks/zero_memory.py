"""Bytes of model states per rank at every instant of a step, ZeRO stages 0 to 3 on 1, 2 and 4 ranks.

    python benchmarks/zero_memory.py [--ranks 1 2 4] [--json FILE]

Owns: the formula of each stage, the measurement, the verdict. Does not own: anything in the package; only the public
API is used, so the same code measures deepspeed 0.19.8 where its environment exists (see `peers.py`).

How it measures. Each rank trains a stack of square Linear layers on one row of input for a few steps, so that
activations are about a thousandth of the weights. torch's allocator counts the bytes in use over all threads, and its
profiler records that count at every allocation; the highest inside a step is the peak: nothing that lives between two
samples is missed, temporary or not. It contains what the formula does not: buckets, temporary copies, allocations of
the collectives. Between the phases (forward, backward, step) the distinct storages of all live tensors are summed as
well; both ways must agree there.

Verdict: the peak is at most the formula + 1 %, or + 2 buckets (of `reduce_bucket_size` gradient elements). Stage 3 runs
with settings that release every block of parameters after use; there it is at most the formula + 1 % + 2 blocks, of
gathered weights or of gradients on their way. A block is as large as a bucket here, and at stage 3 four times as large
as below it: what travels at a time is at least 128 KiB whatever the bucket.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from peers import free_port, reference_python

ADAM_STATES = 2  # exp_avg and exp_avg_sq, fp32
STEPS = 3  # the first creates the states; every one counts
GATHERED_BLOCKS = 2  # at a time, at stage 3: the one in use and the one before or after it
TIMEOUT_S = 1800
# Stage 3 lets go of every block as soon as it may: what is measured is the least it needs, not what it may keep.
RELEASED = {
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 0,
}


@dataclass(frozen=True)
class Case:
    """One configuration. `width`² parameters per layer; a bucket holds one layer's gradients. `torch_adam`: torch's
    AdamW as it comes, in place of what the package takes for the name."""

    ranks: int
    stage: int
    dtype: str
    width: int
    layers: int
    torch_adam: bool = False

    @property
    def numel(self) -> int:
        return self.layers * self.width**2

    @property
    def bucket_numel(self) -> int:
        return self.width**2

    @property
    def item(self) -> int:
        """Bytes of one weight or gradient element."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def bucket_nbytes(self) -> int:
        return self.bucket_numel * self.item

    @property
    def activation_nbytes(self) -> int:
        """One row into every layer and out of the last, kept for backward; the loss works on a fp32 copy of that."""
        return (self.layers + 1) * self.width * self.item + 2 * self.width * 4


@dataclass(frozen=True)
class Row:
    """Bytes of the rank that holds most, less the activations. `peak_phase`: where the peak was; `held`: most at the
    end of a phase, by walking live tensors; `walk_error`: largest difference of that walk and the allocation record."""

    case: Case
    formula: int
    peak: int
    peak_phase: str
    held: int
    walk_error: int

    @property
    def ratio(self) -> float:
        return self.peak / self.formula

    @property
    def excess_buckets(self) -> float:
        return (self.peak - self.formula) / self.case.bucket_nbytes

    @property
    def reached(self) -> bool:
        above = self.peak - self.formula
        if self.case.stage == 3 and self.case.ranks > 1:
            return above <= 0.01 * self.formula + GATHERED_BLOCKS * self.case.bucket_nbytes
        return above <= 0.01 * self.formula or above <= 2.0 * self.case.bucket_nbytes


def formula(case: Case) -> int:
    """Bytes of parameters, gradients, masters and Adam states of one rank.

    Mixed precision (Rajbhandari et al., 2020): 2 + 2 + 12 bytes a parameter, of which stage 1 shards the 12 (master and
    states), stage 2 also the gradient and stage 3 all. In fp32 the parameter is its own master: 4 + 4 + 8.
    """
    shards = case.ranks
    parameter = case.item / (shards if case.stage >= 3 else 1)
    master = 0 if case.dtype == "fp32" else 4
    state = master + 4 * ADAM_STATES
    gradient = case.item / (shards if case.stage >= 2 else 1)
    return round(case.numel * (parameter + gradient + state / (shards if case.stage >= 1 else 1)))


# ---- in a rank -------------------------------------------------------------------------------------------------------


def live_storages() -> dict[int, int]:
    """Address -> bytes of the distinct storages of all live tensors of this process."""
    import torch

    gc.collect()
    sizes: dict[int, int] = {}
    with torch._C.DisableTorchFunctionSubclass():  # looking at a sharded parameter must not gather it
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor):
                # A gradient nobody has looked at has no Python object of its own.
                for tensor in (thing, thing.grad if thing.is_leaf else None):
                    if tensor is not None:
                        storage = tensor.untyped_storage()
                        sizes[storage.data_ptr()] = storage.nbytes()
    return sizes


def build_engine(case: Case) -> Any:
    import torch

    import deepspeed

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": case.torch_adam}},
        "zero_optimization": {
            "stage": case.stage,
            "reduce_bucket_size": case.bucket_numel,
            "allgather_bucket_size": case.bucket_numel,
            "overlap_comm": False,
            **(RELEASED if case.stage == 3 else {}),
        },
    }
    if case.dtype != "fp32":
        config[case.dtype] = {"enabled": True}
    torch.manual_seed(0)
    layers = [torch.nn.Linear(case.width, case.width, bias=False) for _ in range(case.layers)]
    return deepspeed.initialize(model=torch.nn.Sequential(*layers), config=config)[0]


def run_steps(case: Case, mark: str) -> list[int]:
    """A few steps, each phase under its name in the profile. Returns the bytes of all live storages after each phase,
    beginning with the one before the model exists."""
    import torch
    from torch.profiler import record_function

    walked = []

    def walk() -> None:
        walked.append(sum(live_storages().values()))
        torch.empty(1)  # so that the allocator's count is on record here

    gc.collect()
    with record_function(f"{mark}before"):
        walk()
    with record_function(f"{mark}build"):
        engine = build_engine(case)
    walk()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[case.dtype]
    row = torch.randn(1, case.width, dtype=dtype)
    for _ in range(STEPS):
        with record_function(f"{mark}forward"):
            loss = engine(row).float().square().mean()
        walk()
        with record_function(f"{mark}backward"):
            engine.backward(loss)
        walk()
        with record_function(f"{mark}step"):
            engine.step()
        walk()
    with record_function(f"{mark}end"):
        engine.destroy()
    return walked


def count_in_all_threads() -> None:
    """Have torch's allocator count what every thread allocates and releases, not only those that are profiled.

    A tensor of a collective may be released by gloo's own thread, where no profiler runs.
    """
    import torch

    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def read_trace(events: list[dict[str, Any]], mark: str) -> list[tuple[str, int, int]]:
    """Per phase whose name begins with `mark`, in order of time: (name, highest bytes inside it, bytes after it).

    After it: at the last allocation before the next phase, which `run_steps` makes when it has walked.
    Raises RuntimeError when the trace lacks phases.
    """
    totals = sorted(
        (event["ts"], event["args"]["Total Allocated"])
        for event in events
        if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0
    )
    phases = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"].removeprefix(mark))
        for event in events
        if event.get("ph") == "X" and event.get("cat") == "user_annotation" and event["name"].startswith(mark)
    )
    if not phases or phases[-1][2] != "end":
        raise RuntimeError(f"zero_memory: the trace lacks phases of {mark!r}: found {[name for *_, name in phases]}")
    found = []
    for (start, end, name), (following, *_) in itertools.pairwise(phases):
        inside = [total for when, total in totals if start <= when <= end]
        before = [total for when, total in totals if when < following]
        found.append((name, max(inside, default=before[-1]), before[-1]))
    return found


def rank_main(cases: list[Case], results: Path) -> None:
    """What each rank runs: every case, one after the other; writes its numbers to `results`."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import torch
    from torch.profiler import ProfilerActivity, profile

    import deepspeed

    torch.set_num_threads(1)
    gc.disable()  # garbage in cycles goes at the same places in every run: where we walk
    count_in_all_threads()
    deepspeed.init_distributed(dist_backend="gloo")
    marks = [f"case {i}: " for i in range(len(cases))]
    # One record for all cases: making one costs seconds.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        walks = [run_steps(case, mark) for case, mark in zip(cases, marks, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    measured = []
    for walked, mark in zip(walks, marks, strict=True):
        phases = read_trace(events, mark)
        recorded_before = phases[0][2]  # what the package itself keeps
        peak, phase = max((peak - recorded_before, name) for name, peak, _ in phases[2:])
        sums = [total - walked[0] for total in walked]
        held = max(sums)
        errors = [abs(total - (end - recorded_before)) for total, (_, _, end) in zip(sums, phases, strict=True)]
        measured.append({"peak": peak, "peak_phase": phase, "held": held, "walk_error": max(errors)})
    results.with_suffix(f".{os.environ['RANK']}").write_text(json.dumps(measured))
    torch.distributed.destroy_process_group()


# ---- the parent ------------------------------------------------------------------------------------------------------


def measure(python: str, cases: list[Case]) -> list[Row]:
    """Run `cases` (all of the same number of ranks) under interpreter `python`; the rank with most bytes counts."""
    ranks = cases[0].ranks
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "result")
        given = json.dumps([asdict(case) for case in cases])
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        common["OMP_NUM_THREADS"] = "1"
        started = [
            subprocess.Popen(
                [python, __file__, "--rank-results", str(results), "--rank-cases", given],
                env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(ranks)
        ]
        try:
            outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in started]
        finally:
            for process in started:
                process.kill()
        for rank, (process, output) in enumerate(zip(started, outputs, strict=True)):
            if process.returncode:
                raise RuntimeError(f"rank {rank} of {ranks} ended with code {process.returncode}:\n{output}")
        by_rank = [json.loads(results.with_suffix(f".{rank}").read_text()) for rank in range(ranks)]
    rows = []
    for case, *numbers in zip(cases, *by_rank, strict=True):
        largest = max(numbers, key=lambda number: number["peak"])
        largest["peak"] -= case.activation_nbytes
        rows.append(Row(case, formula(case), **largest))
    return rows


def markdown(rows: list[Row], reference: list[Row] | None) -> str:
    """The table of docs/zero.md, of some rows."""
    heads = ["ranks", "dtype", "stage", "formula, B/parameter", "peak, B/parameter", "ratio", "above formula, buckets"]
    heads += ["at", "held between phases, B/parameter"]
    heads += ["deepspeed 0.19.8 peak"] if reference else []
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for i, row in enumerate(rows):
        per = row.case.numel
        cells = [str(row.case.ranks), row.case.dtype, str(row.case.stage), f"{row.formula / per:.2f}"]
        cells += [f"{row.peak / per:.2f}", f"{row.ratio:.3f}", f"{row.excess_buckets:+.2f}", row.peak_phase]
        cells += [f"{row.held / per:.2f}"]
        cells += [f"{reference[i].peak / per:.2f}"] if reference else []
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--dtypes", nargs="+", choices=("fp32", "bf16", "fp16"), default=["fp32", "bf16"])
    parser.add_argument("--width", type=int, default=512, help="of each square layer; twice that at stage 3")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--json", type=Path, help="write all numbers there too")
    parser.add_argument("--rank-results", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank-cases", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank_results:
        rank_main([Case(**case) for case in json.loads(options.rank_cases)], options.rank_results)
        return 0
    peer = reference_python()
    rows: list[Row] = []
    reference: list[Row] = []
    for ranks in options.ranks:
        cases = [
            Case(ranks, stage, dtype, options.width * (2 if stage == 3 else 1), options.layers)
            for dtype in options.dtypes
            for stage in options.stages
        ]
        ours = measure(sys.executable, cases)
        # torch's own Adam: the peer would have to compile its one first.
        theirs = measure(peer, [replace(case, torch_adam=True) for case in cases]) if peer else []
        table = markdown(ours, theirs or None)
        print(table if not rows else table.split("\n", 2)[2], flush=True)
        rows, reference = rows + ours, reference + theirs
    missed = [row for row in rows if not row.reached]
    lost = [row for row in rows if row.walk_error > row.case.bucket_nbytes]
    if lost:  # a release went unseen, or a tensor did: the peak says nothing
        raise RuntimeError(f"walk and record differ by more than a bucket, measure again: {[row.case for row in lost]}")
    worst_error = max(row.walk_error / row.case.numel for row in rows)
    print(f"\n{len(rows) - len(missed)} of {len(rows)} within the formula + 1 % or (stage 3: and) + 2 buckets")
    print(f"walk of live tensors and allocation record differ by at most {worst_error:.4f} B/parameter")
    if options.json:
        named = {"ours": rows, "reference": reference}
        numbers = {name: [asdict(row) for row in some] for name, some in named.items()}
        options.json.write_text(json.dumps(numbers, indent=1))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
