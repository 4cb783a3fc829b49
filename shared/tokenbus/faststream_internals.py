"""All that we use of FastStream's internals, which may change in any release of it: a test names them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from faststream._internal.broker.registrator import Registrator
from faststream._internal.endpoint.subscriber.call_item import CallsCollection
from faststream._internal.middlewares import BaseMiddleware
from faststream.middlewares.logging import (
    CriticalLogMiddleware,
    _LoggingMiddleware,  # pyright: ignore[reportPrivateUsage]
)
from faststream.redis.subscriber.usecases import StreamSubscriber

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["CallsCollection", "EventSubscriber", "MessageId", "Registrator"]


class MessageId(str):
    """A message id that FastStream's log does not cut to its first characters: those of many runs are the same."""

    __slots__ = ()

    def __getitem__(self, key: Any) -> str:
        return self


class _EventLog(_LoggingMiddleware):
    """FastStream's log of each message, which says nothing more after an error."""

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,
    ) -> bool:
        if not isinstance(exc_val, Exception):
            return await super().__aexit__(exc_type, exc_val, exc_tb)
        about: dict[str, Any] = self.context.get_local("log_context", {})
        words = f"{type(exc_val).__name__}: {exc_val}"
        self.logger.log(words, log_level=logging.ERROR, exc_info=exc_val, extra=about)
        await BaseMiddleware.__aexit__(self, exc_type, exc_val, exc_tb)
        return False


class _EventLogs(CriticalLogMiddleware):
    def __call__(self, msg: Any, /, *, context: Any) -> _EventLog:
        return _EventLog(logger=self.logger, msg=msg, context=context)


class EventSubscriber(StreamSubscriber):
    """A subscriber whose log says "Processed" only of what was."""

    def _SubscriberUsecase__build__middlewares_stack(self) -> tuple[Any, ...]:  # noqa: N802
        inherited: Any = super()
        stack = inherited._SubscriberUsecase__build__middlewares_stack()
        return tuple(_EventLogs(m.logger) if isinstance(m, CriticalLogMiddleware) else m for m in stack)
