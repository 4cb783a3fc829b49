"""What a provider does itself, and what it cites, in words of no API: so a surface can say it in its own. Pure.

A surface whose protocol is the provider's own sends the provider's words. Any other reads the step or the citation
here, and says as much of it as its protocol has words for; docs/guides/gateway.md has the table. The words of providers
are not trusted: a field of another type than expected counts as missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, cast

import msgspec

from tokenbus.events.public import BlockComplete, PublicEvent, RunEnd, TerminalEvent
from tokenbus.events.requests import ExtraPart

Json = dict[str, Any]
Tool = Literal["web_search", "web_fetch", "code", "shell", "file_search", "mcp", "other"]


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A page or a file that a tool found."""

    url: str = ""
    title: str = ""
    text: str = ""
    file_id: str = ""


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """What a tool brought: what it found, what it printed, or what it answered."""

    found: list[Found] = []
    text: str = ""
    """What code or a shell printed, or an MCP server answered."""
    errors: str = ""
    """What it printed as errors."""
    exit_code: int = 0
    failed: bool = False


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One `server_tool` block: a tool that begins, its output, or both."""

    tool: Tool
    id: str
    """The same for a call and its output."""
    name: str
    """The provider's name of the tool."""
    server: str = ""
    """Of an MCP server."""
    called: Json | None = None
    """What the tool was called with; None: the block is the output of an earlier one."""
    output: Output | None = None
    """None: the block has none, and another one may bring it."""

    @property
    def queries(self) -> list[str]:
        """Of a search: what was searched."""
        called = self.called or {}
        given = [each for each in (*_list(called, "queries"), called.get("query")) if isinstance(each, str)]
        return list(dict.fromkeys(given))[:64]

    @property
    def code(self) -> str:
        """Of code or a shell: what runs."""
        called = self.called or {}
        commands = [each for each in _list(called, "commands") if isinstance(each, str)]
        return _text(called, "code") or _text(called, "command") or "\n".join(commands)

    @property
    def url(self) -> str:
        """Of a fetch: the page."""
        return _text(self.called or {}, "url")


class Citation(msgspec.Struct, frozen=True, kw_only=True):
    """A source of a text. ``start`` and ``end`` count the text's characters."""

    url: str = ""
    title: str = ""
    file_id: str = ""
    quote: str = ""
    """What the source says there."""
    start: int
    end: int
    api: str = ""
    own: Json | None = None
    """The provider's own words, of an API with a place in each text for them."""

    def words_of(self, api: str) -> Json | None:
        """The provider's own words, if they are of this API."""
        return self.own if self.api == api else None


def output_value(output: Output) -> Json:
    """A tool's output as one object, for protocols that take any."""
    value = msgspec.to_builtins(output)
    value["found"] = [{name: text for name, text in each.items() if text} for each in value["found"]]
    return {name: each for name, each in value.items() if each}


def late_citations(end: TerminalEvent) -> Json:
    """The sources that came after all texts, for the field `tokenbus` of the answer; empty without any."""
    found = [citation_value(each) for each in citations_of(end)]
    return {"citations": found} if found else {}


def citation_value(cited: Citation) -> Json:
    """A citation as one object, for protocols that take any."""
    about = {"url": cited.url, "title": cited.title, "file_id": cited.file_id, "quote": cited.quote}
    return {name: text for name, text in about.items() if text} | {"start": cited.start, "end": cited.end}


class Steps:
    """Reads the blocks of one run. A provider that gives no ids means the call before."""

    def __init__(self) -> None:
        self._last = ""

    def read(self, block: BlockComplete) -> Step | None:
        """The step of a `server_tool` block; None for other blocks, and for items that are no tool's."""
        if block.kind != "server_tool" or block.cut or not block.tool_name:
            return None
        api, _, kind = (block.item or "").partition(".")
        item = _decoded(block.content or "")
        if not isinstance(item, dict) or api not in _READERS:
            return None
        step = _READERS[api](kind, cast("Json", item), block.tool_name)
        step_id = block.tool_id or (self._last if step.called is None else f"tool_{block.block}")
        self._last = step_id
        return msgspec.structs.replace(step, id=step_id)


def is_own(block: BlockComplete, api: str) -> bool:
    """Whether the item of a `server_tool` block is in the words of this API."""
    return (block.item or "").startswith(f"{api}.")


def original(block: BlockComplete) -> Json:
    """The provider's item, for a field that clients send back with what was said of it."""
    return {"item": block.item, "json": block.content}


