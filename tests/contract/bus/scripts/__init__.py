"""Each Lua script against a real server, refusals included."""
