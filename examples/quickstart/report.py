"""What the quickstart shows: tables on the terminal and `report.png`.

Owns: wording, tables, the picture. Does not own: any number; they are handed in.
Invariant: called on rank 0 alone, contains no collective.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checks import STATE_KINDS, Export, ResumeCheck, StageMemory
from data import Corpus
from rich.console import Console
from rich.table import Table

_BLOCKS = "▁▂▃▄▅▆▇█"


def sized(nbytes: float) -> str:
    """Bytes in the largest unit of which there is at least one: ``0 B``, ``1.5 KiB``, ``23.0 MiB``."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 1024**power:
            return f"{nbytes / 1024**power:,.1f} {unit}"
    return f"{nbytes:.0f} B"


def smoothed(values: Sequence[float], window: int = 10) -> list[float]:
    """Mean of the last `window` values at each place."""
    return [sum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def sparkline(values: Sequence[float], width: int = 72) -> str:
    """The values as one line of block characters, for terminals and where matplotlib is not installed."""
    if not values:
        return ""
    picked = [values[i * len(values) // width] for i in range(width)] if len(values) > width else list(values)
    low, high = min(picked), max(picked)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] for value in picked)


def show_start(engine: Any, corpus: Corpus, options: argparse.Namespace, steps: int) -> None:
    """The start-up table. Shown after the first step, when every state exists and its bytes have been measured."""
    facts = engine.summary()
    batch, dtypes, nbytes = facts["batch"], facts["dtypes"], facts["model_state_bytes"]
    table = Table(show_header=False)
    size = f"{facts['parameters']['total'] / 1e6:.1f}M parameters, {options.layers} layers of width {options.width}"
    table.add_row("model", f"{size}, one token a byte")
    table.add_row("text", corpus.source)
    table.add_row("run", f"{steps} steps of {batch['train_batch_size']} x {options.context} bytes on {engine.device}")
    table.add_row(
        "batch",
        f"{batch['train_batch_size']} = {batch['micro_batch_per_gpu']} per rank and micro-step "
        f"x {batch['gradient_accumulation_steps']} micro-steps x {batch['data_parallel_size']} ranks",
    )
    table.add_row("ZeRO stage", str(facts["stage"]))
    for kind, dtype in dtypes.items():
        table.add_row(f"dtype of {kind}", dtype)
    table.add_row("parallel sizes", ", ".join(f"{axis} {size}" for axis, size in facts["parallel"].items()))
    for which in ("expected", "measured"):
        parts = ", ".join(f"{kind} {sized(nbytes[which][kind])}" for kind in STATE_KINDS)
        total = sized(sum(nbytes[which][kind] for kind in STATE_KINDS))
        table.add_row(f"bytes per rank, {which}", f"{total} = {parts}")
    away = {kind: nbytes["measured"][kind] for kind in ("host", "disk") if nbytes["measured"].get(kind)}
    if away:
        table.add_row("offloaded", ", ".join(f"{sized(size)} on {kind}" for kind, size in away.items()))
    gathered = nbytes["measured"].get("gathered", 0)
    if gathered:
        table.add_row("gathered on top", f"{sized(gathered)} of whole weights, at the end of backward and step")
    Console(highlight=False).print(table)


def show_end(
    history: Any,
    held_out: float,
    text: str,
    resumed: ResumeCheck,
    exported: Export,
    memory: Sequence[StageMemory],
    options: argparse.Namespace,
) -> None:
    console = Console(highlight=False, soft_wrap=True)
    last = smoothed(history.losses)[-1]
    console.print(
        f"\nloss    {history.losses[0]:.3f} -> {last:.3f} nats per byte (mean of the last 10 steps); "
        f"held-out text {held_out:.3f} ({held_out / math.log(2):.2f} bits per byte)"
    )
    console.print(f"        {sparkline(history.losses)}\n")
    console.print(memory_table(memory))
    console.print(resume_table(resumed))
    console.print("the model writes:")
    console.print(text, markup=False)
    picture = draw(history.losses, held_out, memory, options.out / "report.png")
    where = picture or "not drawn: matplotlib is not installed (pip install matplotlib)"
    console.print(f"\nreport      {where}\ncheckpoint  {resumed.checkpoint}", markup=False)
    console.print(
        f"export      {exported.path} ({sized(exported.path.stat().st_size)}); "
        f"held-out loss of a plain PyTorch module that loaded it: {exported.held_out:.6f} "
        f"(the engine's: {held_out:.6f})",
        markup=False,
    )


def memory_table(memory: Sequence[StageMemory]) -> Table:
    title = "model states per rank: parameters, gradients, master copies, optimizer states; gathered weights on top"
    table = Table(title=title, title_justify="left")
    headings = ["ZeRO stage", "formula", "measured", "ratio", "gathered"]
    away = any(row.offloaded for row in memory)
    headings += ["offloaded"] if away else []
    for heading in headings:
        table.add_column(heading, justify="right")
    table.add_column("of")
    ratios = [row.measured / row.expected if row.expected else None for row in memory]
    for row, ratio in zip(memory, ratios, strict=True):
        source = "this training run" if row.trained else "a fresh model"
        columns = ["-" if ratio is None else f"{ratio:.2f}", sized(row.gathered) if row.gathered else "-"]
        columns += [sized(row.offloaded) if row.offloaded else "-"] if away else []
        table.add_row(str(row.stage), sized(row.expected), sized(row.measured), *columns, source)
    notes = []
    if any(ratio is not None and ratio < 0.995 for ratio in ratios):
        notes.append("ratio below 1: whole gradients are given back while they are reduced; the formula has them all")
    if away:
        notes.append("offloaded: in host memory and files, which formula and measured leave out")
    table.caption, table.caption_justify = "\n".join(notes) or None, "left"
    return table


def resume_table(resumed: ResumeCheck) -> Table:
    verdict = "identical to the last bit" if resumed.identical else "DIFFERENT"
    title = f"resume in new processes: {verdict}"
    columns = [resumed.continued, resumed.resumed]
    headings = ["loss", "this run, going on", "new processes, resumed"]
    if resumed.alone is not None:
        title += f"; on 1 rank: within {resumed.difference:.1e}"
        columns.append(resumed.alone)
        headings.append("one process, resumed")
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading)
    for i, losses in enumerate(zip(*columns, strict=True), start=1):
        table.add_row(f"step +{i}", *(f"{loss:.9f}  {bits(loss)}" for loss in losses))
    return table


