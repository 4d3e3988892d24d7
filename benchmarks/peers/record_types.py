"""Just enough of msgspec and pydantic for the records of SGLang's plans and routes.

The machine that measures may have neither. Records are built by keyword, and parsed from the plan
tables that the engine ships; their own checks, which those tables pass, are not repeated.
"""

from __future__ import annotations

import sys
import types
import typing
from enum import Enum
from types import ModuleType
from typing import Any

from benchmarks.peers.imports import stand_in

__all__ = ["parsed_models", "plain_structs"]


def plain_structs() -> ModuleType:
    """A module `msgspec` whose `Struct` takes its fields by keyword."""
    return stand_in("msgspec", Struct=_Struct)


def parsed_models() -> ModuleType:
    """A module `pydantic` whose `BaseModel` parses nested dictionaries, enums and lists."""

    def no_check(**_: Any) -> Any:
        return lambda method: method

    return stand_in(
        "pydantic", BaseModel=_Model, ConfigDict=dict, Field=_Field, model_validator=no_check
    )


class _Struct:
    def __init_subclass__(cls, **_: Any) -> None:
        """Options such as frozen are taken and ignored."""

    def __init__(self, **fields: Any) -> None:
        names = type(self).__annotations__
        unknown = fields.keys() - names.keys()
        if unknown:
            raise TypeError(f"{type(self).__name__} has no fields {sorted(unknown)}")
        for name in names:
            if name in fields:
                setattr(self, name, fields[name])
            elif not hasattr(type(self), name):
                raise TypeError(f"{type(self).__name__} needs {name}")


class _Field:
    def __init__(self, *, default_factory: Any) -> None:
        self.default_factory = default_factory


class _Model:
    def __init_subclass__(cls) -> None:
        cls._names = vars(sys.modules[cls.__module__])

    @classmethod
    def model_validate(cls, data: dict[str, Any]) -> Any:
        """The record that the dictionary describes; unknown keys are an error."""
        kinds = typing.get_type_hints(cls, cls._names)
        if data.keys() - kinds.keys():
            raise ValueError(f"{cls.__name__} has no fields {sorted(data.keys() - kinds.keys())}")
        record = cls()
        for name, kind in kinds.items():
            if name in data:
                value = _parse(kind, data[name])
            else:
                value = getattr(cls, name)
                value = value.default_factory() if isinstance(value, _Field) else value
                value = value() if isinstance(value, type) else value
            setattr(record, name, value)
        return record

    def model_dump(self) -> dict[str, Any]:
        return dict(vars(self))


def _parse(kind: Any, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(kind, types.UnionType):
        return _parse(next(k for k in kind.__args__ if k is not types.NoneType), value)
    if typing.get_origin(kind) is list:
        return [_parse(kind.__args__[0], item) for item in value]
    if isinstance(kind, type) and issubclass(kind, _Model):
        return kind.model_validate(value)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    return value
