"""Decode one attempt's raw frames into normalised events: frames in order, the right decoder, exactly one end."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenbus.core.image_header import found, measured
from tokenbus.core.run.attempts import WORKER_LOST
from tokenbus.events.error_info import ErrorInfo, stream_cut
from tokenbus.events.frames import (
    ANY_FRAME,
    BusEvent,
    Data,
    Ended,
    ImagesRequested,
    Lost,
    Noted,
    Opened,
    RawFrame,
    RawItem,
)
from tokenbus.events.normalized import BlockStart, BlockStop, Cut, Done, Failed, Image, Start, ToolCallDone
from tokenbus.events.quirks import ApiName
from tokenbus.providers import registry
from tokenbus.providers.api import Decoder
from tokenbus.providers.response.error_mapping import request_id_of


class _Saved(msgspec.Struct, array_like=True):
    attempt: int
    next_frame: int
    over: bool
    terminal: bool
    api: ApiName | None
    decoder: bytes
    images: ImagesRequested = ImagesRequested()
    provider: str = ""
    request_id: str | None = None
    called_ms: int = 0
    opened_ms: int = 0
    traceparent: str = ""
    steers: bool = False


class AttemptReader:
    """Decodes one attempt. ``over`` is set by its last frame."""

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self.over = False
        self.images = ImagesRequested()
        """How the request asked for images."""
        self.opened_ms = 0
        """Unix time of the flush with the answer's head; 0: no answer."""
        self.traceparent = ""
        """The publisher's trace context."""
        self._next = 0
        self._terminal = False
        self._api: ApiName | None = None
        self._provider = ""
        self._request_id: str | None = None
        self._called_ms = 0
        self._steers = False
        self._decoder: Decoder | None = None

    @property
    def frames(self) -> int:
        """How many frames it has read."""
        return self._next

    def read(self, frame: RawFrame) -> list[BusEvent]:
        """The events that this frame completes. A duplicate frame has none; a gap ends the attempt as cut."""
        events: list[BusEvent] = []
        if frame.n != ANY_FRAME:
            if frame.n < self._next:
                return []
            if frame.n > self._next:
                missing = f"frames {self._next} to {frame.n - 1} of the attempt were lost on the server"
                error = ErrorInfo(code="frames_lost", kind="network", message=missing, retryable=True)
                self._emit([Cut(missing, error)], events)
            self._next = frame.n + 1
        for item in frame.items:
            self._item(item, events)
            if isinstance(item, Opened):
                self.opened_ms = frame.at_ms
        return events

    def _item(self, item: RawItem, events: list[BusEvent]) -> None:
        match item:
            case Data():
                if self._decoder and not self._terminal:
                    self._emit(self._decoder.feed(item.data), events)
            case Opened():
                self._api, self._provider = item.api, item.provider
                self.images = item.images
                self._request_id = request_id_of(item.headers)
                self._called_ms, self.traceparent, self._steers = item.called_ms, item.traceparent, item.steers
                self._decoder = registry.get(item.api).decoder(
                    status=item.status, headers=item.headers, stream=item.stream, quirks=item.quirks
                )
            case Noted():
                if not self._terminal:
                    events.append(item)
            case Ended():
                self._called_ms = self._called_ms or item.called_ms
                self._emit(self._end(item.error), events)
                self.over = True
            case Lost():
                error = ErrorInfo(code=WORKER_LOST, kind="internal", message=item.reason, retryable=True)
                self._emit([Cut(item.reason, error)], events)
                self.over = True

    def _end(self, error: ErrorInfo | None) -> Sequence[BusEvent]:
        """End the call.

        If the provider sent a terminal event, it came before this. The decoder's events for the end of the body are
        valid only if the body did end: a connection that broke after a finish reason may have lost a call.
        """
        if self._decoder is None:
            return [Failed(error)] if error else [Cut("the call ended without an answer")]
        if error is None:
            return self._decoder.end()
        if error.kind not in ("network", "timeout"):
            return [Failed(error)]
        return [
            Cut(error.message, error) if isinstance(event, Cut | Done) else event
            for event in self._decoder.end()
            if not isinstance(event, BlockStop | ToolCallDone)  # a block that only ends here is incomplete
        ]

    def _emit(self, new: Sequence[BusEvent], events: list[BusEvent]) -> None:
        for event in new:
            if self._terminal:
                return
            match event:
                case BlockStart() | Image():
                    events.append(self._with_request_model(event))
                case Start():
                    events.append(self._with_origin(event))
                case Failed() | Cut():
                    events.append(self._named(event))
                case _:
                    events.append(event)
            self._terminal = isinstance(event, Done | Failed | Cut)

    def _with_origin(self, event: Start) -> Start:
        """Add what the fetcher knows of the call."""
        return msgspec.structs.replace(
            event,
            api=self._api or "",
            provider=self._provider,
            called_ms=self._called_ms,
            request_id=self._request_id or "",
            steers=self._steers,
        )

    def _named(self, event: Failed | Cut) -> Failed | Cut:
        """Add the time of the call and the provider's request id, which the body does not contain."""
        if self._called_ms:
            event = msgspec.structs.replace(event, called_ms=self._called_ms)
        if not self._request_id:
            return event
        error = event.error or stream_cut(event.reason) if isinstance(event, Cut) else event.error
        error = msgspec.structs.replace(error, request_id=error.request_id or self._request_id)
        return msgspec.structs.replace(event, error=error)

    def _with_request_model(self, event: BlockStart | Image) -> BlockStart | Image:
        """Add the request's image settings if the answer has none."""
        requested = self.images
        if isinstance(event, BlockStart):
            start = event.kind == "image" and requested.prompt and not event.prompt
            return msgspec.structs.replace(event, prompt=requested.prompt) if start else event
        return msgspec.structs.replace(
            measured(found(event, requested.moved)),
            prompt=event.prompt or requested.prompt,
            model=event.model or requested.model,
            size=event.size or requested.size,
            quality=event.quality or requested.quality,
        )

    def save(self) -> bytes:
        """Serialize the state for `load`."""
        decoder = msgspec.msgpack.encode(self._decoder) if self._decoder else b""
        about = (self._api, decoder, self.images, self._provider, self._request_id, self._called_ms)
        about += (self.opened_ms, self.traceparent, self._steers)
        saved = _Saved(self.attempt, self._next, self.over, self._terminal, *about)
        return msgspec.msgpack.encode(saved)

    @classmethod
    def load(cls, state: bytes) -> AttemptReader:
        """Restore a reader from `save`."""
        saved = msgspec.msgpack.decode(state, type=_Saved)
        self = cls(saved.attempt)
        self.images, self._provider, self._request_id = saved.images, saved.provider, saved.request_id
        self._called_ms, self.opened_ms, self.traceparent = saved.called_ms, saved.opened_ms, saved.traceparent
        self._steers = saved.steers
        self._next, self.over, self._terminal, self._api = saved.next_frame, saved.over, saved.terminal, saved.api
        if saved.api and saved.decoder:
            self._decoder = registry.get(saved.api).restore(saved.decoder)
        return self
