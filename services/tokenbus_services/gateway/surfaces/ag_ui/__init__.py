"""AG-UI (protocol 1.0): a run as the events of an agent, and how a client joins it again."""

from tokenbus_services.gateway.surfaces.ag_ui.surface import AgUiSurface

__all__ = ["AgUiSurface"]