def bits(value: float) -> str:
    """The exact value in base 16, without trailing zeros: 2.5 is 0x1.4p+1."""
    if not math.isfinite(value):
        return str(value)
    mantissa, exponent = value.hex().split("p")
    return f"{mantissa.rstrip('0').rstrip('.')}p{exponent}"


def draw(losses: Sequence[float], held_out: float, memory: Sequence[StageMemory], path: Path) -> Path | None:
    """Loss curve and bytes per rank as a PNG. Returns its path, or None where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")  # draws into a file on machines without a display
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    curve, bars = figure.subplots(1, 2)
    steps = range(1, len(losses) + 1)
    curve.plot(steps, losses, color="#b9cde5", linewidth=1, label="each step")
    curve.plot(steps, smoothed(losses), color="#1f4e8c", linewidth=1.8, label="mean of 10 steps")
    curve.axhline(held_out, color="#c2571a", linewidth=1, linestyle="--", label=f"held-out text: {held_out:.2f}")
    curve.set(title="Training loss", xlabel="step", ylabel="cross entropy, nats per byte")
    curve.legend(frameon=False)
    places = range(len(memory))
    formula = [row.expected / 2**20 for row in memory]
    measured = [row.measured / 2**20 for row in memory]
    bars.bar([place - 0.2 for place in places], formula, width=0.38, color="#b9cde5", label="formula")
    drawn = bars.bar([place + 0.2 for place in places], measured, width=0.38, color="#1f4e8c", label="measured")
    bars.bar_label(drawn, fmt="%.0f", fontsize=8, label_type="center", color="white")
    if any(row.gathered for row in memory):
        gathered = [row.gathered / 2**20 for row in memory]
        style = {"width": 0.38, "color": "white", "edgecolor": "#1f4e8c", "hatch": "///", "linewidth": 0.8}
        right = [place + 0.2 for place in places]
        bars.bar(right, gathered, bottom=measured, label="gathered weights, on top", **style)
    bars.set(title="Model states per rank", xlabel="ZeRO stage", ylabel="MiB")
    bars.set_xticks(list(places), [str(row.stage) for row in memory])
    bars.legend(frameon=False)
    for axes in (curve, bars):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path
