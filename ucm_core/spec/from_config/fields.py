"""The fields of one published configuration, by published and by canonical name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ucm_core.errors import ConfigError
from ucm_core.spec.from_config.rules import Rules


class Fields(Mapping[str, int]):
    """Numbers by canonical name, for formulas. Knows which published fields were looked at.

    A field that is null counts as absent. Raises ConfigError naming the published names for a
    canonical field that is absent, or is no whole number.
    """

    def __init__(self, rules: Rules, config: Mapping[str, Any], where: str) -> None:
        self._rules = rules
        model_type = str(config.get("model_type", ""))
        self._config = {**rules.defaults.get(model_type, {}), **_present(config)}
        self.where = where
        self.read: set[str] = set()

    def published(self, name: str) -> Any:
        """The value under a published name (``a.b`` looks inside ``a``), None when absent or null."""
        value: Any = self._config
        self.read.add(name.split(".")[0])
        for word in name.split("."):
            value = value.get(word) if isinstance(value, Mapping) else None
        return value

    def raw(self, canonical: str) -> Any:
        """The first published value of a canonical field, None when there is none."""
        for name in self._rules.fields[canonical]:
            value = self.published(name)
            if value is not None:
                return value
        return None

    def __getitem__(self, canonical: str) -> int:
        value = self.raw(canonical)
        if value is None and canonical in self._rules.derived:
            return self._rules.derived[canonical](self)
        names = " or ".join(self._rules.fields[canonical])
        if value is None:
            raise ConfigError(f"{self.where}: needs {names} (for {canonical}), which is not there")
        if not isinstance(value, int):
            raise ConfigError(f"{self.where}: {names} must be a whole number, got {value!r}")
        return int(value)

    def __contains__(self, canonical: object) -> bool:
        return canonical in self._rules.fields and self.raw(str(canonical)) is not None

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._rules.fields if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def unread(self) -> list[str]:
        """Published fields that say something about what is kept and that nothing looked at."""
        must, may = self._rules.must_be_read, self._rules.may_be_ignored
        return sorted(
            name
            for name in self._config
            if must.search(name) and not may.search(name) and name not in self.read
        )


def _present(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if value is not None}
