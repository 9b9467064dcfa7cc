"""Write the generated pages: docs/options.md from the option models, docs/metrics.md from the counters.

usage: docs.py [--check]
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from ucm_core.config.schema import reference_page
from ucm_core.plugins import PluginHost
from ucm_sglang.stats import COUNTERS as SGLANG_COUNTERS
from ucm_vllm.store_counters import STORE_COUNTERS, STORE_GAUGES

ROOT = Path(__file__).resolve().parent.parent
OURS = ("ucm-core", "ucm-backend-posix", "ucm-vllm", "ucm-sglang", "ucm-trtllm")

METRICS_HEADER = """# Metrics

<!-- Written by `make docs`; do not edit. -->

## vLLM

Exported by vLLM's own `/metrics`, once, with vLLM's labels; workers' counts are added up by vLLM. A
name ending in `_total` is a counter, of a gauge the highest figure of any store of any worker stands.

| metric | label | meaning |
|---|---|---|
"""

METRICS_SGLANG = """
## SGLang

With `--enable-metrics`: SGLang exports pages and bandwidth of its storage itself (`sglang:prefetch_pgs`,
`sglang:backup_pgs`, `sglang:prefetch_bandwidth`, `sglang:backup_bandwidth`, and cached tokens per source);
beside them, in the same endpoint, with the labels `tp_rank` and `pp_rank`:

| metric | label | meaning |
|---|---|---|
"""

METRICS_STORE = """
## Stores in a process of your own

`ucm_core.observe.StoreCollector` exports `BlockStore.stats()` into a Prometheus registry that you hand
in: `<stage>.<name>` becomes `ucm_store_<stage>_<name>` with the label `store`; names ending in `_total`
are counters, the others gauges. A store whose counters cannot be read is counted in
`ucm_store_collect_errors_total` and hides no other. `Coordinator.stats()` is exported by the same collector
(`add("coordinator", coordinator.stats)`): `ucm_store_checkpoint_directory_entries`,
`ucm_store_checkpoint_directory_forgotten_total`, `ucm_store_checkpoints_missed_total` and
`ucm_store_checkpoints_evicted_total`.
"""


def of_vllm(name: str) -> dict[str, tuple[str, bool]]:
    """A table of the vLLM adapter's own metrics, read without importing vLLM."""
    tree = ast.parse((ROOT / "plugins/vllm/src/ucm_vllm/stats.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
            assert node.value is not None
            found: dict[str, tuple[str, bool]] = ast.literal_eval(node.value)
            return found
    raise SystemExit(f"ucm_vllm/stats.py has no {name} any more; teach dev/docs.py the new place")


def metrics_page() -> str:
    stores = {name: (text, kind) for name, (text, kind, _) in STORE_COUNTERS.items()}
    named = {f"{name}_total": about for name, about in (of_vllm("COUNTERS") | stores).items()}
    named |= of_vllm("SCHEDULER_GAUGES")
    named |= {name: (text, kind) for name, (text, kind, _) in STORE_GAUGES.items()}
    rows = "".join(
        f"| `ucm:ucm_{name}` | {'`kind`' if has_kind else ''} | {text} |\n"
        for name, (text, has_kind) in named.items()
    )
    sglang = "".join(
        f"| `ucm:ucm_{name}_total` | {'`kind`' if has_kind else ''} | {text} |\n"
        for name, (text, has_kind) in SGLANG_COUNTERS.items()
    )
    return METRICS_HEADER + rows + METRICS_SGLANG + sglang + METRICS_STORE


def pages() -> dict[Path, str]:
    """Path -> wanted text. Plugins of others that happen to be installed here are left out."""
    host = PluginHost(env={})
    foreign = [r.name for r in host.reports if r.distribution not in OURS]
    host = PluginHost(env={"UCM_DISABLED_PLUGINS": ",".join(foreign)})
    return {
        ROOT / "docs" / "options.md": reference_page(host),
        ROOT / "docs" / "metrics.md": metrics_page(),
    }


def main() -> int:
    stale = [p for p, text in pages().items() if not p.exists() or p.read_text() != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of date: run `make docs`", file=sys.stderr)
        return 1 if stale else 0
    for path, text in pages().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
