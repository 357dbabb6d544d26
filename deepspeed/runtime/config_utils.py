"""Base of every configuration section, and small readers clients import.

Owns `DeepSpeedConfigModel` (pydantic v2: unknown keys refused, "auto" dropped, deprecated fields moved to their new
names, read-only once the config is resolved) and the moving of deprecated fields. Errors of a section built directly
are pydantic's; `deepspeed.runtime.config` gathers them over all sections. Invariant: a section never changes the
mapping it is built from.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, ClassVar, NoReturn, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, PrivateAttr, field_serializer
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, PydanticKnownError, core_schema

from deepspeed.runtime.config_problems import DeepSpeedConfigError, Problem, show
from deepspeed.runtime.config_types import Rule

AUTO = "auto"
"""Placeholder that a wrapper (the Hugging Face integration) replaces before training starts."""

MODEL_CONFIG = ConfigDict(
    validate_default=True,
    validate_assignment=True,
    use_enum_values=True,
    populate_by_name=True,
    extra="forbid",
    arbitrary_types_allowed=True,
    protected_namespaces=(),
)


class DeepSpeedConfigModel(BaseModel):
    """One section of a config; a docstring under each field is its reference entry.

    A field is deprecated when its `json_schema_extra` holds `deprecated: True`; further keys there: `new_param` (dotted
    name of the field that replaces it), `new_param_fn` (converts the value), `set_new_param` (False: only warn) and
    `deprecated_msg` (text added to the warning).
    """

    model_config = MODEL_CONFIG

    keeps_unknown_keys: ClassVar[bool] = False
    """True where the reference ignores unknown keys: they are kept and named, and only a near miss is refused."""

    free_keys: ClassVar[bool] = False
    """True where further keys are passed on to another library and none is unknown."""

    run_time_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields that training fills in; they stay writable after `freeze`."""

    _frozen: bool = PrivateAttr(False)

    def __init__(self, strict: bool = False, **data: Any) -> None:
        """Build from keywords; entries equal to "auto" fall back to the default unless `strict`.

        Raises:
            TypeError: `strict` is no bool: a mapping goes in as keywords.
            pydantic.ValidationError: a field is unknown or has a value it does not take.
            DeepSpeedConfigError: a deprecated field is set together with its replacement.
        """
        if not isinstance(strict, bool):
            name = type(self).__name__
            raise TypeError(f"{name}: found {show(strict)} as `strict`, expected a bool; write {name}(**values)")
        if not strict:
            data = {key: value for key, value in data.items() if not drops_auto(type(self), key, value)}
        for move in list(deprecated_moves(type(self), data)):
            if move.clash or move.refused:
                raise DeepSpeedConfigError(move.message(""))
            data = move.apply(data)
            _warn(move.message(type(self).__name__ + "."))
        super().__init__(**data)

    @classmethod
    def explain_unknown_key(cls, key: str, value: Any) -> Problem | None:
        """What to say about an unknown key when the section knows better than the general rule."""
        return None

    def freeze(self) -> None:
        """Make this section and the sections below it read-only, but for `run_time_fields`."""
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, DeepSpeedConfigModel):
                value.freeze()
            elif isinstance(value, list):
                for item in value:
                    if isinstance(item, DeepSpeedConfigModel):
                        item.freeze()
        self._frozen = True

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign and validate; refused on a frozen section."""
        if name in type(self).model_fields and self._frozen and name not in self.run_time_fields:
            _refuse_assignment(type(self).__name__, name)
        super().__setattr__(name, value)

    @field_serializer("dtype", when_used="json", check_fields=False)
    def serialize_torch_dtype(self, value: Any) -> Any:
        """A torch dtype is written to JSON as its text, `torch.bfloat16`."""
        return str(value) if type(value).__name__ == "dtype" else value


def _refuse_assignment(section: str, name: str) -> NoReturn:
    raise AttributeError(
        f"{section}.{name} is read-only: the engine was built from it. Change the config passed to initialize()."
    )


def _warn(message: str) -> None:
    from deepspeed.utils.logging import logger  # logging is set up only when something is said

    logger.warning(message)


def drops_auto(model: type[BaseModel], key: str, value: Any) -> bool:
    """Whether `value` is the placeholder "auto" and `key` does not have "auto" as a meaning of its own."""
    if not (isinstance(value, str) and value == AUTO):
        return False
    found = find_field(model, key)
    return found is None or found[1].default != AUTO


def find_field(model: type[BaseModel], key: str) -> tuple[str, FieldInfo] | None:
    """The field that `key` (a field name or an alias) stands for."""
    fields = model.model_fields
    if key in fields:
        return key, fields[key]
    return next(((name, field) for name, field in fields.items() if field.alias == key), None)


def field_metadata(field: FieldInfo) -> Mapping[str, Any]:
    """The `json_schema_extra` of a field as a mapping (empty when it has none)."""
    extra = field.json_schema_extra
    return extra if isinstance(extra, dict) else {}


@dataclass(frozen=True)
class DeprecatedMove:
    """A deprecated key found in the input, and where its value goes."""

    old: str
    """Key as written."""
    new: tuple[str, ...]
    """Keys from the section down to the replacement, spelled as the input spells them; empty when nothing does."""
    value: Any
    """Converted value."""
    sets_new: bool
    """Whether the value is carried over."""
    clash: bool
    """Whether the replacement is set as well."""
    refused: str
    """What the deprecated key takes, when its value is something else; empty otherwise."""
    note: str
    """Extra text of the deprecation."""

    def message(self, prefix: str) -> str:
        """The one line that names both keys, each after `prefix` (a key path with its dot, or nothing)."""
        new = prefix + ".".join(self.new)
        if self.refused:
            text = f"{prefix}{self.old}: found {show(self.value)}; expected {self.refused}"
        elif self.clash:
            text = (
                f"{prefix}{self.old} is deprecated and {new} replaces it, but both are set; remove {prefix}{self.old}"
            )
        elif not self.new:
            text = f"{prefix}{self.old} is deprecated and has no effect."
        elif self.sets_new:
            text = f"{prefix}{self.old} is deprecated: use {new}, which it sets."
        else:
            text = f"{prefix}{self.old} is deprecated and has no effect: use {new}."
        return f"{text} {self.note}".rstrip()

    def apply(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """`data` without the old key and, if the value is carried over, with the new one set."""
        out = {key: value for key, value in data.items() if key != self.old}
        if self.new and self.sets_new and not self.clash and not self.refused:
            block = out
            for name in self.new[:-1]:
                inner = block.get(name)
                block[name] = dict(inner) if isinstance(inner, Mapping) else {}
                block = block[name]
            block[self.new[-1]] = self.value
        return out


def deprecated_moves(model: type[BaseModel], data: Mapping[str, Any]) -> Iterator[DeprecatedMove]:
    """The deprecated keys present in `data`, in order."""
    for key, value in data.items():
        found = find_field(model, key) if isinstance(key, str) else None
        extra = field_metadata(found[1]) if found else {}
        if not extra.get("deprecated"):
            continue
        names = str(extra["new_param"]).split(".") if extra.get("new_param") else []
        spelled, taken = _spelled(model, data, names)
        convert: Callable[[Any], Any] = extra.get("new_param_fn") or (lambda same: same)
        sets_new = bool(extra.get("set_new_param", True))
        value, refused = _checked(found[1] if found else None, value)
        yield DeprecatedMove(
            old=key,
            new=spelled,
            value=value if refused else convert(value),
            refused=refused,
            sets_new=sets_new,
            clash=taken and sets_new,
            note=str(extra.get("deprecated_msg", "")),
        )


def _checked(field: FieldInfo | None, value: Any) -> tuple[Any, str]:
    """`value` converted as the field converts it, and what the field takes if that is not possible."""
    rule = next((item for item in field_rules(field) if isinstance(item, Rule)), None) if field is not None else None
    if rule is None or value is None:
        return value, ""
    try:
        return rule.convert(value), ""
    except PydanticCustomError:
        return value, rule.text


def field_rules(field: FieldInfo) -> list[Any]:
    """Metadata in the annotation of a field, through optional and annotated types."""
    found: list[Any] = list(field.metadata)
    pending = [field.annotation]
    while pending:
        annotation = pending.pop()
        if get_origin(annotation) is Annotated:
            for item in getattr(annotation, "__metadata__", ()):
                found += item.metadata if isinstance(item, FieldInfo) else [item]
        if get_origin(annotation) in (Annotated, Union, UnionType):
            pending += get_args(annotation)
    return found


def _spelled(model: type[BaseModel], data: Mapping[str, Any], names: list[str]) -> tuple[tuple[str, ...], bool]:
    """`names` with each level spelled as `data` spells it (name or alias), and whether the last one is set."""
    spelled: list[str] = []
    current: type[BaseModel] | None = model
    block: Any = data
    for name in names:
        field = current.model_fields.get(name) if current is not None else None
        alias = field.alias if field is not None and field.alias else name
        spelled.append(alias if isinstance(block, Mapping) and alias in block else name)
        block = block.get(spelled[-1]) if isinstance(block, Mapping) else None
        current = nested_model(field) if field is not None else None
    return tuple(spelled), bool(names) and block is not None


@dataclass(frozen=True)
class LazySection:
    """Metadata of a field whose section class is imported only when a config has the section."""

    module: str
    name: str

    def load(self) -> type[DeepSpeedConfigModel]:
        """The section class."""
        return getattr(importlib.import_module(self.module), self.name)

    def build(self, value: Any) -> DeepSpeedConfigModel:
        """The section from a mapping, or as it is."""
        model = self.load()
        if isinstance(value, model):
            return value
        if not isinstance(value, Mapping):
            raise PydanticKnownError("dict_type")
        return model(**value)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Build the section when it is met."""
        return core_schema.no_info_plain_validator_function(self.build)


