"""The zoo of broken plugins: each is left out with its reason, and the good ones still serve."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import distributions

import pytest

from ucm_core.errors import PluginError
from ucm_core.plugins import PluginHost, PluginReport, PluginStatus, discover

from .conftest import GOOD, Site

HEAD = """
from pydantic import BaseModel
from ucm_core.hookspecs import hookimpl
from ucm_core.registry import PipelineSpec, StageSpec
UCM_API_VERSION = (1, 0)
class Options(BaseModel):
    pass
def stage(name):
    return StageSpec(name, "s", Options, lambda context, options, below: None)
"""

#: name -> (source, status, pieces that the reason must contain)
ANIMALS: dict[str, tuple[str, PluginStatus, tuple[str, ...]]] = {
    "missing_dependency": (
        "import no_such_package_here",
        PluginStatus.BROKEN,
        ("ModuleNotFoundError", "no_such_package_here", "zoo_missing_dependency.py:1"),
    ),
    "hidden_import_error": (
        """
        try:
            import no_such_package_here
        except ImportError:
            raise RuntimeError("could not start")
        """,
        PluginStatus.BROKEN,
        ("RuntimeError: could not start", "caused by ModuleNotFoundError", "no_such_package_here"),
    ),
    "cause_given": (
        """
        try:
            import ctypes
            ctypes.CDLL("/no/such/libfoo.so.1")
        except OSError as error:
            raise ImportError("backend library") from error
        """,
        PluginStatus.BROKEN,
        ("ImportError: backend library", "caused by OSError: /no/such/libfoo.so.1"),
    ),
    "syntax_error": (
        "def broken(:\n",
        PluginStatus.BROKEN,
        ("SyntaxError", "zoo_syntax_error.py:1"),
    ),
    "system_exit": (
        "import sys\nsys.exit(3)\n",
        PluginStatus.BROKEN,
        ("SystemExit: 3", "zoo_system_exit.py:2"),
    ),
    "generator_exit": ("raise GeneratorExit", PluginStatus.BROKEN, ("GeneratorExit",)),
    "bad_str": (
        "class E(Exception):\n    def __str__(self):\n        raise ValueError\nraise E()\n",
        PluginStatus.BROKEN,
        ("E: <the error's own text",),
    ),
    "no_version": (
        "from ucm_core.hookspecs import hookimpl\n",
        PluginStatus.INCOMPATIBLE,
        ("UCM_API_VERSION", "1.1"),
    ),
    "major_above": (
        "UCM_API_VERSION = (2, 0)",
        PluginStatus.INCOMPATIBLE,
        ("plugin API 2.0", "speaks 1.1"),
    ),
    "minor_above": (
        "UCM_API_VERSION = (1, 2)",
        PluginStatus.INCOMPATIBLE,
        ("plugin API 1.2", "speaks 1.1"),
    ),
    "version_text": ("UCM_API_VERSION = '1.0'", PluginStatus.BROKEN, ("pair of integers", "'1.0'")),
    "version_bool": ("UCM_API_VERSION = (True, 0)", PluginStatus.BROKEN, ("pair of integers",)),
    "hook_raises": (
        HEAD + "@hookimpl\ndef ucm_register_stages(register):\n    raise OSError(28, 'full')\n",
        PluginStatus.BROKEN,
        ("ucm_register_stages failed", "OSError", "full", "zoo_hook_raises.py:"),
    ),
    "hook_exits": (
        HEAD + "@hookimpl\ndef ucm_register_stages(register):\n    raise SystemExit('no')\n",
        PluginStatus.BROKEN,
        ("ucm_register_stages failed", "SystemExit: no"),
    ),
    "half_way": (
        HEAD
        + "@hookimpl\ndef ucm_register_stages(register):\n"
        + "    register(stage('Half'))\n    raise RuntimeError('after one')\n",
        PluginStatus.BROKEN,
        ("after one",),
    ),
    "second_hook_fails": (
        HEAD
        + "@hookimpl\ndef ucm_register_stages(register):\n    register(stage('Early'))\n"
        + "@hookimpl\ndef ucm_register_pipelines(register):\n    register('not a spec')\n",
        PluginStatus.BROKEN,
        ("ucm_register_pipelines needs a PipelineSpec", "not a spec"),
    ),
    "unknown_hook": (
        HEAD + "@hookimpl\ndef ucm_register_stagess(register):\n    pass\n",
        PluginStatus.BROKEN,
        ("unknown hook ucm_register_stagess", "did you mean 'ucm_register_stages'"),
    ),
    "unmarked_hook": (
        HEAD + "def ucm_register_stages(register):\n    register(stage('Unmarked'))\n",
        PluginStatus.BROKEN,
        ("ucm_register_stages", "@hookimpl"),
    ),
    "async_hook": (
        HEAD + "@hookimpl\nasync def ucm_register_stages(register):\n    pass\n",
        PluginStatus.BROKEN,
        ("async",),
    ),
    "yielding_hook": (
        HEAD + "@hookimpl\ndef ucm_register_stages(register):\n    yield register(stage('Lazy'))\n",
        PluginStatus.BROKEN,
        ("must return None", "generator"),
    ),
    "unknown_argument": (
        HEAD + "@hookimpl\ndef ucm_register_stages(registrar):\n    pass\n",
        PluginStatus.BROKEN,
        ("registrar",),
    ),
    "bad_model": (
        HEAD + "@hookimpl\ndef ucm_register_stages(register):\n"
        "    register(StageSpec('X', 's', dict, lambda c, o, b: None))\n",
        PluginStatus.BROKEN,
        ("config_model", "dict"),
    ),
    "bad_name": (
        HEAD + "@hookimpl\ndef ucm_register_stages(register):\n    register(stage(''))\n",
        PluginStatus.BROKEN,
        ("non-empty string",),
    ),
    "bad_pipeline": (
        HEAD + "@hookimpl\ndef ucm_register_pipelines(register):\n"
        "    register(PipelineSpec('P', 'Posix', 'a text is not a tuple'))\n",
        PluginStatus.BROKEN,
        ("tuple of stage names",),
    ),
    "own_duplicate": (
        HEAD + "@hookimpl\ndef ucm_register_stages(register):\n"
        "    register(stage('Twice'))\n    register(stage('Twice'))\n",
        PluginStatus.BROKEN,
        ("stage 'Twice'", "own_duplicate"),
    ),
}


def only_report(host: PluginHost, name: str) -> PluginReport:
    (report,) = [r for r in host.reports if r.name == name]
    return report


@pytest.mark.parametrize("name", ANIMALS)
def test_animal_is_left_out_and_neighbours_serve(site: Site, name: str) -> None:
    source, status, pieces = ANIMALS[name]
    site.good("aaa", "First")
    site.install(name, source)
    site.good("zzz", "Last")

    host = site.host()

    report = only_report(host, name)
    assert report.status is status, report.reason
    for piece in pieces:
        assert piece in report.reason
    # All or nothing: exactly what the two good neighbours registered is there.
    assert set(host.stages) == {"First", "Last"}
    assert set(host.pipelines) == {"First", "Last"}


def test_whole_zoo_at_once(site: Site) -> None:
    for name, (source, _, _) in ANIMALS.items():
        site.install(name, source)
    site.good("zzz", "Last")
    host = site.host()
    assert set(host.stages) == {"Last"}
    statuses = {r.name: r.status for r in host.reports}
    assert statuses == {name: status for name, (_, status, _) in ANIMALS.items()} | {
        "zzz": PluginStatus.LOADED
    }


def test_failed_plugin_is_named_when_its_stage_is_needed(site: Site) -> None:
    site.install("half_way", ANIMALS["half_way"][0])
    site.install("other", ANIMALS["no_version"][0])
    host = site.host()
    with pytest.raises(PluginError, match=r"unknown stage 'Half'.*half_way.*after one") as caught:
        host.stage("Half")
    assert "other" not in str(caught.value)


def test_duplicate_stage_names_both_owners(site: Site) -> None:
    site.good("one", "Same")
    site.good("two", "Same")
    host = site.host()
    assert only_report(host, "one").status is PluginStatus.LOADED
    reason = only_report(host, "two").reason
    assert "plugin 'one' (zoo-one 1.2)" in reason
    assert "plugin 'two' (zoo-two 1.2)" in reason
    assert host.owner("stage", "Same") == "plugin 'one' (zoo-one 1.2)"


def test_duplicate_is_all_or_nothing(site: Site) -> None:
    """The second plugin's other names are not taken over either."""
    site.good("one", "Same")
    source = HEAD + (
        "@hookimpl\ndef ucm_register_stages(register):\n"
        "    register(stage('Other'))\n    register(stage('Same'))\n"
    )
    site.install("two", source)
    assert set(site.host().stages) == {"Same"}


