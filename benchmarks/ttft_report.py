"""Runs ``benchmarks.ttft`` in a process of its own and turns its samples into tables."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.support.meter import Sample, Series, cpu_ratio, wall_ratio
from benchmarks.support.report import Report, Table, Target

#: The whole run, engines included; beyond it something hangs.
LIMIT_S = 1500
REFERENCE = "own prefix cache"
UCM_HOT, UCM_COLD = "UCM, host cache", "UCM, files"
PEER_HOT, PEER_COLD = "OffloadingConnector, host tier", "ExampleConnector, files"


def run(report: Report, directory: Path) -> None:
    """Tables and targets of TTFT and of the cost of saving."""
    if importlib.util.find_spec("vllm") is None:
        report.skip("TTFT in vLLM", "vLLM is not installed in this interpreter (make engine-vllm)")
        return
    out = directory / "ttft.json"
    command = [sys.executable, "-m", "benchmarks.ttft", "--directory", str(directory)]
    command += ["--out", str(out)]
    if importlib.util.find_spec("ucm_vllm") is None:
        report.skip("UCM in vLLM", "ucm-vllm is not installed in this interpreter")
        command.append("--without-ucm")
    log = directory / "ttft.log"
    with log.open("wb") as stream:
        code = subprocess.run(
            command, stdout=stream, stderr=stream, timeout=LIMIT_S, check=False
        ).returncode
    if code != 0:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        report.skip("TTFT in vLLM", f"exit code {code}: {' '.join(last)} (log: {log})")
        return
    present(report, json.loads(out.read_text()))


def _series(rows: list[dict[str, Any]], extra: str = "") -> Series:
    return Series([Sample(r["wall_s"], r["cpu_s"] + (r[extra] if extra else 0)) for r in rows])


def present(report: Report, results: dict[str, Any]) -> None:
    """Tables from the samples of one run."""
    formats = results["formats"]
    note = (
        f"82 M-parameter Llama in {formats['dtype']}, 3072 shared and 20 new tokens, one compute "
        "thread. Medians; ratios are medians of per-round ratios. "
    )
    reuse(report, results, note)
    saving(report, results["first pass"], note)
    if results["python"]:
        python(report, results["python"])


def python(report: Report, counts: dict[str, list[int]]) -> None:
    """Python work of a served request; what remains beside the blocks is one poll per step."""
    rows = [[f"{tokens} tokens reused", str(min(seen))] for tokens, seen in counts.items()]
    note = (
        "Bytecode instructions in our packages on the engine's thread, from arrival to first token "
        "of a request served by the host cache: the smallest of five, as the number of engine steps "
        "that poll a load varies."
    )
    report.table(Table("UCM's Python per request", ("request", "instructions"), rows, note))


def reuse(report: Report, results: dict[str, Any], note: str) -> None:
    series = {name: _series(rows) for name, rows in results["reuse"].items()}
    cached = {name: min(r["cached"] for r in rows) for name, rows in results["reuse"].items()}
    recompute = _series(results["first pass"]["plain"])
    own = series[REFERENCE]
    tokens = [r["first"] for r in results["reuse"][REFERENCE]]
    rows = [
        [
            "recompute",
            f"{1e3 * recompute.wall_s:.0f}",
            f"{1e3 * recompute.cpu_s:.0f}",
            "0",
            f"{recompute.wall_s / own.wall_s:.2f}x",
            f"{recompute.cpu_s / own.cpu_s:.2f}x",
            "",
        ]
    ]
    for name, ours in series.items():
        answers = [r["first"] for r in results["reuse"][name]]
        same = sum(a == b for a, b in zip(answers, tokens, strict=True))
        rows.append(
            [
                name,
                f"{1e3 * ours.wall_s:.1f}",
                f"{1e3 * ours.cpu_s:.1f}",
                str(cached[name]),
                f"{wall_ratio(ours, own):.2f}x",
                f"{cpu_ratio(ours, own):.2f}x",
                f"{same} of {len(tokens)}",
            ]
        )
    report.table(
        Table(
            "TTFT in vLLM",
            (
                "variant",
                "wall ms",
                "CPU ms",
                "tokens reused",
                "wall / own hit",
                "CPU / own hit",
                "same answer",
            ),
            rows,
            note + "Rows that read files are new processes, their files dropped from the page "
            "cache before every request; the copy engine of OffloadingConnector is replaced by "
            "plain copies (it needs CUDA).",
        )
    )
    if UCM_HOT in series:
        hot, cold = series[UCM_HOT], series[UCM_COLD]
        for name, peer in (("wall", wall_ratio), ("CPU", cpu_ratio)):
            what = f"UCM hot / OffloadingConnector host tier, {name}"
            report.target(Target(what, "at most", 1.0, peer(hot, series[PEER_HOT])))
        what = "UCM cold / own prefix hit, CPU"
        report.target(Target(what, "at most", 1.35, cpu_ratio(cold, own)))
        for name, peer in (("wall", wall_ratio), ("CPU", cpu_ratio)):
            what = f"UCM cold / ExampleConnector, {name}"
            report.target(Target(what, "at most", 1.0, peer(cold, series[PEER_COLD])))


def saving(report: Report, first_pass: dict[str, Any], note: str) -> None:
    """What saving adds to the pass that computes: to the first token, and in CPU time over all."""
    plain, plain_all = _series(first_pass["plain"]), _series(first_pass["plain"], "settle_cpu_s")
    rows = []
    for name, samples in first_pass.items():
        ours, all_cpu = _series(samples), _series(samples, "settle_cpu_s")
        label = "no connector" if name == "plain" else name
        rows.append(
            [
                label,
                f"{1e3 * ours.wall_s:.0f}",
                f"{1e3 * ours.cpu_s:.0f}",
                f"{1e3 * all_cpu.cpu_s:.0f}",
                f"{100 * (wall_ratio(ours, plain) - 1):+.1f} %",
                f"{100 * (cpu_ratio(all_cpu, plain_all) - 1):+.1f} %",
            ]
        )
        if name == "UCM files":
            what = "saving on the first pass, wall to the first token"
            report.target(Target(what, "at most", 1.1, wall_ratio(ours, plain)))
            what = "saving on the first pass, CPU until everything is saved"
            report.target(Target(what, "at most", 1.1, cpu_ratio(all_cpu, plain_all)))
    report.table(
        Table(
            "Cost of saving on the first pass",
            ("variant", "TTFT ms", "CPU ms", "CPU ms until saved", "TTFT", "CPU until saved"),
            rows,
            note + "Every prefix is new. The last columns compare with the engine without a "
            "connector, asked in turns with the others.",
        )
    )
