"""The wheels of every distribution: what is in them, and that they work where nothing else is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.packaging, pytest.mark.timeout(900)]

#: What any Linux of the wheel's tag has. Everything else must be inside.
SYSTEM_LIBRARIES = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1"}
COMPILER_LIBRARIES = {"libstdc++.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"}

SOURCES = {
    "ucm_core": ROOT / "ucm_core",
    "ucm_backend_posix": ROOT / "plugins/backends/posix/src/ucm_backend_posix",
    "ucm_reference": ROOT / "plugins/reference/src/ucm_reference",
    "ucm_sglang": ROOT / "plugins/sglang/src/ucm_sglang",
    "ucm_trtllm": ROOT / "plugins/trtllm/src/ucm_trtllm",
    "ucm_vllm": ROOT / "plugins/vllm/src/ucm_vllm",
}


def run(*command: str | Path, env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env=env, cwd="/"
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    run(sys.executable, ROOT / "dev" / "build_wheels.py", folder)
    return folder


@pytest.fixture(scope="session")
def site(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin/ of an environment that was empty: third-party packages pinned by our lock, then our
    distributions from the wheels alone, offline, so that every declared dependency is complete."""
    folder = tmp_path_factory.mktemp("empty") / "venv"
    run(sys.executable, "-m", "venv", folder)
    install = (folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-input")
    run(*install, "-c", ROOT / "dev" / "requirements.lock", *third_party())
    env = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    env["PIP_CONFIG_FILE"] = os.devnull
    run(
        *install,
        "--no-index",
        "--find-links",
        wheels,
        "ucm-core[vllm,sglang,trtllm]",
        "ucm-reference",
        env=env,
    )
    return folder / "bin"


def third_party() -> list[str]:
    """What the wheels require that is not ours, from the core's own project table."""
    text = (ROOT / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[(.*?)^\]", text, re.M | re.S)
    assert block is not None
    return re.findall(r'"([A-Za-z][^"]+)"', block.group(1))


def wheel_of(wheels: Path, name: str) -> Path:
    (wheel,) = wheels.glob(f"{name}-*.whl")
    return wheel


@pytest.mark.parametrize("name", SOURCES)
def test_wheel_holds_exactly_the_package(wheels: Path, name: str) -> None:
    with zipfile.ZipFile(wheel_of(wheels, name)) as archive:
        inside = {n for n in archive.namelist() if not n.endswith("/")}
    info = {n for n in inside if ".dist-info/" in n}
    folder = SOURCES[name]
    expected = {
        f"{name}/{path.relative_to(folder)}"
        for path in folder.rglob("*")
        if (path.is_file() and path.suffix in (".py", ".pyi", ".yaml", ".typed"))
        or path.name == "py.typed"
    }
    compiled = {n for n in inside if n.endswith(".so")}
    assert inside - info - compiled == expected
    assert f"{name}/py.typed" in inside
    assert any(n.endswith("LICENSE") for n in info)
    assert len(compiled) == (1 if name == "ucm_core" else 0)


def test_native_library_is_self_contained(wheels: Path, tmp_path: Path) -> None:
    wheel = wheel_of(wheels, "ucm_core")
    assert "manylinux" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [n for n in archive.namelist() if n.endswith(".so")]
        path = Path(archive.extract(member, tmp_path))
    with path.open("rb") as handle:
        elf = ELFFile(handle)
        dynamic = elf.get_section_by_name(".dynamic")
        needed = {tag.needed for tag in dynamic.iter_tags("DT_NEEDED")}
        runpaths = list(dynamic.iter_tags("DT_RUNPATH")) + list(dynamic.iter_tags("DT_RPATH"))
        symbols = elf.get_section_by_name(".dynsym").iter_symbols()
        exported = {s.name for s in symbols if s.entry["st_shndx"] != "SHN_UNDEF"}
    assert needed <= SYSTEM_LIBRARIES | COMPILER_LIBRARIES
    assert not runpaths
    assert "PyInit__native" in exported
    # Symbols of what is linked in would shadow, or be shadowed by, the process's own OpenSSL.
    linked_in = r"(SHA|EVP|OPENSSL|CRYPTO|io_uring|XXH|ZSTD|ZBUFF|HUF|FSE|LZ4)"
    assert not [n for n in exported if re.match(linked_in, n)]


def modules_of_the_tree() -> list[str]:
    """Every module but those of adapters, which import their engines (see the engine tests)."""
    found = sorted(
        ".".join((name, *path.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__")
        for name, folder in SOURCES.items()
        if name not in ("ucm_vllm", "ucm_sglang")
        for path in folder.rglob("*.py")
        if (name, path.name) != ("ucm_trtllm", "connector.py")
    )
    alone = ["ucm_vllm", "ucm_vllm.register", "ucm_sglang", "ucm_sglang.deployment"]
    return [*found, *alone, "ucm_core._native"]


def import_all(site: Path, modules: list[str]) -> None:
    code = (
        "import importlib, json, sys\nfor m in json.loads(sys.argv[1]): importlib.import_module(m)"
    )
    run(site / "python", "-I", "-c", code, json.dumps(modules))


def test_everything_imports(site: Path) -> None:
    import_all(site, [m for m in modules_of_the_tree() if not m.startswith("ucm_core.testing.")])


def test_plugins_load_and_the_command_works(site: Path) -> None:
    listed = {p["name"]: p for p in json.loads(run(site / "ucm", "plugins", "--json"))}
    assert set(listed) == {
        "posix",
        "reference",
        "sglang",
        "ucm-core-builtin",
        "ucm-core-retention",
        "trtllm",
        "vllm",
    }
    assert {name: p["status"] for name, p in listed.items()} == dict.fromkeys(listed, "loaded"), (
        listed
    )
    assert run(site / "ucm", "config").startswith("section")


def test_vllm_finds_the_connector_entry_point(site: Path) -> None:
    code = (
        "from importlib.metadata import entry_points\n"
        "(point,) = entry_points(group='vllm.general_plugins', name='ucm')\n"
        "print(point.load().__module__)"
    )
    assert run(site / "python", "-I", "-c", code).strip() == "ucm_vllm.register"


def test_core_works_alone(site: Path, wheels: Path) -> None:
    """Nothing of ours but the core: it imports, and says what to install."""
    python = site / "python"
    ours = ("ucm-vllm", "ucm-sglang", "ucm-trtllm", "ucm-reference", "ucm-backend-posix")
    run(python, "-m", "pip", "uninstall", "--quiet", "--yes", *ours)
    try:
        assert "install ucm-backend-posix" in run(site / "ucm", "plugins")
        done = subprocess.run([site / "ucm", "config"], capture_output=True, text=True)
        assert done.returncode == 1
        assert "install ucm-backend-posix" in done.stderr
    finally:
        again = [wheel_of(wheels, name.replace("-", "_")) for name in ours]
        run(python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", *again)


def test_conformance_kit_imports_with_its_extra(site: Path) -> None:
    """Last here: it adds pytest and hypothesis to the environment that was empty."""
    lock = ROOT / "dev" / "requirements.lock"
    pip = (site / "python", "-m", "pip", "install", "--quiet", "--no-input")
    run(*pip, "-c", lock, "pytest", "hypothesis")
    import_all(site, [m for m in modules_of_the_tree() if m.startswith("ucm_core.testing")])
