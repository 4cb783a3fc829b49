"""Tools of MCP servers (https://modelcontextprotocol.io), listed and called through one connection per server.

The official `mcp` package implements the protocol; this package starts, bounds, supervises and restarts servers. It
needs the extra `mcp`, so nothing here is imported unless the settings have `[mcp.NAME]`.
"""
