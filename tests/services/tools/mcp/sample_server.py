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

server = MCPServer("sample")
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


if __name__ == "__main__":
    note(f"pid {os.getpid()}")
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        print("a print that went astray", flush=True)
        server.run()
