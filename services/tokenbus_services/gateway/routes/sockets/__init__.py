"""Protocols over a WebSocket: the handshake that they share, chats of the AI SDK, and Responses."""
