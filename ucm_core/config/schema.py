"""What may be configured: as JSON schema for editors, and as the reference page of the docs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ucm_core.config.options import CoreOptions
from ucm_core.config.reference import CONNECTORS
from ucm_core.config.units import display
from ucm_core.plugins import PluginHost
from ucm_core.store.config import StoreConfig

HEADER = """# Options

<!-- Written by `make docs` from the option models; do not edit. -->

One YAML file, named by `UCM_CONFIG_FILE` in `kv_connector_extra_config` or in the environment, or the
same keys inline in `kv_connector_extra_config`. Unknown keys are errors; all problems are listed at
once. `ucm config` prints the effective values and where each came from.

```yaml
persist_token_threshold: 0
ucm_connectors:
  - ucm_connector_name: UcmPipelineStore
    ucm_connector_config:
      store_pipeline: "Posix"
      storage_backends: /mnt/kv
```

Sizes and times take a unit (`512 MiB`, `30 s`); a plain number counts the unit in the option's name.
"""


def sections(host: PluginHost) -> list[tuple[str, str, type[BaseModel]]]:
    """(title, note, model) of everything that can be set with the plugins of ``host``."""
    found: list[tuple[str, str, type[BaseModel]]] = [
        ("Top level", "Beside `ucm_connectors`.", CoreOptions),
        ("Store", "In `ucm_connector_config`, with every pipeline.", StoreConfig),
    ]
    for name, spec in sorted(host.stages.items()):
        note = f"In `ucm_connector_config`, for pipelines with this stage: {spec.summary}."
        found.append((f"Stage {name}", note, spec.config_model))
    return found


def json_schema(host: PluginHost) -> dict[str, Any]:
    """Schema of the YAML file for the installed plugins (draft 2020-12)."""
    definitions: dict[str, Any] = {}
    store: dict[str, Any] = {
        "store_pipeline": {"type": "string", "enum": sorted(host.pipelines)},
    }
    for _, _, model in sections(host)[1:]:
        store.update(_properties(model, definitions))
    connector = {
        "type": "object",
        "required": ["ucm_connector_name"],
        "additionalProperties": False,
        "properties": {
            "ucm_connector_name": {"type": "string", "enum": sorted(CONNECTORS)},
            "ucm_connector_config": {
                "type": "object",
                "properties": store,
                "additionalProperties": False,
            },
        },
    }
    top = _properties(CoreOptions, definitions)
    top["ucm_connectors"] = {"type": "array", "items": connector, "minItems": 1, "maxItems": 1}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "UCM configuration",
        "type": "object",
        "properties": top,
        "additionalProperties": False,
        "$defs": definitions,
    }


def reference_page(host: PluginHost) -> str:
    """The Markdown page of all options and pipelines."""
    lines = [HEADER]
    for title, note, model in sections(host):
        lines += [f"## {title}", "", note, "", "| option | default | meaning |", "|---|---|---|"]
        lines += _rows(model)
        if not model.model_fields:
            lines.append("| (none) | | |")
        lines.append("")
    lines += ["## Pipelines", "", "| `store_pipeline` | stages | meaning |", "|---|---|---|"]
    for name, spec in sorted(host.pipelines.items()):
        alias = "" if name == spec.name else f" (alias of `{_cell(spec.name)}`)"
        stages = ", ".join(spec.stages)
        lines.append(f"| `{_cell(name)}` | {stages} | {_cell(spec.summary)}{alias} |")
    return "\n".join(lines) + "\n"


def _rows(model: type[BaseModel], prefix: str = "") -> Iterable[str]:
    for key, info in model.model_fields.items():
        nested = info.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            yield from _rows(nested, f"{prefix}{key}.")
            continue
        default = "required" if info.is_required() else f"`{_default(info)}`"
        yield f"| `{prefix}{key}` | {_cell(default)} | {_cell(info.description or '')} |"


def _default(info: FieldInfo) -> str:
    return display(info, info.get_default(call_default_factory=True))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _properties(model: type[BaseModel], definitions: dict[str, Any]) -> dict[str, Any]:
    schema = model.model_json_schema(ref_template="#/$defs/{model}")
    definitions.update(schema.get("$defs", {}))
    properties: dict[str, Any] = schema.get("properties", {})
    return properties
