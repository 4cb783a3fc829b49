"""Tools of a run: cancelled, of an MCP server, with images."""
