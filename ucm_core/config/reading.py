"""Read a configuration: where it comes from, and which key stands where. No meaning yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ucm_core.errors import ConfigError

#: The key (inline) and the environment variables that name the YAML file. TensorRT-LLM passes only
#: variables with its own prefix to the processes it spawns.
FILE_KEY = "UCM_CONFIG_FILE"
FILE_VARIABLES = ("UCM_CONFIG_FILE", "TRTLLM_UCM_CONFIG_FILE")

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class RawConfig:
    """``values`` as written, ``origin`` in words, ``lines``: path of a key -> its line in the file."""

    values: Mapping[Any, Any]
    origin: str
    is_file: bool
    lines: Mapping[KeyPath, int] = field(default_factory=dict)

    def source(self, path: KeyPath) -> str:
        """Where the value at ``path`` was set: ``/etc/ucm.yaml:12`` or ``inline``."""
        while path:
            if path in self.lines:
                return f"{self.origin}:{self.lines[path]}"
            path = path[:-1]
        return self.origin


def read_config(
    extra_config: Mapping[str, Any] | None,
    env: Mapping[str, str],
    foreign_keys: frozenset[str] = frozenset(),
) -> RawConfig:
    """The operator's configuration, empty when there is none; raises ``ConfigError``.

    The file named inline goes before the one named by the environment. A file and inline keys
    together are refused: nobody could tell which of two values serves.
    """
    inline = {k: v for k, v in (extra_config or {}).items() if k not in foreign_keys}
    named = inline.pop(FILE_KEY, None)
    where = f"{FILE_KEY} of the inline configuration"
    if named is None:
        for variable in FILE_VARIABLES:
            if env.get(variable):
                named, where = env[variable], f"the environment variable {variable}"
                break
    if named is None:
        return RawConfig(inline, "inline", is_file=False)
    if inline:
        raise ConfigError(
            f"both a file ({named}, from {where}) and inline keys ({', '.join(map(str, inline))}) are "
            "given; move the inline keys into the file, or drop the file"
        )
    return _read_file(named, where)


def _read_file(named: Any, where: str) -> RawConfig:
    if not isinstance(named, str) or not named:
        raise ConfigError(f"{where} must be a path, got {named!r}")
    path = Path(named).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path} (from {where}): {error}") from error
    lines: dict[KeyPath, int] = {}
    problems: list[str] = []
    try:
        values = _parse(text, lines, problems, str(path))
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        # A date that does not exist is a ValueError, an alias of what it stands in recurses.
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if not isinstance(values, dict):
        problems.append(f"{path}: expected keys and values at the top, got {type(values).__name__}")
    if problems:
        raise ConfigError(join_problems(str(path), problems), tuple(problems))
    return RawConfig(values, str(path), is_file=True, lines=lines)


def _parse(text: str, lines: dict[KeyPath, int], problems: list[str], origin: str) -> Any:
    """The one document of ``text``; an empty one is ``{}``. Raises what YAML's reader raises."""
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return {}
        _index(node, (), lines, problems, origin)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _index(
    node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], problems: list[str], origin: str
) -> None:
    """Note the line of every key; a key written twice is a problem (YAML would keep the last)."""
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if key in seen:
                problems.append(f"{origin}:{line}: '{key}' was already given in line {seen[key]}")
            seen[key] = line
            inner: KeyPath = (*path, key)
            lines[inner] = line
            _index(value_node, inner, lines, problems, origin)
    elif isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            place: KeyPath = (*path, i)
            lines[place] = item.start_mark.line + 1
            _index(item, place, lines, problems, origin)


def join_problems(origin: str, problems: list[str]) -> str:
    """One message that lists every problem."""
    if len(problems) == 1:
        return f"configuration ({origin}): {problems[0]}"
    lines = "".join(f"\n  - {problem}" for problem in problems)
    return f"configuration ({origin}): {len(problems)} problems{lines}"
