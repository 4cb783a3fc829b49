"""One package per provider API: build its request, decode its stream. No IO here.

What all share has rooms of its own: framing (sse), the life of a response (decoding), errors (failures), the
conversation with every call answered (conversation), request rules (building). Who calls a provider lives in the
services.
"""
