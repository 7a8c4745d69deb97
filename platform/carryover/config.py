"""Strict configuration: frozen pydantic models, YAML files, and `--set a.b=c` overrides."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from carryover.errors import ConfigError


class Config(BaseModel):
    """Base of every configuration: unknown keys are refused, values cannot change."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _keep_what_the_default_sets(cls, values: Any) -> Any:
        """Let a section that is given in part differ from its field's default in that part alone.

        Without this, one key of a section would put all others back to what they are elsewhere.
        """
        if not isinstance(values, Mapping):
            return values
        return {
            name: _filled(value, cls.model_fields[name].default)
            if name in cls.model_fields
            else value
            for name, value in values.items()
        }

    @classmethod
    def load(cls, path: str | Path | None = None, *, overrides: Iterable[str] = ()) -> Self:
        """Read a YAML file, apply `a.b=c` overrides in order, and validate.

        Args:
            path: a YAML file whose top level is a mapping; None starts from the defaults.
            overrides: dotted assignments; values are parsed as YAML, list items by index.

        Raises:
            ConfigError: the file is missing or malformed, or a key or value is not valid.
        """
        values = {} if path is None else read_yaml(path)
        for override in overrides:
            _assign(values, override)
        return cls.parse(values, source="the command line" if path is None else str(path))

    @classmethod
    def parse(cls, values: Mapping[str, Any], *, source: str = "configuration") -> Self:
        """Validate a mapping.

        Raises:
            ConfigError: lists every wrong key and value, with the nearest valid name.
        """
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            lines = [_explain(cls, problem) for problem in error.errors()]
            raise ConfigError(f"{source} is not valid:\n" + "\n".join(lines)) from None

    def to_yaml(self) -> str:
        """Return the resolved configuration, defaults included, as YAML."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _filled(value: Any, default: Any) -> Any:
    """A mapping with what a default section sets and it does not."""
    if not (isinstance(value, Mapping) and isinstance(default, Config)):
        return value
    own = {name: getattr(default, name) for name in default.model_fields_set}
    merged = {name: _filled(value[name], own[name]) for name in own.keys() & value.keys()}
    return {**own, **value, **merged}


class _UniqueKeyLoader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                line = key_node.start_mark.line + 1
                raise yaml.YAMLError(f"the key {key!r} appears twice (line {line})")
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read one YAML mapping, refusing repeated keys.

    Raises:
        ConfigError: no such file, or not a YAML mapping.
    """
    path = Path(path)
    if not path.is_file():
        siblings = (
            sorted(str(p) for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        )
        known = f"; {path.parent} holds: {', '.join(siblings)}" if siblings else ""
        raise ConfigError(f"no configuration file at {path}{known}")
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} must hold a mapping at its top level, got {type(values).__name__}"
        )
    return values


def _assign(values: dict[str, Any], override: str) -> None:
    dotted, separator, text = override.partition("=")
    if not separator or not dotted.strip():
        raise ConfigError(
            f"--set takes key=value, got {override!r}; for example --set optimizer.lr=1e-3"
        )
    try:
        value = yaml.safe_load(text) if text else ""
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override!r}: the value is not valid YAML: {error}") from None
    keys = dotted.strip().split(".")
    node: Any = values
    for key in keys[:-1]:
        if isinstance(node, list):
            node = node[_index(node, key, override)]
            continue
        if node.get(key) is None:
            node[key] = {}
        node = node[key]
        if not isinstance(node, dict | list):
            raise ConfigError(f"--set {override!r}: {key!r} holds a value and has no keys below it")
    if isinstance(node, list):
        node[_index(node, keys[-1], override)] = value
    else:
        node[keys[-1]] = value


def _index(node: list, key: str, override: str) -> int:
    if not key.isdecimal() or int(key) >= len(node):
        raise ConfigError(
            f"--set {override!r}: {key!r} is not an index of a list with {len(node)} items"
        )
    return int(key)


def _explain(root: type[BaseModel], problem: Mapping[str, Any]) -> str:
    location = problem["loc"]
    dotted = ".".join(str(part) for part in location) or "(top level)"
    if problem["type"] == "extra_forbidden":
        names = _fields_at(root, location[:-1])
        close = difflib.get_close_matches(str(location[-1]), names, n=1, cutoff=0.5)
        fix = f"did you mean {close[0]!r}?" if close else f"valid names: {', '.join(names)}"
        return f"  {dotted}: unknown key; {fix}"
    if problem["type"] == "missing":
        return f"  {dotted}: required, and not given"
    message, got = problem["msg"].removeprefix("Value error, "), problem["input"]
    # A rule about a whole section names its keys itself; printing the section adds nothing.
    return f"  {dotted}: {message}" + ("" if isinstance(got, Mapping) else f" (got {got!r})")


def _fields_at(root: type[BaseModel], location: tuple) -> list[str]:
    """Names of the fields of the model that `location` leads to, following the annotations."""
    models = [root]
    for part in location:
        if isinstance(part, int):
            continue
        found = [m.model_fields[part].annotation for m in models if part in m.model_fields]
        models = [m for annotation in found for m in _models_in(annotation)] or models
    return sorted({name for model in models for name in model.model_fields})


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]