def test_pipeline_alias_conflicts_with_a_name(site: Site) -> None:
    site.good("one", "Same")
    source = HEAD + (
        "@hookimpl\ndef ucm_register_pipelines(register):\n"
        "    register(PipelineSpec('New', ('Same',), 's', aliases=('Same',)))\n"
    )
    site.install("two", source)
    host = site.host()
    assert only_report(host, "two").status is PluginStatus.BROKEN
    assert set(host.pipelines) == {"Same"}


def test_two_distributions_with_one_plugin_name(site: Site) -> None:
    site.install("same", GOOD.format(stage="A"), module="zoo_a", distribution="zoo-a")
    site.install("same", GOOD.format(stage="B"), module="zoo_b", distribution="zoo-b")
    host = site.host()
    first, second = host.reports
    assert (first.distribution, first.status) == ("zoo-a", PluginStatus.LOADED)
    assert second.status is PluginStatus.BROKEN
    assert "zoo-a" in second.reason
    assert "zoo-b" in second.reason
    assert set(host.stages) == {"A"}


@pytest.mark.parametrize(
    ("entry_points", "piece"),
    [
        ("[ucm]\nbroken = no.such.module\n", "ModuleNotFoundError"),
        ("[ucm]\nbroken = zoo_broken:NOTHING\n", "AttributeError"),
        ("[ucm]\nbroken = zoo_broken:UCM_API_VERSION\n", "must name a module"),
        ("[ucm]\nbroken =\n", ""),
        ("[ucm]\nbroken = not a module!\n", ""),
    ],
)
def test_bad_entry_point(site: Site, entry_points: str, piece: str) -> None:
    site.good("zzz", "Last")
    site.install("broken", "UCM_API_VERSION = (1, 0)", entry_points=entry_points)
    host = site.host()
    bad = [r for r in host.reports if r.distribution == "zoo-broken"]
    assert [r.status for r in bad] == [PluginStatus.BROKEN]
    assert piece in bad[0].reason
    assert set(host.stages) == {"Last"}


