"""What a universal folder holds: one record in ``zero/optimizer_state.pt``, plain data, besides the historical keys.

Two historical *forms* of the files of one parameter exist; this release writes and reads both:

    whole    {"param": tensor in its shape, "cat_dim": 0, ...}, and a step.pt      read by stages 1 and 2 of DeepSpeed
    flat     the bare tensor, 1D; the step stands in optimizer_state.pt            read by its stage 3

The record says what each parameter has, so that a file that is gone is noticed and nothing has to be guessed.
Folders of other releases have no record; ``universal/foreign.py`` makes one of what they do say.

Owns: the form of the record. Does not own: files (``universal/write.py``, ``universal/reader.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint.errors import CheckpointError

WHOLE, FLAT = "whole", "flat"


@dataclass
class UniversalParameter:
    """A parameter in a universal folder.

    ``states``: key -> how it relates to the parameter (``runtime/zero/state_dict.py``); ``files``: key -> file stem
    where that is not the key itself; ``values``: states that have no file, by their value. ``group`` None: no optimizer
    holds it.
    """

    shape: tuple[int, ...]
    dtype: str
    master_dtype: str
    group: int | None = None
    states: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def stem(self, key: str) -> str:
        return self.files.get(key, key)

    def stems(self) -> list[str]:
        """The files it has, in the order they were written."""
        return [keys.FP32_WEIGHT_KEY, *(self.stem(key) for key in self.states if key not in self.values)]


@dataclass
class UniversalRecord:
    """See the module docstring. ``optimizer``: names of the class and its bases, most special first."""

    form: str
    zero_stage: int
    optimizer: list[str]
    parameters: dict[str, UniversalParameter]
    shared: dict[str, str] = field(default_factory=dict)
    extra: dict[Any, Any] = field(default_factory=dict)

    def as_data(self) -> dict[str, Any]:
        return {"version": keys.UNIVERSAL_RECORD_VERSION, **asdict(self)}

    @classmethod
    def from_data(cls, data: dict[str, Any], where: object) -> UniversalRecord:
        """Raises CheckpointError for a version this release cannot read, or a damaged record."""
        try:
            if data["version"] != keys.UNIVERSAL_RECORD_VERSION:
                raise CheckpointError(
                    f"{where}: universal record version {data['version']!r}; this release reads version "
                    f"{keys.UNIVERSAL_RECORD_VERSION}"
                )
            parameters = {
                name: UniversalParameter(**{**entry, "shape": tuple(entry["shape"])})
                for name, entry in data["parameters"].items()
            }
            rest = {key: data[key] for key in ("form", "zero_stage", "optimizer", "shared", "extra")}
            return cls(parameters=parameters, **rest)
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{where}: {keys.UNIVERSAL_RECORD!r} is damaged: {error!r}") from error


def safe_stem(key: str, taken: Iterable[str]) -> str:
    """A file name for a state: its key, unless that is no file name or is taken."""
    plain = isinstance(key, str) and key.isidentifier() and len(key) < 100 and key != keys.FP32_WEIGHT_KEY
    used = set(taken)
    if plain and key not in used:
        return key
    number = 0
    while f"state_{number}" in used:
        number += 1
    return f"state_{number}"