def originals(value: object) -> list[ExtraPart]:
    """Read a list of what `original` wrote. What is no step of a tool is left out: a client may have written it."""
    try:
        found = msgspec.convert(value, list[_Original])
    except msgspec.ValidationError:
        return []
    return [ExtraPart(name=each.item, json=each.json) for each in found if each.is_step]


class _Original(msgspec.Struct):
    item: str
    json: str

    @property
    def is_step(self) -> bool:
        api, _, kind = self.item.partition(".")
        if api not in _READERS or not isinstance(found := _decoded(self.json), dict):
            return False
        value = cast("Json", found)
        if api == "gemini":
            return kind in ("executableCode", "codeExecutionResult", "toolCall", "toolResponse") and kind in value
        of_client = kind.startswith(("function_", "custom_tool_")) or kind in ("tool_use", "tool_result")
        return value.get("type") == kind and kind.endswith(_OF_A_STEP) and not of_client


_OF_A_STEP = ("_tool_use", "_tool_result", "_call", "_call_output", "_result")


# --- steps ------------------------------------------------------------------------------------------------------


def _anthropic(kind: str, item: Json, name: str) -> Step:
    tool = "mcp" if kind.startswith("mcp_tool") else _NAMES.get(name, "other")
    if not kind.endswith("_result"):
        return Step(tool=tool, id="", name=name, server=_text(item, "server_name"), called=_object(item, "input"))
    parts = _objects(item.get("content"))
    first = parts[0] if parts else Json()
    page = _object(first, "content")
    found = [
        Found(
            url=_text(part, "url"),
            title=_text(part, "title") or _text(page, "title"),
            text=_text(_object(page, "source"), "data"),
        )
        for part in parts
        if "url" in part
    ]
    said = "".join(_text(part, "text") for part in parts)
    failed = item.get("is_error") is True or _text(first, "type").endswith("_error")
    return Step(
        tool=tool,
        id="",
        name=name,
        output=Output(
            found=found,
            text=_text(first, "stdout") or said,
            errors=_text(first, "stderr") or _text(first, "error_code"),
            exit_code=_number(first, "return_code"),
            failed=failed,
        ),
    )


def _responses(kind: str, item: Json, name: str) -> Step:
    action = _object(item, "action")
    match kind:
        case "web_search_call":
            called = action or _arguments(item)
            tool = "web_fetch" if _text(action, "url") else "web_search"
            found = [Found(url=_text(each, "url")) for each in _objects(action.get("sources")) if "url" in each]
            output = Output(found=found, failed=item.get("status") == "failed")
            return Step(tool=tool, id="", name=name, called=called, output=output)
        case "file_search_call":
            found = [_file(each) for each in _objects(item.get("results"))]
            return Step(tool="file_search", id="", name=name, called=item, output=Output(found=found))
        case "code_interpreter_call":
            logs = "".join(_text(each, "logs") for each in _objects(item.get("outputs")))
            output = Output(text=logs, failed=item.get("status") == "failed")
            return Step(tool="code", id="", name=name, called={"code": _text(item, "code")}, output=output)
        case "mcp_call":
            error = item.get("error")
            output = Output(text=_text(item, "output"), errors=str(error) if error else "", failed=bool(error))
            server = _text(item, "server_label")
            return Step(tool="mcp", id="", name=name, server=server, called=_arguments(item), output=output)
        case "shell_call":
            return Step(tool="shell", id="", name=name, called=action)
        case "shell_call_output":
            return Step(tool="shell", id="", name=name, output=_printed(_objects(item.get("output"))))
        case _ if kind.endswith("_output"):
            return Step(tool="other", id="", name=name, output=Output(text=_said(item.get("output"))))
        case _:
            return Step(tool="other", id="", name=name, called=_arguments(item) or action)


def _gemini(kind: str, item: Json, name: str) -> Step:
    about = _object(item, kind)
    if kind == "executableCode":
        return Step(tool="code", id="", name=name, called={"code": _text(about, "code")})
    if kind == "codeExecutionResult":
        failed = _text(about, "outcome") not in ("", "OUTCOME_OK")
        printed = _text(about, "output")
        output = Output(text="" if failed else printed, errors=printed if failed else "", exit_code=int(failed))
        return Step(tool="code", id="", name=name, output=msgspec.structs.replace(output, failed=failed))
    tool = _NAMES.get(name.lower(), "other")
    if kind == "toolResponse":
        return Step(tool=tool, id="", name=name, output=Output(text=_said(about.get("response"))))
    return Step(tool=tool, id="", name=name, called=_object(about, "args"))


