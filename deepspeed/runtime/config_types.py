"""Value rules of configuration fields: which spellings of a number, a flag or a dtype are taken, and what they become.

Owns the annotated field types (`Integer`, `Size`, `Real`, `Flag`, `FloatDtype`, ...) and the words that name them in
errors and in the reference page. Does not know any section. Invariant: a harmless form is converted (2.0 -> 2,
"true" -> True), a doubtful one (the string "2", 2.5 for a count) is refused with its type named.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

if TYPE_CHECKING:
    import torch

# Canonical name -> other spellings. The canonical names are the ones users write in a config.
DTYPE_SPELLINGS: dict[str, tuple[str, ...]] = {
    "fp32": ("fp32", "float32", "float"),
    "fp16": ("fp16", "float16", "half"),
    "bf16": ("bf16", "bfloat16", "bfloat"),
    "int8": ("int8",),
}
FLOAT_DTYPES = ("fp32", "fp16", "bf16")
_TORCH_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int8": "int8"}


@dataclass(frozen=True)
class Rule:
    """Metadata of a field: how a value is converted before pydantic sees it, and in words what is taken."""

    convert: Callable[[Any], Any]
    text: str
    """Completes "expected ..."; read by error lines and by the reference page."""
    floors: bool = False
    """A size: 943718.4 is taken as 943718, which the reader of a config reports."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Run `convert` before the checks of the annotated type."""
        return core_schema.no_info_before_validator_function(self.convert, handler(source))


def refuse(expected: str) -> PydanticCustomError:
    """The error of a value that no conversion fits; `expected` completes "expected ..."."""
    return PydanticCustomError("ds_value", "expected {expected}", {"expected": expected})


def to_integer(value: Any) -> int:
    """int, an integral float (5e8) or anything with `__index__`; no bool, no string."""
    if isinstance(value, (bool, str)) or value is None:
        raise refuse("integer")
    if isinstance(value, float):
        if not value.is_integer():  # also False for inf and nan
            raise refuse("integer")
        return int(value)
    try:
        return operator.index(value)
    except TypeError:
        raise refuse("integer") from None


def to_size(value: Any) -> int:
    """As `to_integer`, but a finite fraction is floored: sizes are often computed (0.9 * hidden * hidden)."""
    if isinstance(value, float) and math.isfinite(value):
        return math.floor(value)
    return to_integer(value)


def to_real(value: Any) -> float:
    """int or finite float; no bool, no string."""
    if isinstance(value, (bool, str)) or value is None:
        raise refuse("number")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise refuse("number") from None
    if not math.isfinite(number):
        raise refuse("finite number")
    return number


def to_flag(value: Any) -> bool:
    """bool, 0, 1, or the words true/false."""
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, float)) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    raise refuse("true or false")


def dtype_name(value: Any) -> str | None:
    """Canonical name ("bf16") of a dtype given as text ("torch.bfloat16", "BF16") or as a torch dtype; else None."""
    text = str(value).strip().lower().removeprefix("torch.")
    for name, spellings in DTYPE_SPELLINGS.items():
        if text in spellings:
            return name
    return None


def torch_dtype(name: str | None) -> torch.dtype | None:
    """The torch dtype of a canonical name; None stays None. torch is imported here and not with the config."""
    if name is None:
        return None
    import torch

    return getattr(torch, _TORCH_NAMES[name])


def _dtype_rule(allowed: tuple[str, ...]) -> Callable[[Any], str]:
    def convert(value: Any) -> str:
        name = dtype_name(value) if not isinstance(value, (bool, int, float)) else None
        if name not in allowed:
            raise refuse(" or ".join(allowed))
        return str(name)

    return convert


def to_torch_dtype(value: Any) -> Any:
    """A torch dtype from itself or from one of its names (the inference sections hold real dtypes)."""
    name = dtype_name(value)
    if name is None:
        if type(value).__name__ == "dtype":
            return value
        raise refuse("a torch dtype or one of fp32, fp16, bf16, int8 (also torch.float16, half, ...)")
    return torch_dtype(name)


def _words(*allowed: str, upper: bool = False) -> Callable[[Any], str]:
    def convert(value: Any) -> str:
        if isinstance(value, str):
            text = value.strip().upper() if upper else value.strip().lower()
            if text in allowed:
                return text
        raise refuse("one of " + ", ".join(allowed))

    return convert


def lower_word(*allowed: str) -> Rule:
    """A text field that takes these words in any case and keeps them in lower case."""
    return Rule(_words(*allowed), "one of " + ", ".join(allowed))


def upper_word(*allowed: str) -> Rule:
    """A text field that takes these words in any case and keeps them in upper case."""
    return Rule(_words(*allowed, upper=True), "one of " + ", ".join(allowed) + " (any case)")


def to_text_list(value: Any) -> list[str]:
    """A list of strings without repetition, in order; a bare string counts as one entry."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, (list, tuple, set)) or not all(isinstance(item, str) for item in items):
        raise refuse("list of strings")
    return list(dict.fromkeys(items))


Integer = Annotated[int, Rule(to_integer, "integer")]
Size = Annotated[int, Rule(to_size, "integer", floors=True)]
Real = Annotated[float, Rule(to_real, "number")]
Flag = Annotated[bool, Rule(to_flag, "true or false")]
TextList = Annotated[list[str], Rule(to_text_list, "list of strings")]
FloatDtype = Annotated[str, Rule(_dtype_rule(FLOAT_DTYPES), "fp32, fp16 or bf16")]
AnyDtype = Annotated[str, Rule(_dtype_rule((*FLOAT_DTYPES, "int8")), "fp32, fp16, bf16 or int8")]
TorchDtype = Annotated[Any, Rule(to_torch_dtype, "torch dtype or its name")]
