"""Which known settings ask for something this version cannot do yet.

Owns one table: a row is removed when its feature lands. A setting is refused only where it would change what happens:
`enabled: false` blocks and settings without effect at the chosen stage are not asked for. Invariant: a known key of a
feature that is not there is refused by name, never accepted in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepspeed.runtime.config_problems import Problem, show
from deepspeed.runtime.optimizer_config import ONEBIT_OPTIMIZERS

if TYPE_CHECKING:
    from deepspeed.runtime.config_schema import ConfigSections


@dataclass(frozen=True)
class MissingFeature:
    """One setting that is refused."""

    path: str
    """Dotted path of the key, by field names."""
    asked: Callable[[ConfigSections], bool]
    """Whether the config asks for it."""
    what: str
    """What is missing, in one line."""
    change: str
    """What to set instead."""
    section: str | None = None
    """The section that is all about the feature, where there is one."""


def _on(*path: str) -> Callable[[ConfigSections], bool]:
    """The section at `path` is present and enabled."""

    def asked(sections: ConfigSections) -> bool:
        value: Any = sections
        for name in path:
            value = getattr(value, name)
            if value is None:
                return False
        return bool(value.enabled)

    return asked


def _zero(sections: ConfigSections) -> Any:
    return sections.zero_optimization


def _stage3(test: Callable[[Any], bool]) -> Callable[[ConfigSections], bool]:
    return lambda sections: _zero(sections).stage == 3 and test(_zero(sections))


def _writer(test: Callable[[Any], bool]) -> Callable[[ConfigSections], bool]:
    return lambda sections: sections.checkpoint.writer is not None and test(sections.checkpoint.writer)


def _row(path: str, asked: Callable[[ConfigSections], bool], what: str, change: str) -> MissingFeature:
    return MissingFeature(path, asked, what, change)


def _switch(path: str, what: str, key: str = "enabled") -> MissingFeature:
    change = f"set {path}.{key} to false or remove {path}"
    return MissingFeature(f"{path}.{key}", _on(*path.split(".")), what, change, section=path)


MISSING_FEATURES: tuple[MissingFeature, ...] = (
    _row(
        "optimizer.type",
        lambda s: s.optimizer is not None and s.optimizer.name in ONEBIT_OPTIMIZERS,
        "1-bit optimizers",
        "use Adam, AdamW or Lamb",
    ),
    _row(
        "optimizer.params.per_head_muon",
        lambda s: s.optimizer is not None and bool((s.optimizer.params or {}).get("per_head_muon")),
        "orthogonalization per attention head",
        "use false: whole matrices are orthogonalized",
    ),
    _row(
        "tensor_parallel.autotp_size",
        lambda s: s.tensor_parallel is not None and s.tensor_parallel.autotp_size > 1,
        "automatic tensor parallelism",
        "use 0",
    ),
    _row(
        "pipeline.stages",
        lambda s: isinstance(s.pipeline.stages, int) and s.pipeline.stages > 1,
        "pipeline parallelism",
        'use "auto" or 1',
    ),
    _switch("expert_parallel", "automatic expert parallelism"),
    _row("compile.deepcompile", lambda s: s.compile.deepcompile, "DeepCompile", "use false; torch.compile works"),
    _row("compile.passes", lambda s: bool(s.compile.passes), "graph passes", "remove it; torch.compile works"),
    _row("compile.autoep_non_moe", lambda s: s.compile.autoep_non_moe, "AutoEP compilation", "use false"),
    _row("graph_harvesting", lambda s: s.graph_harvesting, "capture of the step in a CUDA graph", "use false"),
    _switch("tensorboard", "the TensorBoard monitor"),
    _switch("wandb", "the Weights & Biases monitor"),
    _switch("csv_monitor", "the CSV monitor"),
    _switch("comet", "the Comet monitor"),
    _switch("flops_profiler", "the flops profiler"),
    _switch("data_efficiency", "data efficiency (curriculum, dynamic batches, random-LTD)"),
    _switch("curriculum_learning", "the sequence-length curriculum"),
    _switch("autotuning", "autotuning"),
    _switch("elasticity", "elastic batch sizes"),
    _switch("hybrid_engine", "the hybrid engine"),
    _switch("amp", "Apex AMP (use fp16, bf16 or torch_autocast)"),
    _switch("progressive_layer_drop", "progressive layer dropping"),
    _switch("quantize_training.eigenvalue", "eigenvalue estimation"),
    _row(
        "eigenvalue",
        lambda s: bool(s.eigenvalue and s.eigenvalue.get("enabled")),
        "eigenvalue estimation",
        "remove it",
    ),
    _row("sparse_attention", lambda s: s.sparse_attention is not None, "block-sparse attention", "remove it"),
    MissingFeature(
        "compression_training",
        lambda s: s.compression_training is not None and s.compression_training.any_enabled,
        "compression",
        "remove it",
        section="compression_training",
    ),
    _row(
        "weight_quantization",
        lambda s: s.weight_quantization is not None and s.weight_quantization.enabled,
        "weight quantization",
        "remove it or set weight_quantization.enabled to false",
    ),
    _row("checkpoint.writer.type", _writer(lambda w: w.type == "MOCK"), "writing nothing", "use FAST or PYTHON"),
    _row(
        "checkpoint.writer.data_parallel",
        _writer(lambda w: w.data_parallel is not None),
        "several ranks writing one file (each writes its own)",
        "remove it",
    ),
    _switch("nebula", "Nebula checkpoints"),
    _row("datastates_ckpt", lambda s: s.datastates_ckpt is not False, "DataStates checkpoints", "remove it"),
)


def switched_on(data: Mapping[str, Any]) -> list[Problem]:
    """A problem for every section in `data` that switches on what is not there, whatever else is wrong in it.

    Asked before values are checked: a section with a key missing is left out of the checked ones, and whoever added
    the key would only then be told that the feature is not there.
    """
    found = []
    for row in MISSING_FEATURES:
        section: Any = data if row.section else None
        for name in (row.section or "").split("."):
            section = section.get(name) if isinstance(section, Mapping) else None
        if row.path == row.section and _compresses(section):
            found.append(_refusal(row, "a section"))
        elif row.path != row.section and _is_on(section):
            found.append(_refusal(row, show(True)))
    return found


def _is_on(section: Any) -> bool:
    return isinstance(section, Mapping) and section.get("enabled") is True


def _compresses(section: Any) -> bool:
    """Whether the written `compression_training` switches on one of its methods."""
    methods = section.values() if isinstance(section, Mapping) else ()
    return any(
        _is_on(method) or (isinstance(method, Mapping) and _is_on(method.get("shared_parameters")))
        for method in methods
    )


def missing_features(sections: ConfigSections) -> list[Problem]:
    """A problem for every setting that asks for something this version cannot do yet."""
    problems = []
    for row in MISSING_FEATURES:
        if row.asked(sections):
            value: Any = sections
            for name in row.path.split("."):
                value = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
            problems.append(_refusal(row, show(value) if not hasattr(value, "model_fields_set") else "a section"))
    return problems


def _refusal(row: MissingFeature, found: str) -> Problem:
    return Problem(row.path, f"found {found}; not available in this version: {row.what}", row.change, keys=(row.path,))
