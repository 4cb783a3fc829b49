"""`tokenbus check`: checks one settings file and what it names, without a server or a running service."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tokenbus.errors import SettingsError
from tokenbus_services import settings as configuration
from tokenbus_services.cli import exit_codes as ending
from tokenbus_services.cli.doctor import checks, checks_work
from tokenbus_services.cli.doctor.checks import Finding
from tokenbus_services.cli.doctor.checks_settings import check_settings
from tokenbus_services.cli.doctor.command import show


def run(file: Path | None, *, as_json: bool) -> int:
    """Check the file, or the settings that services would use here, and show the findings; return the exit code."""
    if file is not None:
        os.environ["TOKENBUS_CONFIG"] = str(file.resolve())
    findings = examine(os.environ)
    show(findings, as_json=as_json)
    return 0 if checks.none_wrong(findings) else ending.OTHER


def examine(env: Mapping[str, str]) -> list[Finding]:
    try:
        settings = configuration.load(env)
    except SettingsError as e:
        todo = "fix it: nothing starts with these"
        wrong = [Finding(level="wrong", about="settings", says=str(each), todo=todo) for each in _each_of(e, env)]
        return checks.one_hint_per_cause(wrong)
    found = [Finding(level="ok", about="settings", says=env.get("TOKENBUS_CONFIG") or "defaults")]
    found += check_settings(settings, env)
    # Keys may be set only for the fetchers, so a key that is missing here is no fault of the file.
    for finding in checks_work.check_providers(settings, env):
        missing = finding.level == "wrong" and "holds no key here" in finding.says
        found.append(
            Finding(level="note", about=finding.about, says=finding.says, todo=finding.todo) if missing else finding
        )
    return checks.one_hint_per_cause(found)


def _each_of(first: SettingsError, env: Mapping[str, str]) -> list[SettingsError]:
    """All errors of the file, of which loading it reports the first; that one alone if it is about something else."""
    path = env.get("TOKENBUS_CONFIG")
    try:
        return (configuration.wrong_values(Path(path)) if path else []) or [first]
    except SettingsError:
        return [first]
