"""Elicitation: what a server asks for a call, as questions of that call.

A server of the 2026 version answers a call with the requests of a round and a state of its own. The call is put away
with both, each request is asked in turn, and the call is sent again with all responses and the state, by any worker. An
older server may answer that pages must be visited first; its call is then sent again as it was.
"""

from __future__ import annotations

from typing import Literal, cast

import mcp_types as types
import msgspec
from mcp import UrlElicitationRequiredError
from msgspec.structs import replace

from tokenbus.errors import ToolFailure
from tokenbus.events.frames import GivenAnswer
from tokenbus_services.tools.questions import MAX_TEXT_CHARS, Question

MOST_REQUESTS = 16
"""Of one round."""


class Round(msgspec.Struct, frozen=True):
    """The requests of a round, in the order in which they are asked."""

    begun: int
    """How many questions the call had asked before."""
    keys: list[str]
    """The server's names of the requests."""
    questions: list[Question]
    state: str | None = None
    """The server's."""
    plain: bool = False
    """The call is sent again without responses, once all pages were visited."""
    task: str = ""
    """The call is a task, which gets the responses."""
    before: list[str] = []
    """Requests of the task that were answered earlier."""

    @classmethod
    def of(cls, tool: str, asked: types.InputRequiredResult | UrlElicitationRequiredError, begun: int) -> Round:
        """What the server asked. Raises ToolFailure if it is something else than input of a person."""
        if isinstance(asked, UrlElicitationRequiredError):
            keys, questions = [str(n) for n in range(len(asked.elicitations))], [*map(question_of, asked.elicitations)]
            found = cls(begun, keys, questions, plain=True)
        else:
            requests = asked.input_requests or {}
            questions = [_question(tool, request) for request in requests.values()]
            found = cls(begun, list(requests), questions, asked.request_state)
        return found._bounded(tool)

    @classmethod
    def of_task(cls, tool: str, task: str, requests: types.InputRequests, before: list[str], begun: int) -> Round:
        """What a task asks. Raises ToolFailure if it is something else than input of a person."""
        questions = [_question(tool, request) for request in requests.values()]
        return cls(begun, list(requests), questions, task=task, before=before)._bounded(tool)

    def _bounded(self, tool: str) -> Round:
        if len(self.keys) > MOST_REQUESTS:
            problem = f"the tool made {len(self.keys)} requests at once; the limit is {MOST_REQUESTS}"
            raise ToolFailure(tool, "bad_result", problem)
        return self

    def next(self, answers: list[GivenAnswer]) -> Question | None:
        """The first of its questions without an answer; None: all have one."""
        number = len(answers) - self.begun
        if number >= len(self.questions):
            return None
        return replace(self.questions[number], state=msgspec.json.encode(self).decode())

    def responses(self, tool: str, answers: list[GivenAnswer]) -> types.InputResponses | None:
        """The responses to its requests, which all have an answer. Raises ToolFailure if the call cannot go on."""
        given = answers[self.begun :]
        if self.plain:
            if any(each.decision != "accept" for each in given):
                raise ToolFailure(tool, "declined", "nobody visited the page that the tool needs")
            return None
        found = zip(self.keys, self.questions, given, strict=True)
        return {key: response_to(tool, question, each) for key, question, each in found}


def _question(tool: str, request: types.InputRequest) -> Question:
    if isinstance(request, types.ElicitRequest):
        return question_of(request.params)
    raise ToolFailure(tool, "bad_result", f"the tool requires {request.method}, which is not supported")


def question_of(asked: types.ElicitRequestParams) -> Question:
    """The question of an elicitation."""
    if isinstance(asked, types.ElicitRequestURLParams):
        return Question(text=_text(asked.message), url=asked.url)
    return Question(text=_text(asked.message), schema=asked.requested_schema)


def _text(message: str) -> str:
    return message[:MAX_TEXT_CHARS] or "The tool asks for input."


def response_to(tool: str, question: Question, given: GivenAnswer) -> types.ElicitResult:
    """What the server gets of an answer. Raises ToolFailure if the protocol cannot carry it."""
    content = None
    if given.decision == "accept" and question.url is None:
        content = msgspec.json.decode(given.content or "{}", type=dict[str, object])
    try:
        action = cast("Literal['accept', 'decline', 'cancel']", given.decision)
        return types.ElicitResult.model_validate({"action": action, "content": content})
    except ValueError:
        problem = "the schema of the tool's question allows answers that its protocol cannot carry"
        raise ToolFailure(tool, "bad_question", problem) from None
