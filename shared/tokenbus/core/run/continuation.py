"""Going on after a break (`on_failure` continue): what the next attempt is given, and how it joins what was heard.

The partial text of a broken attempt is the beginning of the model's message in the next one's request, and the model
writes the rest. What is sent never ends in blank space, for providers refuse that; what was cut off there was heard
already, and a model often says it again.
"""

from __future__ import annotations

import msgspec

from tokenbus.events.requests import ContentPart, Message, TextPart


class Seam(msgspec.Struct):
    """Where the text of one attempt ends and that of the next begins: blank space that stands there is heard once."""

    blank: str
    """Heard, and not sent: what the continuation may begin with once more."""
    begun: bool = False

    @property
    def closed(self) -> bool:
        """Whatever comes now is new."""
        return self.begun and not self.blank

    def join(self, text: str) -> str:
        """What of this piece of the continuation, which is not empty, was not heard yet; the same however it is cut.

        The continuation may repeat the blank space from any place of it on.
        """
        if not self.begun:
            self.begun = True
            at = self.blank.find(text[0])
            self.blank = self.blank[at:] if at >= 0 else ""
        same = 0
        while same < min(len(text), len(self.blank)) and text[same] == self.blank[same]:
            same += 1
        self.blank = self.blank[same:] if same == len(text) else ""
        return text[same:]


def partial_text(text: str) -> tuple[Message, Seam]:
    """Prefill mode: the model's text so far, as the next attempt goes on from it."""
    sent = text.rstrip()
    return Message(role="assistant", content=sent), Seam(text[len(sent) :])


def partial_message(parts: list[ContentPart]) -> tuple[Message | None, Seam]:
    """Chat mode: the same for the parts of an answer of which the last is a text; None: there is nothing to go on from
    but blank space."""
    seam = Seam("")
    kept = list(parts)
    if kept and isinstance(last := kept[-1], TextPart):
        seam = Seam(last.text[len(last.text.rstrip()) :])
    while kept and not (isinstance(kept[-1], TextPart) and kept[-1].text.strip()):
        kept.pop()
    if not kept:
        return None, seam
    last = kept[-1]
    assert isinstance(last, TextPart)
    kept[-1] = msgspec.structs.replace(last, text=last.text.rstrip())
    return Message(role="assistant", content=kept), seam
