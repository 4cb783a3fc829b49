"""Continue after a break (`on_failure` continue): build the next attempt's request and join its text to the emitted
text.

The next request ends with the partial text of the broken attempt as an assistant message, and the model writes the
rest. The sent text never ends in whitespace, because providers reject that. The stripped whitespace has been emitted
already, and a model often repeats it.
"""

from __future__ import annotations

import msgspec

from tokenbus.events.requests import ContentPart, Message, TextPart


class Seam(msgspec.Struct):
    """Joins the text of one attempt to the next, so that whitespace at the boundary is emitted once."""

    blank: str
    """Whitespace that was emitted but not sent; the continuation may repeat it."""
    begun: bool = False

    @property
    def closed(self) -> bool:
        """Whether all further text is new."""
        return self.begun and not self.blank

    def join(self, text: str) -> str:
        """The part of this non-empty piece of the continuation that has not been emitted; independent of how it is
        split.

        The continuation may repeat the whitespace starting at any position in it.
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
    """Prefill mode: the model's text so far, for the next attempt to continue."""
    sent = text.rstrip()
    return Message(role="assistant", content=sent), Seam(text[len(sent) :])


def partial_message(parts: list[ContentPart]) -> tuple[Message | None, Seam]:
    """Chat mode: the partial answer for the next attempt to continue; None if it has no text but whitespace."""
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
