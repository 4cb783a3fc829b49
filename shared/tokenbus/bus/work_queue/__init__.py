"""Work queue: competing consumers for long, independent items, at-least-once delivery.

What the items are, and what is done with them, belongs to the services.
"""

from tokenbus.bus.work_queue.items import QueueItem
from tokenbus.bus.work_queue.queue import WorkQueue
from tokenbus.bus.work_queue.reader import BLOCK_MS

__all__ = ["BLOCK_MS", "QueueItem", "WorkQueue"]
