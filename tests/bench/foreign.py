"""Other gateways that install from the registries, each behind the same client and in front of the same provider.

`python -m tests.bench.foreign` installs those that are absent. Not among them: Bifrost and Helicone (packages that
download a program), any-llm (a container), OmniRoute (does not install), Claude Code Router (has Messages alone).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from tests.bench.http_clients import Door
from tests.bench.procs import ROOT, Processes, answers
from tokenbus_services.process.embedded_server import free_port

PLACE = ROOT / "build" / "gateways"
_START_S = 180.0
_KEY = "fgw_0123456789abcdef0123456789abcdef"


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """How a gateway starts."""

    command: Sequence[str]
    ready: str
    """A path that answers when it has started."""
    env: Mapping[str, str] = {}
    headers: Mapping[str, str] = {}
    """Of each request."""


class Foreign(msgspec.Struct, frozen=True):
    """A gateway of others. None of these keeps an answer whose client or process is gone."""

    name: str
    program: str
    """What its installation puts into its folder."""
    pip: str = ""
    npm: Mapping[str, object] = {}
    """Its `package.json`."""
    start: Callable[[Path, str, int, Sequence[str]], Start] | None = None
    """Of a folder for its files, the provider's address, a port, and models."""

    @property
    def folder(self) -> Path:
        """Where it is installed."""
        return PLACE / self.name.lower()

    def install(self) -> None:
        """Raises CalledProcessError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.pip:
            subprocess.run([sys.executable, "-m", "venv", self.folder], check=True)
            subprocess.run([self.folder / "bin" / "pip", "install", "--quiet", self.pip], check=True)
        else:
            (self.folder / "package.json").write_text(json.dumps(self.npm))
            subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund"], cwd=self.folder, check=True)


def _litellm(folder: Path, provider: str, port: int, models: Sequence[str]) -> Start:
    served = [
        {
            "model_name": name,
            "litellm_params": {"model": f"openai/{name}", "api_base": f"{provider}/v1", "api_key": "k"},
        }
        for name in models
    ]
    settings = {"drop_params": False, "telemetry": False, "request_timeout": 600, "num_retries": 0}
    config = folder / "config.yaml"
    config.write_text(json.dumps({"model_list": served, "litellm_settings": settings}))  # JSON is valid YAML
    program = LITELLM.folder / LITELLM.program
    code = f"import sys; sys.argv[0] = {str(program)!r}; from litellm import run_server; run_server()"
    options = ("--config", str(config), "--port", str(port), "--host", "127.0.0.1", "--telemetry", "False")
    return Start(
        command=[str(program.with_name("python")), "-c", code, *options],
        env={"LITELLM_LOG": "ERROR", "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"},
        ready="/health/liveliness",
    )


def _portkey(folder: Path, provider: str, port: int, models: Sequence[str]) -> Start:
    program = str(PORTKEY.folder / PORTKEY.program)
    headers = {"x-portkey-provider": "openai", "x-portkey-custom-host": f"{provider}/v1"}
    return Start(command=["node", program, f"--port={port}", "--headless"], headers=headers, ready="/")


def _ferro(folder: Path, provider: str, port: int, models: Sequence[str]) -> Start:
    (folder / "config.yaml").write_text(
        json.dumps({"strategy": {"mode": "fallback"}, "targets": [{"virtual_key": "ollama"}]})
    )
    env = {"GATEWAY_CONFIG": str(folder / "config.yaml"), "MASTER_KEY": _KEY, "PORT": str(port)}
    env |= {"OLLAMA_HOST": provider, "OLLAMA_MODELS": ",".join(models)}  # of its providers, the one with a set address
    headers = {"authorization": f"Bearer {_KEY}"}
    return Start(command=[str(FERRO.folder / FERRO.program), "serve"], env=env, headers=headers, ready="/readyz")


def _mlflow(folder: Path, provider: str, port: int, models: Sequence[str]) -> Start:
    config = {"openai_api_key": "k", "openai_api_base": f"{provider}/v1"}
    served = [
        {
            "name": name,
            "endpoint_type": "llm/v1/chat",
            "model": {"provider": "openai", "name": name, "config": config},
        }
        for name in models
    ]
    (folder / "config.yaml").write_text(json.dumps({"endpoints": served}))
    program, options = (
        str(MLFLOW.folder / MLFLOW.program),
        ("--host", "127.0.0.1", "--port", str(port), "--workers", "1"),
    )
    command = [program, "gateway", "start", "--config-path", str(folder / "config.yaml"), *options]
    return Start(command=command, ready="/health")


LITELLM = Foreign("LiteLLM", "bin/litellm", pip="litellm[proxy]", start=_litellm)
# With newer versions of hono each streamed answer is a 500.
PORTKEY = Foreign(
    "Portkey",
    "node_modules/@portkey-ai/gateway/build/start-server.js",
    npm={
        "dependencies": {"@portkey-ai/gateway": "1.15.2"},
        "overrides": {"@hono/node-server": "1.13.7", "hono": "4.9.7"},
    },
    start=_portkey,
)
FERRO = Foreign("Ferro", "bin/ferrogw", pip="ferrogw", start=_ferro)
MLFLOW = Foreign("MLflow", "bin/mlflow", pip="mlflow[gateway]", start=_mlflow)
GATEWAYS = (LITELLM, PORTKEY, FERRO, MLFLOW)


@contextmanager
def running(gateway: Foreign, provider: str, models: Sequence[str]) -> Generator[tuple[int, Door] | None]:
    """Process id and door of a gateway; None if it is not installed."""
    if not (gateway.folder / gateway.program).exists():
        print(
            f"bench: {gateway.name} is left out: python -m tests.bench.foreign installs it", file=sys.stderr, flush=True
        )
        yield None
        return
    port = free_port()
    with TemporaryDirectory(prefix="tokenbus-bench-foreign-") as directory:
        assert gateway.start
        start = gateway.start(Path(directory), provider, port, models)
        with Processes(Path(directory)) as processes:
            processes.run(gateway.name, list(start.command), env=start.env)
            url = f"http://127.0.0.1:{port}"
            processes.until(lambda: answers(f"{url}{start.ready}"), gateway.name, _START_S)
            yield processes.pids[gateway.name], Door(f"{url}/v1", start.headers)


def main() -> None:
    """Install what is absent."""
    for gateway in GATEWAYS:
        if not (gateway.folder / gateway.program).exists():
            print(f"installing {gateway.name}", flush=True)
            gateway.install()


if __name__ == "__main__":
    main()
