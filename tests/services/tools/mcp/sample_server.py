"""An MCP server for tests, written with the official package: on stdio, or with a port as its argument on HTTP.

What a test wants to know of it afterwards is in the file that the variable NOTES names.
"""

import os
import sys
from pathlib import Path

import anyio
from mcp.server import MCPServer
from mcp.server.mcpserver import Context, Image
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.request_state import RequestStateSecurity
from mcp_types import (
    CallToolResult,
    ElicitRequest,
    ElicitRequestFormParams,
    ElicitRequestURLParams,
    ElicitResult,
    InputRequest,
    InputRequiredResult,
    ListRootsRequest,
    TextContent,
)

server = MCPServer("sample", request_state_security=RequestStateSecurity(keys=["one secret of all its processes."]))
NOTES = os.environ.get("NOTES", os.devnull)


def note(text: str) -> None:
    with Path(NOTES).open("a") as file:
        file.write(text + "\n")


@server.tool()
def echo(text: str) -> str:
    """Says it again."""
    return text


@server.tool()
def variable(name: str) -> str:
    return os.environ.get(name, "not set")


@server.tool()
def pid() -> str:
    return str(os.getpid())


@server.tool()
def fail(why: str) -> str:
    raise ToolError(why)


@server.tool(structured_output=False)
def picture() -> list[str | Image]:
    return ["Look:", Image(data=b"\x89PNG none", format="png")]


@server.tool(structured_output=False)
def parts(count: int) -> list[str]:
    return ["x"] * count


@server.tool(name="dotted.name")
def dotted() -> str:
    return "dotted"


@server.tool()
async def slow(ctx: Context) -> str:
    """Never ends by itself."""
    await ctx.report_progress(1, 4, "one of four")
    note("began")
    try:
        await anyio.sleep_forever()
    finally:
        note("cancelled")
    return ""


@server.tool()
async def grow(ctx: Context) -> str:
    """From now on there is one tool more."""

    def late() -> str:
        return "late"

    server.add_tool(late)
    await ctx.notify_tools_changed()
    return "grown"


SEAT = {"type": "object", "properties": {"seat": {"type": "string"}}, "required": ["seat"]}


@server.tool()
async def book(flight: str, ctx: Context) -> CallToolResult | InputRequiredResult:
    """Asks for a seat and for a signature, and then whether it should be booked."""
    given = ctx.input_responses
    note(f"book {ctx.request_state} {sorted(given) if given else None}")
    if not given:
        form = ElicitRequestFormParams(message=f"Which seat on {flight}?", requested_schema=SEAT)
        page = ElicitRequestURLParams(message="Sign.", url="https://sign.example/1")
        requests: dict[str, InputRequest] = {"seat": ElicitRequest(params=form), "page": ElicitRequest(params=page)}
        return InputRequiredResult(input_requests=requests, request_state="first")
    if "seat" in given:
        seat, page = given["seat"], given["page"]
        assert isinstance(seat, ElicitResult)
        assert isinstance(page, ElicitResult)
        if seat.action != "accept" or not seat.content:
            return CallToolResult(content=[TextContent(text=f"not booked: {seat.action}, {page.action}")])
        text = f"{flight}/{seat.content['seat']}, {page.action}, {page.content}"
        return CallToolResult(content=[TextContent(text=text)])
    raise ToolError("it was asked nothing of the kind")


@server.tool()
async def polled(ctx: Context) -> CallToolResult | InputRequiredResult:
    """Is ready the third time."""
    times = int(ctx.request_state or "0")
    if times < 2:
        return InputRequiredResult(request_state=str(times + 1))
    return CallToolResult(content=[TextContent(text="ready")])


@server.tool()
async def asks_for_roots() -> CallToolResult | InputRequiredResult:
    return InputRequiredResult(input_requests={"roots": ListRootsRequest()})


if __name__ == "__main__":
    note(f"pid {os.getpid()}")
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        print("a print that went astray", flush=True)
        server.run()
