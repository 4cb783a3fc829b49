"""What a request answers whose protocol sends the whole conversation each time: the ids of calls name it. Pure."""

from __future__ import annotations

import msgspec

from tokenbus.events import requests
from tokenbus_services.gateway.problem import unsupported
from tokenbus_services.gateway.surfaces.contract import GivenAnswer, Translated, wait_name
from tokenbus_services.gateway.surfaces.owed_calls import named_call


def answering(translated: Translated, at: str) -> Translated:
    """A request of a protocol that sends the whole conversation, with what it answers: results at its end of calls that
    a run waits for. ``at``: where the messages are.
    """
    given: list[GivenAnswer] = []
    says = False
    for message in reversed(translated.generate.messages):
        if message.role == "assistant":
            break
        for part in message.content if isinstance(message.content, list) else [requests.TextPart(text=message.content)]:
            if isinstance(part, requests.ToolResultPart) and (named := named_call(part.tool_id)):
                content, failed = _result(part, at), part.is_error
                given.append(GivenAnswer(at=at, name=wait_name(*named), content=content, is_error=failed))
            else:
                says = True
    return msgspec.structs.replace(translated, given=given[::-1], only_answers=not says) if given else translated


def _result(part: requests.ToolResultPart, at: str) -> str:
    if isinstance(part.content, str):
        return part.content
    texts = [each.text for each in part.content if isinstance(each, requests.TextPart)]
    if len(texts) < len(part.content):
        raise unsupported(at, "the result of a call for which a run waits is text")
    return "".join(texts)