def lazy_section(module: str, name: str) -> Any:
    """Annotation of a section class that is imported when first needed; most configs have few sections."""
    return Annotated[Any, LazySection(module, name)]


def nested_model(field: FieldInfo) -> type[DeepSpeedConfigModel] | None:
    """The section class of a field that holds one (also `Section | None` and `bool | Section`)."""
    lazy = next((item for item in field.metadata if isinstance(item, LazySection)), None)
    return lazy.load() if lazy else next(iter(_models(field.annotation)), None)


def _models(annotation: Any) -> Iterator[type[DeepSpeedConfigModel]]:
    if isinstance(annotation, type) and issubclass(annotation, DeepSpeedConfigModel):
        yield annotation
    elif get_origin(annotation) is Annotated:
        for item in annotation.__metadata__:
            if isinstance(item, LazySection):
                yield item.load()
        yield from _models(annotation.__origin__)
    elif get_origin(annotation) not in (list, dict, tuple):
        for inner in get_args(annotation):
            yield from _models(inner)


# ---- readers and helpers that client code imports ----


class DeepSpeedConfigObject:
    """Plain attribute holder that prints as JSON."""

    def repr(self) -> dict[str, Any]:
        """Attributes as a dictionary."""
        return self.__dict__

    def __repr__(self) -> str:
        """Attributes as indented JSON."""
        return json.dumps(self.__dict__, indent=4, default=str)


