"""What a host does with plugins that work."""

from __future__ import annotations

import logging
import threading

import click
import pytest

from ucm_core.errors import PluginError
from ucm_core.plugins import PluginHost, PluginStatus

from .conftest import GOOD, Site

COUNTING = """
from ucm_core.hookspecs import hookimpl
UCM_API_VERSION = (1, 0)
calls = []
@hookimpl
def ucm_startup(context):
    calls.append("startup " + context["role"])
@hookimpl
def ucm_shutdown():
    calls.append("shutdown")
@hookimpl
def ucm_report_header():
    return ["line of a plugin"]
"""


def test_nothing_is_imported_before_load(site: Site) -> None:
    site.install("loud", "raise AssertionError('imported')")
    host = site.host()
    assert host.load() is host
    assert host.reports[0].status is PluginStatus.BROKEN


def test_names_load_in_order_and_only_once(site: Site) -> None:
    for name in ("bbb", "aaa", "ccc"):
        site.good(name, name.upper())
    host = site.host()
    threads = [threading.Thread(target=host.load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [r.name for r in host.reports] == ["aaa", "bbb", "ccc"]


def test_hosts_are_independent(site: Site) -> None:
    site.good("one", "One")
    assert set(site.host().stages) == {"One"}
    assert set(site.host(UCM_DISABLED_PLUGINS="one").stages) == set()


def test_disabled_plugin_is_not_imported(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.install("loud", "raise AssertionError('imported')")
    site.good("one", "One")
    with caplog.at_level(logging.WARNING, "ucm"):
        host = site.host(UCM_DISABLED_PLUGINS=" loud , onne ")
        (one, loud) = sorted(host.reports, key=lambda r: r.name, reverse=True)
    assert (loud.status, one.status) == (PluginStatus.DISABLED, PluginStatus.LOADED)
    assert "UCM_DISABLED_PLUGINS names 'onne'" in caplog.text
    assert "did you mean 'one'" in caplog.text


def test_tables_are_read_only(site: Site) -> None:
    site.good("one", "One")
    stages = site.host().stages
    with pytest.raises(TypeError):
        stages["Two"] = stages["One"]  # type: ignore[index]


def test_unknown_pipeline_names_the_known_and_the_nearest(site: Site) -> None:
    site.good("one", "Posix")
    with pytest.raises(PluginError, match="unknown pipeline 'Psix'.*did you mean 'Posix'.*known"):
        site.host().pipeline("Psix")


def test_pipeline_with_a_stage_nobody_offers(site: Site) -> None:
    source = GOOD.format(stage="Here").replace('("Here",), "alone"', '("Here", "Gone"), "both"')
    site.install("one", source)
    with pytest.raises(PluginError, match="pipeline 'Here': unknown stage 'Gone'"):
        site.host().pipeline("Here")


def test_startup_and_shutdown_once_each(site: Site) -> None:
    site.install("counting", COUNTING)
    host = site.host()
    host.startup({"role": "worker"})
    host.startup({"role": "worker"})
    host.close()
    host.close()
    import zoo_counting  # type: ignore[import-not-found]

    assert zoo_counting.calls == ["startup worker", "shutdown"]
    assert host.header_lines({}) == ["line of a plugin"]


def test_plugin_that_fails_in_startup_loses_its_names(site: Site) -> None:
    site.install(
        "late",
        GOOD.format(stage="Late")
        + "@hookimpl\ndef ucm_startup(context):\n    raise OSError('no device')\n",
    )
    site.good("zzz", "Last")
    host = site.host()
    assert set(host.stages) == {"Late", "Last"}
    host.startup({"role": "worker"})
    assert set(host.stages) == {"Last"}
    late, last = host.reports
    assert (late.status, last.status) == (PluginStatus.BROKEN, PluginStatus.LOADED)
    with pytest.raises(PluginError, match="no device"):
        host.stage("Late")


def test_late_registration_is_refused(site: Site) -> None:
    source = GOOD.format(stage="Kept").replace(
        "def ucm_register_stages(register):",
        "def ucm_register_stages(register):\n    kept(register)",
    )
    site.install("keeper", "callbacks = []\nkept = callbacks.append\n" + source)
    host = site.host()
    assert set(host.stages) == {"Kept"}
    import zoo_keeper  # type: ignore[import-not-found]

    with pytest.raises(PluginError, match="registration is over"):
        zoo_keeper.callbacks[0](host.stages["Kept"])
    assert set(host.stages) == {"Kept"}


def test_commands_of_one_plugin_do_not_stop_the_next(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    head = "import click\nfrom ucm_core.hookspecs import hookimpl\nUCM_API_VERSION = (1, 0)\n"
    hook = "@hookimpl\ndef ucm_register_commands(cli):\n"
    site.install("bad", head + hook + "    raise ValueError('boom')\n")
    site.install("good", head + hook + "    cli.add_command(click.Command('extra'))\n")
    group = click.Group()
    site.host().add_commands(group)
    assert list(group.commands) == ["extra"]
    assert "boom" in caplog.text


def test_trace_says_every_step(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.good("one", "One")
    site.host(UCM_TRACE_PLUGINS="1").load()
    err = capsys.readouterr().err
    assert "one: importing zoo_one" in err
    assert "one: calling ucm_register_stages" in err
    assert "one: loaded" in err


def test_keyboard_interrupt_passes_and_loading_can_be_repeated(site: Site) -> None:
    site.good("aaa", "First")
    site.install(
        "bbb",
        "import zoo_switch\nif zoo_switch.on:\n    raise KeyboardInterrupt\n"
        + GOOD.format(stage="B"),
    )
    (site.path / "zoo_switch.py").write_text("on = True\n")
    host: PluginHost = site.host()
    with pytest.raises(KeyboardInterrupt):
        host.load()
    import zoo_switch  # type: ignore[import-not-found]

    zoo_switch.on = False
    assert set(host.load().stages) == {"First", "B"}
    assert [r.name for r in host.reports] == ["aaa", "bbb"]