def _interactions(kind: str, item: Json, name: str) -> Step:
    tool = "mcp" if kind.startswith("mcp_server") else _NAMES.get(kind.rpartition("_")[0], "other")
    server = _text(item, "server_name")
    if not kind.endswith("_result"):
        called = _object(item, "arguments")
        if urls := [each for each in _list(called, "urls") if isinstance(each, str)]:
            called = {**called, "url": urls[0]}
        return Step(tool=tool, id="", name=name, server=server, called=called)
    result, failed = item.get("result"), item.get("is_error") is True
    found = [_file(each) for each in _objects(result)] if tool not in ("code", "mcp") else []
    text = "" if found else _said(result)
    output = Output(found=found, text="" if failed else text, errors=text if failed else "", failed=failed)
    return Step(tool=tool, id="", name=name, server=server, output=output)


def _chat(kind: str, item: Json, name: str) -> Step:
    found = [_file(each) for each in _objects(_object(item, "search_results").get("results"))]
    tool = _NAMES.get(name, "other")
    return Step(
        tool=tool, id="", name=name, called=_arguments(item), output=Output(found=found, text=_text(item, "output"))
    )


_READERS: Mapping[str, Callable[[str, Json, str], Step]] = {
    "anthropic": _anthropic,
    "openai-responses": _responses,
    "gemini": _gemini,
    "gemini-interactions": _interactions,
    "openai-chat": _chat,
}
_NAMES: Mapping[str, Tool] = {
    "web_search": "web_search",
    "google_search": "web_search",
    "google_search_web": "web_search",
    "search": "web_search",
    "browser_search": "web_search",
    "web_fetch": "web_fetch",
    "url_context": "web_fetch",
    "visit": "web_fetch",
    "code_execution": "code",
    "python": "code",
    "bash_code_execution": "shell",
    "file_search": "file_search",
}


def _file(value: Json) -> Found:
    content = value.get("text") or value.get("content") or value.get("snippet")
    return Found(
        url=_text(value, "url") or _text(value, "uri"),
        title=_text(value, "title") or _text(value, "filename") or _text(value, "file_name"),
        text=content if isinstance(content, str) else "",
        file_id=_text(value, "file_id"),
    )


def _printed(outputs: list[Json]) -> Output:
    codes = [_number(_object(each, "outcome"), "exit_code") for each in outputs]
    timed_out = any(_text(_object(each, "outcome"), "type") == "timeout" for each in outputs)
    code = next((code for code in codes if code), 0)
    return Output(
        text="".join(_text(each, "stdout") for each in outputs),
        errors="".join(_text(each, "stderr") for each in outputs),
        exit_code=code,
        failed=timed_out or code != 0,
    )


MOST_REPEATED = 32
"""How far back a citation is looked for that is told once more."""


# --- citations --------------------------------------------------------------------------------------------------


def citations_of(event: PublicEvent) -> list[Citation]:
    """The sources that the provider names for a text block, or at the run's end for the whole answer."""
    if not isinstance(event, BlockComplete | RunEnd):
        return []
    text = (event.content or "") if isinstance(event, BlockComplete) else ""
    found: list[Citation] = []
    extras = [(str(extra.get("name", "")), str(extra.get("json", ""))) for extra in event.provider_extra or ()]
    titled = any(name == "openai-chat.search_results" for name, _ in extras)
    for name, json in extras:
        api, _, field = name.partition(".")
        if titled and field == "citations":
            continue  # the same addresses, without titles
        if read := _CITING.get((api, field)):
            for cited in read(_decoded(json), text):
                size = len(text)
                start, end = min(max(0, cited.start), size), min(max(0, cited.end), size)
                one = msgspec.structs.replace(cited, start=start, end=max(start, end), api=api)
                if one not in found[-MOST_REPEATED:]:
                    found.append(one)
    return found


def _cited_block(value: Any, text: str) -> Iterator[Citation]:
    """Anthropic: the whole block is what the source says."""
    for each in _objects(value):
        yield Citation(
            url=_text(each, "url") or _text(each, "source"),
            title=_text(each, "title") or _text(each, "document_title"),
            file_id=_text(each, "file_id"),
            quote=_text(each, "cited_text"),
            start=0,
            end=len(text),
            own=each,
        )


