"""One pass over a config: walk, validate, check, and say everything there is to say.

Owns the order of the steps, the boolean form of `zero_optimization`, and the two problems that need the whole config
(keys left "auto", unknown keys under strictness). Does not own any rule itself. Invariant: nothing is raised here;
problems are gathered so that one error can carry all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from deepspeed.runtime.config_batch import BatchTriple, resolve_batch
from deepspeed.runtime.config_checks import cross_problems
from deepspeed.runtime.config_problems import Problem
from deepspeed.runtime.config_report import Report
from deepspeed.runtime.config_schema import BATCH_KEYS, ConfigSections
from deepspeed.runtime.config_source import LoadedConfig
from deepspeed.runtime.config_walk import NEEDS_A_WRAPPER, clean, validate
from deepspeed.runtime.feature_status import missing_features, switched_on

STRICT_VARIABLE = "DS_CONFIG_STRICT"


def read_config(loaded: LoadedConfig, *, strict: bool, partial: bool) -> tuple[ConfigSections | None, Report]:
    """Sections with wrong values left at their defaults, and everything there is to say."""
    report = Report()
    data = _without_bool_zero(loaded.data, report)
    cleaned = clean(ConfigSections, data, "", report)
    refused = switched_on(cleaned)
    sections = validate(ConfigSections, cleaned, report)
    for problem in refused:
        report.problems.append(replace(problem, path=report.written(problem.path)))
        report.taint(problem.path)
    if report.unfilled:
        if partial:
            report.auto_keys += report.unfilled
            for key in report.unfilled:
                report.taint(key)  # its value comes later: no rule can say anything about it yet, nor miss it
        else:
            report.problems.append(_unfilled(report))
    if strict:
        report.problems += [
            Problem(key, "unknown key", f"remove it or unset {STRICT_VARIABLE}") for key in report.unknown_keys
        ]
    if sections is not None:
        for problem in [*missing_features(sections), *cross_problems(sections)]:
            report.add(replace(problem, path=report.written(problem.path)))
    return sections, report


def _unfilled(report: Report) -> Problem:
    owners = sorted({NEEDS_A_WRAPPER[key] for key in report.unfilled})
    keys = ", ".join(report.unfilled)
    for key in report.unfilled:
        report.taint(key)
    return Problem(
        keys,
        f'found "auto"; expected a value: {"; ".join(owners)}',
        "without it, write the values into the config",
        wrong_type=any(key in BATCH_KEYS for key in report.unfilled),
    )


def _without_bool_zero(data: Mapping[str, Any], report: Report) -> Mapping[str, Any]:
    """The deprecated form `"zero_optimization": true|false` as a section."""
    wanted = data.get("zero_optimization")
    if not isinstance(wanted, bool):
        return data
    section: dict[str, Any] = {"stage": int(wanted)}
    if "allgather_size" in data:
        section["allgather_bucket_size"] = data["allgather_size"]
        report.spelling["zero_optimization.allgather_bucket_size"] = "allgather_size"
    report.deprecations.append(
        f"zero_optimization: {str(wanted).lower()} is deprecated: use zero_optimization.stage, which it sets to "
        f"{int(wanted)}"
    )
    return {**{key: value for key, value in data.items() if key != "allgather_size"}, "zero_optimization": section}


def fill_batch(sections: ConfigSections | None, report: Report, ranks: int) -> BatchTriple | None:
    if sections is None or any(report.is_tainted(key) for key in BATCH_KEYS):
        return None
    result = resolve_batch(
        sections.train_batch_size,
        sections.train_micro_batch_size_per_gpu,
        sections.gradient_accumulation_steps,
        ranks,
    )
    if isinstance(result, Problem):
        report.problems.append(result)
        return None
    return result
