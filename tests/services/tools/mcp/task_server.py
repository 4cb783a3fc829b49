"""An MCP server whose calls become tasks, written with the official package's extensions: on stdio.

Its tasks are files beside the one that NOTES names, so each of its processes has them. What it did is in that file.
"""

import json
import os
import secrets
from pathlib import Path
from typing import Any

import anyio
from mcp.server import MCPServer
from mcp.server.extension import Extension, MethodBinding
from mcp_types import RequestParams
from pydantic import ConfigDict
from pydantic.alias_generators import to_camel

NOTES = Path(os.environ["NOTES"])
SEAT = {"type": "object", "properties": {"seat": {"type": "string"}}, "required": ["seat"]}


def note(text: str) -> None:
    with NOTES.open("a") as file:
        file.write(text + "\n")


def path_of(task: str) -> Path:
    return NOTES.with_name(f"task-{task}.json")


class Named(RequestParams):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)

    task_id: str


class Update(Named):
    input_responses: dict[str, Any]


class Tasks(Extension):
    identifier = "io.modelcontextprotocol/tasks"

    def methods(self) -> list[MethodBinding]:
        return [
            MethodBinding("tasks/get", Named, self.get),
            MethodBinding("tasks/update", Update, self.update),
            MethodBinding("tasks/cancel", Named, self.cancel),
        ]

    async def intercept_tool_call(self, params: Any, ctx: Any, call_next: Any) -> Any:
        task = secrets.token_hex(8)
        path_of(task).write_text(json.dumps({"tool": params.name, "word": (params.arguments or {}).get("word", "")}))
        note(f"called {params.name} {(params.arguments or {}).get('word', '')}")
        return {"resultType": "task", **self._about(task), "status": "working"}

    async def get(self, ctx: Any, params: Named) -> Any:
        note("asked")
        path = path_of(params.task_id)
        if not path.exists():
            return {"resultType": "complete", **self._about(params.task_id), "status": "cancelled"}
        found = json.loads(path.read_text())
        about = {"resultType": "complete", **self._about(params.task_id)}
        answers = found.get("answers", {})
        match found["tool"]:
            case "report" if _goes(found["word"]):
                return {
                    **about,
                    "status": "completed",
                    "result": {"content": [{"type": "text", "text": found["word"]}]},
                }
            case "book" if "seat" not in answers:
                return {**about, "status": "input_required", "inputRequests": {"seat": _form("Which seat?")}}
            case "book" if "sure" not in answers:
                both = {"seat": _form("Which seat?"), "sure": _form("Sure?")}
                return {**about, "status": "input_required", "inputRequests": both}
            case "book":
                text = f"{answers['seat']['content']['seat']}, {answers['sure']['action']}"
                return {**about, "status": "completed", "result": {"content": [{"type": "text", "text": text}]}}
            case "breaks":
                return {**about, "status": "failed", "error": {"code": -32000, "message": "out of paper"}}
            case _:
                return {**about, "status": "working", "statusMessage": "half of it"}

    async def update(self, ctx: Any, params: Update) -> Any:
        found = json.loads(path_of(params.task_id).read_text())
        found["answers"] = {**params.input_responses, **found.get("answers", {})}
        path_of(params.task_id).write_text(json.dumps(found))
        note(f"updated {sorted(params.input_responses)}")
        return {}

    async def cancel(self, ctx: Any, params: Named) -> Any:
        path_of(params.task_id).unlink()
        note("cancelled")
        return {}

    @staticmethod
    def _about(task: str) -> dict[str, Any]:
        when = "2026-11-29T00:00:00Z"
        return {"taskId": task, "createdAt": when, "lastUpdatedAt": when, "ttlMs": None, "pollIntervalMs": 50}


def _goes(word: str) -> bool:
    return f"go {word}" in NOTES.read_text().splitlines()


def _form(message: str) -> dict[str, Any]:
    return {
        "method": "elicitation/create",
        "params": {"mode": "form", "message": message, "requestedSchema": SEAT},
    }


server = MCPServer("tasks", extensions=[Tasks()])


@server.tool()
def report(word: str) -> str:
    """Writes a report."""
    raise AssertionError("it becomes a task")


@server.tool()
def book(word: str = "") -> str:
    """Books a seat."""
    raise AssertionError("it becomes a task")


@server.tool()
def breaks() -> str:
    raise AssertionError("it becomes a task")


if __name__ == "__main__":
    note(f"pid {os.getpid()}")
    anyio.run(server.run_stdio_async)
