"""An MCP server of 2025-06-18 for tests, written by hand, without features of later versions."""

import json
import os
import sys
from pathlib import Path
from typing import Any

TOOLS = [{"name": sys.argv[1] if len(sys.argv) > 1 else "wait", "inputSchema": {"type": "object"}}]

VISITED: list[object] = []
CHOOSING: list[object] = []


def note(text: str) -> None:
    with Path(os.environ.get("NOTES", os.devnull)).open("a") as file:
        file.write(text + "\n")


def send(**message: Any) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def answer(request: dict[str, Any]) -> None:
    result: dict[str, Any]
    match request["method"]:
        case "initialize":
            capabilities = {"tools": {"listChanged": True}}
            info = {"name": "older", "version": "1"}
            result = {"protocolVersion": "2025-06-18", "capabilities": capabilities, "serverInfo": info}
        case "tools/list" if "cursor" in request.get("params", {}):
            result = {"tools": TOOLS[1:]}
        case "tools/list":
            result = {"tools": TOOLS[:1], "nextCursor": "1"}
        case "tools/call" if request["params"]["name"] == "wait":
            TOOLS.append({"name": "late", "inputSchema": {"type": "object"}})
            send(method="notifications/tools/list_changed")
            return  # never answered
        case "tools/call" if request["params"]["name"] == "visit" and not VISITED:
            VISITED.append(request["params"])
            pages = [{"mode": "url", "message": "", "url": "https://sign.example/1", "elicitationId": "one"}]
            error = {"code": -32042, "message": "Sign first.", "data": {"elicitations": pages}}
            send(id=request["id"], error=error)
            return
        case "tools/call" if request["params"]["name"] == "choose":
            schema = {"type": "object", "properties": {"seat": {"type": "string"}}, "required": ["seat"]}
            params = {"message": "Which seat?", "requestedSchema": schema}
            CHOOSING.append(request["id"])
            send(id=f"ask {request['id']}", method="elicitation/create", params=params)
            return
        case "tools/call" if request["params"].get("arguments"):
            send(id=request["id"], error={"code": -32000, "message": "out of order"})
            return
        case "tools/call":
            result = {"content": [], "structuredContent": {"degrees": 7}}
        case _:
            send(id=request["id"], error={"code": -32601, "message": "Method not found"})
            return
    send(id=request["id"], result=result)


note(f"pid {os.getpid()}")
for line in sys.stdin:
    message = json.loads(line)
    if "method" not in message:
        chosen = message.get("result") or message["error"]["message"]
        send(id=CHOOSING.pop(0), result={"content": [{"type": "text", "text": json.dumps(chosen)}]})
    elif "id" in message:
        answer(message)
    else:
        note(message["method"])