def test_unreadable_metadata_hides_nobody(site: Site) -> None:
    site.good("zzz", "Last")
    site.install("bytes", "")
    (site.path / "zoo_bytes-1.2.dist-info" / "entry_points.txt").write_bytes(b"[ucm]\n\xff\xfe = x")
    site.install("nameless", GOOD.format(stage="Nameless"), metadata="")
    host = site.host()
    assert "Last" in host.stages
    assert [r.status for r in host.reports if r.distribution == "zoo-bytes"] == [
        PluginStatus.BROKEN
    ]


def test_same_distribution_twice_on_the_path_counts_once(site: Site) -> None:
    site.good("one", "One")
    path = [str(site.path), str(site.path)]
    host = PluginHost(env={}, candidates=discover(distributions(path=path)))
    assert [r.status for r in host.reports] == [PluginStatus.LOADED]


def test_missing_and_foreign_shared_library(site: Site) -> None:
    """B39: a compiled module that is missing, or is no library at all."""
    site.install("no_so", "import zoo_no_so_native")
    site.install("bad_so", "import zoo_bad_so_native")
    suffix = ".cpython-{}{}-x86_64-linux-gnu.so".format(*sys.version_info[:2])
    library = site.path / f"zoo_bad_so_native{suffix}"
    library.write_bytes(b"\x7fELF not really")
    host = site.host()
    assert "zoo_no_so_native" in only_report(host, "no_so").reason
    assert str(library) in only_report(host, "bad_so").reason


def test_everything_again_in_a_fresh_process_with_real_discovery(site: Site) -> None:
    """PluginHost() with nothing given, beside whatever else is installed here."""
    site.good("zzz", "ZooLast")
    site.install("exit", "raise SystemExit(7)")
    code = (
        "from ucm_core.plugins import PluginHost\n"
        "host = PluginHost().load()\n"
        "print('ZooLast' in host.stages, [r.status.value for r in host.reports if r.name == 'exit'])"
    )
    env = {**os.environ, "PYTHONPATH": str(site.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "['broken']"]