def _annotated(value: Any, text: str) -> Iterator[Citation]:
    """OpenAI and Interactions: a place in the text."""
    for each in _objects(value):
        about = _object(each, "url_citation") or each
        if not (url := _text(about, "url") or _text(about, "source")) and "file_id" not in about:
            continue
        at = _number(about, "index")
        yield Citation(
            url=url,
            title=_text(about, "title") or _text(about, "filename"),
            file_id=_text(about, "file_id"),
            start=_number(about, "start_index") or at,
            end=_number(about, "end_index") or at,
            own=each,
        )


def _grounded(value: Any, text: str) -> Iterator[Citation]:
    """Gemini: a segment, in bytes of UTF-8."""
    about = cast("Json", value) if isinstance(value, dict) else {}
    chunks = _objects(about.get("groundingChunks"))
    data = text.encode("utf-8", "replace")
    used: set[int] = set()

    def cited(number: int, start: int, end: int) -> Citation:
        chunk = _object(chunks[number], "web") or _object(chunks[number], "retrievedContext")
        used.add(number)
        url, title = _text(chunk, "uri") or _text(chunk, "fileSearchStore"), _text(chunk, "title")
        return Citation(url=url, title=title, quote=_text(chunk, "text"), start=start, end=end)

    for support in _objects(about.get("groundingSupports")):
        segment = _object(support, "segment")
        start, end = (
            len(data[: max(0, _number(segment, name))].decode("utf-8", "ignore")) for name in ("startIndex", "endIndex")
        )
        for number in _list(support, "groundingChunkIndices"):
            if isinstance(number, int) and 0 <= number < len(chunks):
                yield cited(number, start, end)
    for number in range(len(chunks)):
        if number not in used:
            yield cited(number, 0, len(text))


def _sourced(value: Any, text: str) -> Iterator[Citation]:
    """Gemini's `citationMetadata`; a segment, in bytes of UTF-8."""
    about = cast("Json", value) if isinstance(value, dict) else {}
    data = text.encode("utf-8", "replace")
    for each in _objects(about.get("citationSources") or about.get("citations")):
        start, end = (
            len(data[: max(0, _number(each, name))].decode("utf-8", "ignore")) for name in ("startIndex", "endIndex")
        )
        if url := _text(each, "uri"):
            yield Citation(url=url, title=_text(each, "title"), start=start, end=end)


def _listed(value: Any, text: str) -> Iterator[Citation]:
    """Perplexity: sources of the whole answer, by address alone or with a title."""
    for each in cast("list[Any]", value) if isinstance(value, list) else ():
        about: Json = cast("Json", each) if isinstance(each, dict) else {"url": each}
        if url := _text(about, "url"):
            yield Citation(url=url, title=_text(about, "title"), start=0, end=len(text))


_CITING: Mapping[tuple[str, str], Callable[[Any, str], Iterable[Citation]]] = {
    ("anthropic", "citation"): _cited_block,
    ("openai-responses", "annotation"): _annotated,
    ("openai-chat", "annotations"): _annotated,
    ("gemini-interactions", "annotation"): _annotated,
    ("gemini", "groundingMetadata"): _grounded,
    ("gemini", "citationMetadata"): _sourced,
    ("openai-chat", "search_results"): _listed,
    ("openai-chat", "citations"): _listed,
}


# --- JSON of providers --------------------------------------------------------------------------------------------


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None


def _text(value: Json, name: str) -> str:
    found = value.get(name)
    return found if isinstance(found, str) else ""


def _number(value: Json, name: str) -> int:
    found = value.get(name)
    return found if isinstance(found, int) else 0


def _object(value: Json, name: str) -> Json:
    found = value.get(name)
    return cast("Json", found) if isinstance(found, dict) else {}


def _list(value: Json, name: str) -> list[Any]:
    found = value.get(name)
    return cast("list[Any]", found) if isinstance(found, list) else []


def _objects(value: object) -> list[Json]:
    values = cast("list[object]", value) if isinstance(value, list) else [value]
    return [cast("Json", each) for each in values if isinstance(each, dict)]


def _arguments(item: Json) -> Json:
    """The arguments of a call: an object, or its JSON as text."""
    found = _decoded(_text(item, "arguments")) if isinstance(item.get("arguments"), str) else item.get("arguments")
    return cast("Json", found) if isinstance(found, dict) else {}


def _said(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else msgspec.json.encode(value).decode()
