"""Tools of MCP servers (https://modelcontextprotocol.io): listed and called through one connection a server.

What the protocol says is the official `mcp` package's; how a server is started, bounded, lost and found again is ours.
Nothing here is imported without `[mcp.NAME]` in the settings, for it needs the extra `mcp`.
"""
