"""Images in answers and how they are asked for: what each API has, and what is refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.unit.providers.reading import answer, cut, read, read_pieces, sse
from tests.unit.providers.request_builder import RequestBuilder
from tokenbus.blobs import blob_id_of
from tokenbus.events.frames import ImagesRequested
from tokenbus.events.normalized import BlockStart, BlockStop, Cut, Done, Extra, Failed, Image, Normalized, Opaque
from tokenbus.events.quirks import ApiName, Quirks
from tokenbus.events.requests import (
    Base64Source,
    BlobSource,
    DocumentPart,
    FileSource,
    Generate,
    ImageOptions,
    ImagePart,
    Message,
    TextPart,
    UrlSource,
)
from tokenbus.providers import registry
from tokenbus.providers.api import HttpCall
from tokenbus_services.mock_provider.request import read_form

CAT = Message(role="user", content="A cat.")
USAGE = {"input_tokens": 5, "output_tokens": 200, "total_tokens": 205}
FORM = {"output_format": "webp", "size": "1024x1024", "quality": "low"}


def part_of(data: str, **fields: Any) -> dict[str, Any]:
    return {"type": "image_generation.partial_image", "b64_json": data, "partial_image_index": 0, **FORM, **fields}


def whole_of(data: str, **fields: Any) -> dict[str, Any]:
    return {"type": "image_generation.completed", "b64_json": data, "usage": USAGE, **FORM, **fields}


def image(block: int, data: str, final: bool, **fields: Any) -> Image:
    return Image(block, "image/webp", data, final, size="1024x1024", quality="low", **fields)


def shown(events: list[Normalized]) -> list[Normalized]:
    return [e for e in events if isinstance(e, BlockStart | Image | BlockStop | Opaque | Extra)]


def image_part(data: str, media_type: str = "image/png") -> ImagePart:
    return ImagePart(source=Base64Source(media_type=media_type, data=data))


def edit_of(*datas: str, media_type: str = "image/png") -> list[Message]:
    return [Message(role="user", content=[TextPart(text="Blue."), *(image_part(data, media_type) for data in datas)])]


IMAGE = image_part("AAAA")
STORED = ImagePart(source=BlobSource(blob_id=blob_id_of(b""), media_type="image/png"))


def call_of(messages: list[Message], **fields: Any) -> HttpCall:
    request = Generate(provider="p", model="m", messages=messages, **fields)
    return registry.get("openai-images").build(request, [], Quirks()).call


def refused(api: ApiName, **fields: Any) -> str:
    return RequestBuilder(registry.get(api), model="m").refused(CAT, **fields)


# --- answers ----------------------------------------------------------------------------------------------------


def test_the_images_api_streams_previews_and_then_the_image() -> None:
    events = read("openai-images", sse(part_of("AAAA"), part_of("BBBB"), whole_of("CCCC")))
    assert shown(events) == [
        BlockStart(0, "image"),
        image(0, "AAAA", False),
        image(0, "BBBB", False),
        image(0, "CCCC", True),
        BlockStop(0),
    ]
    done = answer(events).terminal
    assert isinstance(done, Done)
    assert (done.finish, done.usage and done.usage.output) == ("stop", 200)


def test_several_images_are_blocks_one_after_the_other() -> None:
    events = read("openai-images", sse(part_of("AAAA"), whole_of("AAAA"), whole_of("BBBB")))
    assert [(e.block, e.base64, e.final) for e in events if isinstance(e, Image)] == [
        (0, "AAAA", False),
        (0, "AAAA", True),
        (1, "BBBB", True),
    ]


def test_images_that_are_not_streamed_are_the_same_blocks() -> None:
    made = [{"b64_json": "AAAA", "revised_prompt": "a black cat"}, {"b64_json": "BBBB"}, {"url": "https://x/y.png"}]
    body = msgspec.json.encode({"created": 1, "data": made, "usage": USAGE, **FORM})
    events = read("openai-images", body, stream=False)
    assert shown(events) == [
        *(BlockStart(0, "image"), image(0, "AAAA", True, revised_prompt="a black cat"), BlockStop(0)),
        *(BlockStart(1, "image"), image(1, "BBBB", True), BlockStop(1)),
        *(BlockStart(2, "image"), Extra("openai-images.url", '"https://x/y.png"', 2), BlockStop(2)),
    ]


@pytest.mark.parametrize("events", [(part_of("AAAA"),), (whole_of("AAAA"), part_of("BBBB")), ()])
def test_a_stream_without_its_last_image_is_cut(events: tuple[Any, ...]) -> None:
    assert isinstance(answer(read("openai-images", sse(*events))).terminal, Cut)


def test_an_error_in_the_stream_ends_it() -> None:
    error = {"type": "error", "error": {"code": "image_generation_failed", "message": "no"}}
    terminal = answer(read("openai-images", sse(part_of("AAAA"), error))).terminal
    assert isinstance(terminal, Failed)
    assert terminal.error.code == "image_generation_failed"


@pytest.mark.parametrize("data", [sse({"x": 1}), sse({"type": "later"}), b'{"data":7}'])
def test_what_is_no_answer_of_the_images_api_is_no_success(data: bytes) -> None:
    assert not isinstance(answer(read("openai-images", data)).terminal, Done)


def test_the_images_api_says_the_same_however_its_bytes_are_cut() -> None:
    data = sse(part_of("A" * 40), whole_of("B" * 40), part_of("C" * 40), whole_of("D" * 40))
    whole = read("openai-images", data)
    for size in (1, 7, 100):
        assert read_pieces("openai-images", cut(data, range(size, len(data), size)), restored=True) == whole


def test_an_event_of_twenty_megabytes_of_image_is_read() -> None:
    data = "A" * (27 * 2**20)
    [final] = [e for e in read("openai-images", sse(whole_of(data))) if isinstance(e, Image)]
    assert len(final.base64) == len(data)


def test_the_responses_tool_names_the_images_model_and_its_id_is_sent_back() -> None:
    tool = {"type": "image_generation", "model": "gpt-image-2"}
    item = {"id": "ig_1", "type": "image_generation_call", "status": "completed", "result": "BBBB", **FORM}
    about = {"output_index": 0, "item_id": "ig_1"}
    events = read(
        "openai-responses",
        sse(
            {"type": "response.created", "response": {"id": "r", "model": "gpt-5", "tools": [tool]}},
            {"type": "response.output_item.added", "item": item | {"result": None}, **about},
            {"type": "response.image_generation_call.partial_image", "partial_image_b64": "AAAA", **FORM, **about},
            {"type": "response.output_item.done", "item": item | {"revised_prompt": "a black cat"}, **about},
            {"type": "response.completed", "response": {"status": "completed"}},
        ),
    )
    assert shown(events) == [
        BlockStart(0, "image"),
        image(0, "AAAA", False, model="gpt-image-2"),
        image(0, "BBBB", True, model="gpt-image-2", revised_prompt="a black cat"),
        Opaque(0, "item_id", "ig_1"),
        BlockStop(0),
    ]


# --- requests ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", ["anthropic", "openai-chat"])
def test_an_api_without_images_refuses_to_be_asked_for_some(api: ApiName) -> None:
    assert refused(api, images=ImageOptions()) == "images"


@pytest.mark.parametrize(
    ("api", "option"),
    [
        *(("openai-responses", option) for option in ({"count": 2}, {"aspect_ratio": "1:1"})),
        *(("openai-images", option) for option in ({"model": "m"}, {"aspect_ratio": "1:1"})),
        *(("gemini", option) for option in ({"quality": "low"}, {"format": "png"}, {"previews": 1}, {"count": 2})),
        *(("gemini", option) for option in ({"background": "auto"}, {"model": "m"}, {"mask": IMAGE})),
    ],
)
def test_an_option_that_an_api_does_not_have_is_refused_by_name(api: ApiName, option: dict[str, Any]) -> None:
    assert refused(api, images=ImageOptions(**option)) == f"images.{next(iter(option))}"


@pytest.mark.parametrize("api", ["openai-responses", "openai-images"])
def test_previews_need_a_stream(api: ApiName) -> None:
    assert refused(api, images=ImageOptions(previews=1), stream=False) == "images.previews"


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"system": "Be kind."}, "system"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"stop": ["x"]}, "stop"),
        ({"messages": [CAT, CAT]}, "messages"),
        ({"messages": [Message(role="system", content="x")]}, "messages"),
        ({"messages": [Message(role="user", content="")]}, "messages[0].content"),
        (
            {
                "messages": [
                    Message(role="user", content=[TextPart(text="x"), DocumentPart(source=UrlSource(url="u"))]),
                ]
            },
            "messages[0].content[1]",
        ),
        ({"messages": [Message(role="user", content=[IMAGE])]}, "messages[0].content"),
        ({"images": ImageOptions(mask=IMAGE)}, "images.mask"),
        ({"messages": edit_of("no base64")}, "messages[0].content[1].source.data"),
        ({"messages": edit_of("AAAA", media_type="image/\r\nx: y")}, "messages[0].content[1].source.media_type"),
        (
            {"messages": edit_of("AAAA"), "images": ImageOptions(mask=image_part("AAAA", "image/jpeg"))},
            "images.mask.source.media_type",
        ),
        ({"messages": [Message(role="user", content=[TextPart(text="x"), STORED])]}, "messages[0].content[1]"),
        ({"messages": edit_of("AAAA"), "images": ImageOptions(mask=STORED)}, "images.mask"),
    ],
)
def test_the_images_api_takes_one_prompt_and_images_and_refuses_a_conversation(
    fields: dict[str, Any], where: str
) -> None:
    assert refused("openai-images", **fields) == where


def test_one_image_to_edit_has_the_common_field_name_and_several_have_that_of_a_list() -> None:
    for datas, names in ((["AAAA"], ["image"]), (["AAAA", "BBBB"], ["image[]"])):
        call = call_of(edit_of(*datas))
        form = read_form(call.headers["content-type"], call.body)
        assert (call.path, [name for name in form if name.startswith("image")]) == ("/images/edits", names)


def test_a_file_is_named_and_typed_by_what_is_in_it() -> None:
    for declared, name, media_type in (
        ("image/jpeg", "image.jpg", "image/jpeg"),
        ("image/JPG; q=1", "image.jpg", "image/jpeg"),
        ("image/webp", "image.webp", "image/webp"),
    ):
        call = call_of(edit_of("AAAA", media_type=declared))
        file = read_form(call.headers["content-type"], call.body)["image"]
        assert file == {"filename": name, "media_type": media_type, "data": bytes(3)}


def test_an_image_by_reference_makes_all_images_references() -> None:
    named = [UrlSource(url="https://example.com/y.png"), FileSource(file_id="file-1")]
    [message] = edit_of("AAAA")
    assert not isinstance(message.content, str)
    message = Message(role="user", content=[*message.content, *(ImagePart(source=source) for source in named)])
    call = call_of([message], images=ImageOptions(mask=IMAGE))
    body = msgspec.json.decode(call.body)
    data = {"image_url": "data:image/png;base64,AAAA"}
    assert body["images"] == [data, {"image_url": "https://example.com/y.png"}, {"file_id": "file-1"}]
    assert body["mask"] == data


def test_unknown_fields_are_in_the_form_too() -> None:
    call = call_of(edit_of("AAAA"), extra={"input_fidelity": "high", "svg": {"model": "s"}, "user": None})
    form = read_form(call.headers["content-type"], call.body)
    assert (form["input_fidelity"], form["svg[model]"], "user" in form) == ("high", "s", False)


def test_an_edit_streams_as_a_generation_does() -> None:
    data = sse(part_of("AAAA", type="image_edit.partial_image"), whole_of("CCCC", type="image_edit.completed"))
    events = read("openai-images", data)
    assert shown(events) == [BlockStart(0, "image"), image(0, "AAAA", False), image(0, "CCCC", True), BlockStop(0)]
    assert isinstance(answer(events).terminal, Done)


def test_the_models_image_without_an_own_id_goes_back_as_the_users() -> None:
    made = Message(role="assistant", content=[ImagePart(source=Base64Source(media_type="image/png", data="AAAA"))])
    request = Generate(provider="p", model="gpt-5", messages=[CAT])
    built = registry.get("openai-responses").build(request, [made], Quirks())
    assert msgspec.json.decode(built.call.body)["input"][1:] == [
        {
            "role": "user",
            "content": [{"type": "input_image", "detail": "auto", "image_url": "data:image/png;base64,AAAA"}],
        }
    ]


@pytest.mark.parametrize("api", ["anthropic", "openai-chat"])
def test_an_api_that_takes_no_image_of_the_model_gets_it_as_the_users_and_the_run_a_note(api: ApiName) -> None:
    source = Base64Source(media_type="image/png", data="AAAA")
    made = Message(role="assistant", content=[TextPart(text="Here."), ImagePart(source=source)])
    built = registry.get(api).build(Generate(provider="p", model="m", messages=[CAT]), [made, CAT], Quirks())
    assert b"Here." in built.call.body
    [_, model, user, *_] = msgspec.json.decode(built.call.body)["messages"]
    assert (model["role"], user["role"]) == ("assistant", "user")
    assert "AAAA" in str(user)
    assert built.notes == ("history[0]: the model's images are sent as user images",)


def test_the_requested_image_options_are_kept_for_the_answer() -> None:
    options = ImageOptions(size="1024x1024", quality="auto", deliver="base64")
    request = Generate(provider="p", model="gpt-image-2", messages=[CAT], images=options)
    assert registry.get("openai-images").images_asked(request) == ImagesRequested(
        True, "A cat.", "gpt-image-2", "1024x1024", ""
    )
    assert registry.get("openai-responses").images_asked(request) == ImagesRequested(True, "", "", "1024x1024", "")
    plain = Generate(provider="p", model="gemini-3-pro-image", messages=[CAT])
    assert registry.get("gemini").images_asked(plain) == ImagesRequested(model="gemini-3-pro-image")
