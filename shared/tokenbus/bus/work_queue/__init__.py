"""Work queue: competing consumers for long, independent items, at-least-once delivery.

What the items are, and what is done with them, belongs to the services.
"""

from tokenbus.bus.work_queue.consumer import QueueItem, QueueOptions
from tokenbus.bus.work_queue.queue import WorkQueue
from tokenbus.bus.work_queue.reader import BLOCK_MS, LONG_MS

__all__ = ["BLOCK_MS", "LONG_MS", "QueueItem", "QueueOptions", "WorkQueue"]
