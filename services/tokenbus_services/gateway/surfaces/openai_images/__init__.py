"""OpenAI's Images API, `POST /v1/images/generations`: a prompt in, images out. Pure."""

from __future__ import annotations

import re
from typing import Any, cast

from tokenbus.events import public
from tokenbus.events.requests import ImageOptions, Message
from tokenbus.events.usage import Usage
from tokenbus_services.gateway.problem import Problem, invalid, of_end, of_run
from tokenbus_services.gateway.surfaces.contract import (
    Answer,
    Encoder,
    GatewayNote,
    GatewayRequest,
    Translated,
    TranslationRules,
    WholeAnswer,
    encode_line,
)
from tokenbus_services.gateway.surfaces.errors import openai_error, openai_refusal
from tokenbus_services.gateway.surfaces.fields import Fields, Json
from tokenbus_services.gateway.surfaces.surface import Surface, SurfaceRequest

MAX_IMAGES = 10
MAX_PREVIEWS = 3
_WORD = re.compile(r"[A-Za-z0-9:._-]{1,64}")


class MadeImages:
    """Collects the images of a run; those of a void attempt are not among them."""

    def __init__(self) -> None:
        self._images: dict[int, public.ImageRef] = {}

    def add(self, event: public.PublicEvent) -> None:
        match event:
            case public.BlockComplete(image=public.ImageRef() as image) if (
                event.kind == "image" and image.base64 and not image.draft
            ):
                self._images[event.block] = image
            case public.Retrying() | public.Restarted():
                self._images = {block: image for block, image in self._images.items() if block < event.drop_from}
            case _:
                pass

    @property
    def images(self) -> list[public.ImageRef]:
        return [self._images[block] for block in sorted(self._images)]


class WholeImages(WholeAnswer):
    def __init__(self, note: GatewayNote, run: str) -> None:
        self._note = note
        self._run = run
        self._made = MadeImages()

    def feed(self, event: public.PublicEvent) -> Answer | None:
        self._made.add(event)
        if not isinstance(event, public.TERMINAL):
            return None
        if problem := problem_of(event, self._made.images, self._run):
            return openai_refusal(problem)
        data = [{"b64_json": image.base64, **_revised(image)} for image in self._made.images]
        body: Json = {"created": self._note.created, "data": data}
        body |= _known("output_format", _format(self._made.images[0]), ("png", "jpeg", "webp"))
        if event.usage:
            body["usage"] = usage_object(event.usage)
        return Answer(status=200, body=encode_line(body))


class ImageStream(Encoder):
    """Previews as they come, and the images at the run's end: a retry may void one before that."""

    def __init__(self, note: GatewayNote, run: str) -> None:
        self._note = note
        self._run = run
        self._made = MadeImages()

    def feed(self, event: public.PublicEvent) -> list[bytes]:
        self._made.add(event)
        if isinstance(event, public.ImagePreview) and event.image.base64:
            return [self._event("partial_image", event.image, partial_image_index=event.index)]
        if not isinstance(event, public.TERMINAL):
            return []
        if problem := problem_of(event, self._made.images, self._run):
            return self.broken(problem)
        usage = usage_object(event.usage or Usage())
        return [self._event("completed", image, usage=usage) for image in self._made.images]

    def broken(self, problem: Problem) -> list[bytes]:
        return [b"event: error\ndata: %b\n\n" % encode_line({"type": "error", "error": openai_error(problem)})]

    def _event(self, kind: str, image: public.ImageRef, **fields: object) -> bytes:
        name = f"image_generation.{kind}"
        body: Json = {
            "type": name,
            "b64_json": image.base64,
            "created_at": self._note.created,
            "size": image.size or "auto",
            "quality": image.quality or "auto",
            "background": "auto",
            "output_format": _format(image),
            **fields,
        }
        return b"event: %b\ndata: %b\n\n" % (name.encode(), encode_line(body))


def problem_of(event: public.PublicEvent, images: list[public.ImageRef], run: str) -> Problem | None:
    """Why the run gave no images; None if it did."""
    match event:
        case public.RunFailedEvent(error=error):
            return of_run(error, run)
        case public.Incomplete(error=error) if error:
            return of_run(error, run)
        case public.Cancelled():
            return of_end(event)
        case public.Completed() if images:
            return None
        case _:
            why = "the model answered without an image"
            return Problem(status=502, code="no_image", message=why, kind="protocol", run=run)


def usage_object(usage: Usage) -> Json:
    """Token counts. How many of the input's are an image's is not known on the bus."""
    given, made = usage.input or 0, usage.output or 0
    return {
        "input_tokens": given,
        "input_tokens_details": {"image_tokens": 0, "text_tokens": given},
        "output_tokens": made,
        "total_tokens": given + made if usage.total is None else usage.total,
    }


def _format(image: public.ImageRef) -> str:
    return image.media_type.removeprefix("image/")


def _known(name: str, value: str, values: tuple[str, ...]) -> Json:
    return {name: value} if value in values else {}


def _revised(image: public.ImageRef) -> Json:
    return {"revised_prompt": image.revised_prompt} if image.revised_prompt else {}


def read(asked: GatewayRequest, rules: TranslationRules, body: Fields) -> Translated:
    """Translate a request. Raises Refusal."""
    name, stream = body.needed("model", body.text("model")), body.flag("stream") or False
    ask = SurfaceRequest(asked, rules, body, model=name, stream=stream, speaks="openai-images")
    prompt = body.needed("prompt", body.text("prompt"))
    body.only("response_format", "b64_json", why="with another value than 'b64_json' is not supported by this gateway")
    body.only("moderation", "auto")
    body.only("output_compression", 100)
    if ask.model.api != "openai-images":
        body.only("n", 1, why="above 1 is not supported by this provider")
    images = ImageOptions(
        size=_word(body, "size"),
        quality=_word(body, "quality"),
        format=cast("Any", body.one_of("output_format", ("png", "jpeg", "webp"))),
        background=cast("Any", body.one_of("background", ("transparent", "opaque", "auto"))),
        count=body.whole("n", least=1, most=MAX_IMAGES) or 1,
        previews=body.whole("partial_images", most=MAX_PREVIEWS) or 0,
        deliver="base64",
    )
    if images.previews and not stream:
        raise invalid("partial_images", "is for streams only")
    user = ask.optional("user_id", body, "user", body.text, "")
    safety = ask.optional("user_id", body, "safety_identifier", body.text, "")
    fields: Json = {
        "messages": [Message(role="user", content=prompt)],
        "images": images,
        "user_id": safety or user or None,
    }
    return ask.translated(fields)


def _word(body: Fields, name: str) -> str | None:
    value = body.text(name)
    if value is not None and not _WORD.fullmatch(value):
        raise invalid(body.path(name), "must be a word of at most 64 letters, digits and ':._-'")
    return value


class OpenAIImagesSurface(Surface):
    """Images of a prompt."""

    name = "openai_images"
    inlines_media = True
    keep_alive = b": keep-alive\n\n"
    paths = ("/v1/images/generations",)
    read = staticmethod(read)
    refusal = staticmethod(openai_refusal)

    def encoder(self, request: GatewayRequest | None, note: GatewayNote, run: str) -> ImageStream:
        return ImageStream(note, run)

    def whole(self, note: GatewayNote, run: str) -> WholeAnswer:
        return WholeImages(note, run)
