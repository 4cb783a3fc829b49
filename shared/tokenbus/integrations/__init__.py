"""Plug-ins for frameworks of voice agents, each over the client. Needs the framework, which `import tokenbus` does not:

`tokenbus.integrations.livekit` (extra `livekit`) and `tokenbus.integrations.pipecat` (extra `pipecat`).
"""
