"""Signatures as text, made the same way on both sides: `scripts/reference_signatures.py` writes the reference's, the
tests write ours, and :func:`differences` says what a caller of the one would stumble over with the other.

Owns: the text form, the rule of comparison. Does not own: which names are compared and which differences are meant
(`test_signatures.py`, `signature_differences.toml`). Invariant: imports nothing of any `deepspeed`, for the script
loads this file with the reference's interpreter.
"""

from __future__ import annotations

import ast
import datetime
import enum
import inspect
import types
from pathlib import Path
from typing import Any

OPAQUE = "(*args, **kwargs)"
"""A signature that says nothing: it is no contract, and nothing is compared with it."""
_PLAIN = (str, bytes, int, float, bool, type(None))


def default_text(value: Any) -> str:
    """A default as an expression; `...` for an object that has no value of its own, or one of this machine."""
    if isinstance(value, (str, list)) and str(Path.home()) in str(value):
        return "..."
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if type(value).__name__ in ("RedOpType", "ReduceOp", "dtype", "device"):  # of torch
        return str(value).replace("RedOpType", "ReduceOp")
    if isinstance(value, float) and value != value:
        return "nan"
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, set):
        return f"set({sorted(map(str, value))})"
    if isinstance(value, (list, tuple)):
        return repr(type(value)(value)) if all(isinstance(item, _PLAIN) for item in value) else "..."
    if isinstance(value, dict):
        return "{}" if not value else "..."
    if isinstance(value, datetime.timedelta):
        return f"timedelta(seconds={value.total_seconds():g})"
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return value.__name__ if value.__name__.isidentifier() else "..."
    return "..."


def signature_text(thing: Any, bound: bool = False) -> str:
    """`(a, b=1, *, c=None, **rest)` of a callable without annotations; `bound`: without the first parameter too."""
    parts, star = [], False
    parameters = list(inspect.signature(thing).parameters.values())[1 if bound else 0 :]
    for place, parameter in enumerate(parameters):
        if parameter.kind is parameter.VAR_POSITIONAL:
            star = True
            parts.append(f"*{parameter.name}")
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            parts.append(f"**{parameter.name}")
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            star = True
            parts.append("*")
        plain = parameter.default is parameter.empty
        parts.append(parameter.name if plain else f"{parameter.name}={default_text(parameter.default)}")
        last_of_kind = place + 1 == len(parameters) or parameters[place + 1].kind is not parameter.POSITIONAL_ONLY
        if parameter.kind is parameter.POSITIONAL_ONLY and last_of_kind:
            parts.append("/")
    return f"({', '.join(parts)})"


def unwrapped(thing: Any) -> Any:
    """What a decorator without `functools.wraps` hides: the named function in the closure of `f(*args, **kwargs)`."""
    for _ in range(5):
        if not inspect.isfunction(thing) or signature_text(thing) not in (OPAQUE, "(self, *args, **kwargs)"):
            break
        inner = [cell.cell_contents for cell in thing.__closure__ or () if inspect.isfunction(cell.cell_contents)]
        named = [function for function in inner if "<locals>" not in function.__qualname__] or inner
        if len(named) != 1:
            break
        thing = named[0]
    return thing


# ---- comparison ----------------------------------------------------------------------------------------------------

_NONE_GIVEN = ("None", "{}", "[]", "()")  # as a default: the caller gave none


def _parse(text: str) -> ast.arguments:
    statement = ast.parse(f"def f{text}: ...").body[0]
    assert isinstance(statement, ast.FunctionDef)
    return statement.args


def _defaults(arguments: ast.arguments) -> dict[str, str]:
    """Parameter -> its default as text, for those that have one."""
    positional = [*arguments.posonlyargs, *arguments.args]
    late = zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults, strict=True)
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return {arg.arg: ast.unparse(value) for arg, value in (*late, *named) if value is not None}


def _same_default(ours: str, theirs: str) -> bool:
    if "..." in (ours, theirs) or ours == theirs or (ours in _NONE_GIVEN and theirs in _NONE_GIVEN):
        return True
    try:
        mine, asked = ast.literal_eval(ours), ast.literal_eval(theirs)
    except ValueError:
        return False
    return bool(tuple(mine) == tuple(asked) if isinstance(asked, list) and isinstance(mine, tuple) else mine == asked)


def differences(ours: str, theirs: str) -> list[str]:
    """What a call written for `theirs` meets with `ours`; further parameters of ours may follow, with defaults."""
    if theirs == OPAQUE:
        return []
    mine, asked = _parse(ours), _parse(theirs)
    places = [argument.arg for argument in (*mine.posonlyargs, *mine.args)]
    keywords = {argument.arg for argument in (*mine.args, *mine.kwonlyargs)}
    defaults, wanted = _defaults(mine), _defaults(asked)
    problems = []
    for place, argument in enumerate((*asked.posonlyargs, *asked.args)):
        found = places[place] if place < len(places) else None
        if found == argument.arg or (found is not None and argument in asked.posonlyargs):
            continue
        if found is not None:
            problems.append(f"parameter {place} is {found}, wanted {argument.arg}")
        elif mine.vararg is None:
            accepted = argument.arg in keywords or mine.kwarg is not None
            problems.append(f"takes {argument.arg} by keyword alone" if accepted else f"takes no {argument.arg}")
    problems += [f"takes no {a.arg}" for a in asked.kwonlyargs if a.arg not in keywords and mine.kwarg is None]
    for name, default in wanted.items():
        if name in (*places, *keywords) and not _same_default(defaults.get(name, "nothing"), default):
            problems.append(f"{name} defaults to {defaults.get(name, 'nothing')}, wanted {default}")
    if asked.vararg is not None and mine.vararg is None:
        problems.append("takes no further positions")
    if asked.kwarg is not None and mine.kwarg is None:
        problems.append("takes no further keywords")
    known = {argument.arg for argument in (*asked.posonlyargs, *asked.args, *asked.kwonlyargs)}
    needed = [name for name in (*places[len(asked.args) + len(asked.posonlyargs) :],) if name not in defaults]
    needed += [a.arg for a, value in zip(mine.kwonlyargs, mine.kw_defaults, strict=True) if value is None]
    problems += [f"needs {name}" for name in needed if name not in known]
    return problems
