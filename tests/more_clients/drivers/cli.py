"""Agents for the command line, without a terminal: each asks once, runs its shell tool, and prints the answer."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any, ClassVar

from tests.clients import node
from tests.more_clients.features import HELLO, Client

SOURCES = Path(__file__).parents[1] / "cli"


class CommandFailed(Exception):
    """What a command printed."""


class Agent(Client):
    needs = "CLIENTS_CLI"
    stream = None
    files = ()
    command: ClassVar[str]
    """Its path in `node_modules`."""
    arguments: ClassVar[tuple[str, ...]]

    def __init__(self, gateway: str) -> None:
        self.gateway = gateway

    @classmethod
    def is_here(cls) -> bool:
        return bool(os.environ.get(cls.needs))

    def environment(self, model: str, home: Path) -> dict[str, str]:
        raise NotImplementedError

    def ask(self, model: str, said: Any) -> Any:
        with tempfile.TemporaryDirectory(dir=Path(__file__).parents[3] / "build", prefix="agent-") as directory:
            home, work = Path(directory, "home"), Path(directory, "work")
            home.mkdir()
            work.mkdir()
            # Nothing of this machine's user: no key, no settings.
            own = {"PATH": f"{node.NODE.parent}:/usr/bin:/bin", "HOME": str(home), "CI": "1", "IS_SANDBOX": "1"}
            done = subprocess.run(
                [node.packages(SOURCES) / self.command, *(each.replace("MODEL", model) for each in self.arguments)],
                cwd=work, env=own | self.environment(model, home), stdin=subprocess.DEVNULL,
                capture_output=True, text=True, timeout=240, check=False,
            )  # fmt: skip
        if done.returncode:
            raise CommandFailed(done.stdout + done.stderr)
        return done.stdout.strip()

    def tool(self, model: str) -> Any:
        return self.ask(model, HELLO)


class ClaudeCode(Agent):
    name = "Claude Code"
    command = "@anthropic-ai/claude-code-linux-x64/claude"
    arguments = ("-p", HELLO, "--model", "MODEL", "--allowedTools", "Bash")

    def environment(self, model: str, home: Path) -> dict[str, str]:
        quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}  # it would wait for hosts that are not there
        return {"ANTHROPIC_BASE_URL": f"{self.gateway}/anthropic", "ANTHROPIC_AUTH_TOKEN": "any"} | quiet


class GeminiCLI(Agent):
    name = "Gemini CLI"
    command = ".bin/gemini"
    arguments = ("--yolo", "--skip-trust", "-m", "MODEL", "-p", HELLO)

    def environment(self, model: str, home: Path) -> dict[str, str]:
        (home / ".gemini").mkdir()
        settings = {"security": {"auth": {"selectedType": "gemini-api-key"}}}
        (home / ".gemini" / "settings.json").write_text(json.dumps(settings))
        return {"GOOGLE_GEMINI_BASE_URL": f"{self.gateway}/gemini", "GEMINI_API_KEY": "any"}


class Codex(Agent):
    name = "Codex"
    command = ".bin/codex"
    arguments = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", HELLO)

    def environment(self, model: str, home: Path) -> dict[str, str]:
        (home / ".codex").mkdir()
        provider = f'name = "bus"\nbase_url = "{self.gateway}/v1"\nwire_api = "responses"\nenv_key = "BUS_KEY"\n'
        text = f'model = "{model}"\nmodel_provider = "bus"\n[model_providers.bus]\n{provider}'
        (home / ".codex" / "config.toml").write_text(text)
        return {"BUS_KEY": "any"}


class QwenCode(Agent):
    name = "Qwen Code"
    command = "@qwen-code/qwen-code/cli-entry.js"
    arguments = ("--auth-type", "openai", "--yolo", "-m", "MODEL", "-p", HELLO)

    def environment(self, model: str, home: Path) -> dict[str, str]:
        return {"OPENAI_API_KEY": "any", "OPENAI_BASE_URL": f"{self.gateway}/v1"}


class OpenCode(Agent):
    name = "opencode"
    command = "opencode-linux-x64/bin/opencode"
    arguments = ("run", "-m", "bus/MODEL", HELLO)

    def environment(self, model: str, home: Path) -> dict[str, str]:
        options = {"baseURL": f"{self.gateway}/v1", "apiKey": "any"}
        bus = {"npm": "@ai-sdk/openai-compatible", "name": "bus", "options": options, "models": {model: {}}}
        settings = {"provider": {"bus": bus}, "autoupdate": False, "share": "disabled"}
        (home / ".config" / "opencode").mkdir(parents=True)
        (home / ".config" / "opencode" / "opencode.json").write_text(json.dumps(settings))
        return {f"OPENCODE_DISABLE_{name}": "1" for name in ("MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")}


CLIENTS = (ClaudeCode, GeminiCLI, Codex, QwenCode, OpenCode)