class ScientificNotationEncoder(json.JSONEncoder):
    """JSON with numbers from 1000 up in scientific notation, mappings indented by four blanks."""

    def iterencode(self, o: Any, _one_shot: bool = False, level: int = 0) -> Iterator[str]:
        """The text of `o`, in one piece."""
        indent = self.indent if isinstance(self.indent, int) else 4
        if isinstance(o, bool) or o is None:
            return iter((json.dumps(o),))
        if isinstance(o, (int, float)):
            return iter((f"{o:e}" if o > 1e3 else f"{o}",))
        if isinstance(o, Mapping):
            pad = " " * (level + 1) * indent
            rows = [f'{pad}"{key}": {"".join(self.iterencode(value, level=level + 1))}' for key, value in o.items()]
            return iter(("{\n" + ", \n".join(rows) + "\n" + " " * level * indent + "}",))
        if isinstance(o, (list, tuple)):
            return iter(("[" + ", ".join("".join(self.iterencode(value, level=level + 1)) for value in o) + "]",))
        return super().iterencode(o, _one_shot)


class pp_int(int):
    """An int that prints with thousands separators, or as a given text."""

    _text: str | None

    def __new__(cls, val: int, custom_print_str: str | None = None) -> pp_int:
        """An int equal to `val` that prints as `custom_print_str` if given."""
        number = super().__new__(cls, val)
        number._text = custom_print_str
        return number

    def __repr__(self) -> str:
        """`1,000,000`, or the given text."""
        return self._text or f"{int(self):,}"


def get_scalar_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    """`param_dict[param_name]`, or the default when absent."""
    return param_dict.get(param_name, param_default_value)


def get_list_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    """`param_dict[param_name]`, or the default when absent."""
    return param_dict.get(param_name, param_default_value)


def get_dict_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    """`param_dict[param_name]`, or the default when absent."""
    return param_dict.get(param_name, param_default_value)


def get_config_default(config: type[BaseModel], field_name: str) -> Any:
    """Default of a field.

    Raises:
        KeyError: no such field.
        ValueError: the field is required.
    """
    fields = config.model_fields
    if field_name not in fields:
        raise KeyError(f"{field_name} is not a field of {config.__name__}; its fields are {', '.join(fields)}")
    if fields[field_name].is_required():
        raise ValueError(f"{config.__name__}.{field_name} is required and has no default")
    return fields[field_name].get_default(call_default_factory=True)


def dict_raise_error_on_duplicate_keys(ordered_pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook` for JSON readers that refuses a key given twice in one object.

    Raises:
        ValueError: names the keys.
    """
    counts: dict[str, int] = {}
    for key, _ in ordered_pairs:
        counts[key] = counts.get(key, 0) + 1
    twice = [key for key, count in counts.items() if count > 1]
    if twice:
        raise ValueError(f"Duplicate keys in DeepSpeed config: {twice}; keep one of each")
    return dict(ordered_pairs)
