"""The image and compose.yaml as a person uses them: `docker` and Compose, whichever of its two generations is here."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from tokenbus_services.process.embedded_server import free_port

ROOT = Path(__file__).parents[2]
IMAGE = "tokenbus:test"
SERVICES = ("fetcher", "normalizer", "parser", "tools", "blobs")
PROVIDER_KEYS = {"ANTHROPIC_API_KEY": "sk-ant-in-the-test", "OPENAI_API_KEY": "sk-openai-in-the-test"}


def docker(*arguments: str) -> str:
    """A docker command's stdout. Raises AssertionError with its output if it failed."""
    return _run(["docker", *arguments])


def engine_missing() -> str | None:
    """Why nothing here can run, or None."""
    if shutil.which("docker") is None:
        return "no docker command here"
    if _status("docker", "info", "--format", "{{.ServerVersion}}"):
        return "no Docker engine answers here"
    if _compose() is None:
        return "neither `docker compose` nor docker-compose here"
    return None


def build() -> str:
    """Build the image, of which the engine keeps most from the last time. Its name.

    With the host's network, since a name server or proxy that only the host reaches is then of use too.
    """
    docker("build", "--network", "host", "--file", str(ROOT / "deploy/docker/Dockerfile"), "--tag", IMAGE, str(ROOT))
    return IMAGE


class Stack:
    """One Compose project."""

    def __init__(self, project: str, files: Sequence[str] = (), **env: str) -> None:
        """``files``: Compose files beside the two of every test. ``env``: changes what they are read with."""
        self._project = project
        self._files = ("compose.yaml", *files, "tests/docker/compose.replay.yaml")
        self._env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("TOKENBUS_")},
            **PROVIDER_KEYS,
            "TOKENBUS_IMAGE": IMAGE,
            "TOKENBUS_SETTINGS": "./tests/docker/settings",
            "VALKEY_PORT": str(free_port()),
            "BLOBS_PORT": str(free_port()),
            **env,
        }

    @property
    def redis_url(self) -> str:
        """Valkey, for programs outside the containers."""
        return f"redis://127.0.0.1:{self._env['VALKEY_PORT']}"

    @property
    def blobs_url(self) -> str:
        """The blob store, for programs outside the containers."""
        return f"http://127.0.0.1:{self._env['BLOBS_PORT']}"

    def compose(self, *arguments: str) -> str:
        """A Compose command's stdout. Raises AssertionError with its output if it failed."""
        files = (option for file in self._files for option in ("--file", file))
        command = _compose()
        assert command
        return _run([*command, "--project-name", self._project, *files, *arguments], self._env)

    def up(self, **scale: int) -> None:
        """Start what does not run; each service once, unless scaled."""
        counts = {name: scale.get(name, 1) for name in SERVICES}
        self.compose("up", "--detach", "--no-build", *(f"--scale={name}={n}" for name, n in counts.items()))

    def containers(self, service: str | None = None, *, running: bool = True) -> list[str]:
        """Ids of the project's containers, or of one service of it."""
        labels = [f"com.docker.compose.project={self._project}"]
        if service:
            labels.append(f"com.docker.compose.service={service}")
        filters = [f"--filter=label={label}" for label in labels]
        return docker("ps", "--quiet", "--no-trunc", *([] if running else ["--all"]), *filters).split()

    def ready(self, *services: str) -> bool:
        """Whether the health check of every service, or of these, is content: asked now, not when its time comes."""
        check = inspect(IMAGE)["Config"]["Healthcheck"]["Test"][1:]
        return all(
            (ids := self.containers(service)) and not any(_status("docker", "exec", one, *check) for one in ids)
            for service in services or SERVICES
        )

    def left(self) -> list[str]:
        """Names of all that this project has on the engine."""
        label = f"--filter=label=com.docker.compose.project={self._project}"
        kinds = (("ps", "--all"), ("network", "ls"), ("volume", "ls"))
        return [name for kind in kinds for name in docker(*kind, "--quiet", label).split()]


@contextmanager
def running(project: str) -> Generator[Stack]:
    """A project that is up, and at the end gone with its volumes."""
    stack = Stack(project)
    try:
        stack.up()
        yield stack
    finally:
        stack.compose("down", "--volumes")


def inspect(thing: str) -> dict[str, Any]:
    """What the engine knows of a container or an image."""
    [known] = msgspec.json.decode(docker("inspect", thing))
    return known


def kill_inside(container: str) -> None:
    """kill -9 to all that runs in a container: to the engine it has crashed. (`docker kill` is an order of its owner's,
    after which no restart policy holds.)"""
    _status("docker", "exec", container, "sh", "-c", "kill -9 -1")  # which ends the command that says so, too


@cache
def _compose() -> list[str] | None:
    """The command of Compose 2, else that of 1.29."""
    if not _status("docker", "compose", "version"):
        return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else None


def _status(*command: str) -> int:
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode


def _run(command: Sequence[str], env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-4000:]}"
    return done.stdout
