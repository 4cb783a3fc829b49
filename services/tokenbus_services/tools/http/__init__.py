"""Tools behind HTTP: their endpoints, their signed requests, and the settings of an endpoint, which MCP servers over
HTTP share.
"""
