"""All that we use of `faststream._internal`, which may change in any release of FastStream: a test names these two."""

from faststream._internal.broker.registrator import Registrator
from faststream._internal.endpoint.subscriber.call_item import CallsCollection

__all__ = ["CallsCollection", "Registrator"]
