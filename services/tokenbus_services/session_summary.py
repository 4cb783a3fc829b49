"""The request that summarises the beginning of a session's history. Pure: a fetcher sends it, and a gateway knows from
it what it may cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tokenbus.events.requests import (
    ContentPart,
    DocumentPart,
    Generate,
    HistoryBound,
    ImagePart,
    Message,
    TextPart,
    ToolCallPart,
    ToolResultPart,
)

PROMPT = """Below is the beginning of a conversation. It will be replaced by your summary, and the conversation goes on.
Write down what is needed for that: facts, names, numbers, decisions, what was promised, what is open. Write only the
summary, in the language of the conversation.

"""


def summary_request(bound: HistoryBound, request: Generate, messages: Sequence[Message]) -> Generate:
    """The request that summarises ``messages``, which precede those of ``request``. It has no id yet."""
    return Generate(
        provider=bound.provider or request.provider,
        model=bound.model or request.model,
        messages=[Message(role="user", content=PROMPT + "\n".join(_lines(messages)))],
        visible=False,
    )


def words(messages: Sequence[Message]) -> Iterator[str]:
    """What messages say, as text."""
    for message in messages:
        for part in [TextPart(text=message.content)] if isinstance(message.content, str) else message.content:
            match part:
                case TextPart():
                    yield part.text
                case ToolCallPart():
                    yield f"[calls {part.tool_name}: {part.arguments}]"
                case ToolResultPart():
                    content = part.content if isinstance(part.content, str) else list[ContentPart](part.content)
                    yield f"[result: {' '.join(words([Message(role='user', content=content)]))}]"
                case ImagePart() | DocumentPart():
                    yield "[a picture or document]"
                case _:
                    pass


def _lines(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        who = message.participant or message.role
        yield f"{who}: {' '.join(words([message]))}"
