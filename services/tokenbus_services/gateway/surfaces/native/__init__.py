"""The bus's own protocol over HTTP: requests and events as they are on the bus."""

from tokenbus_services.gateway.surfaces.native.surface import NativeSurface

__all__ = ["NativeSurface"]
