"""Lays pieces out in rows of a terminal: full rows for its scrollback, and the row that still grows. Pure."""

from __future__ import annotations

from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.utils import get_cwidth

from tokenbus_services.cli.chat.transcript import Kind, Piece
from tokenbus_services.terminal_text import safe

STYLES: dict[Kind, str] = {
    "said": "",
    "answer": "",
    "thinking": "class:dim italic",
    "tool": "class:dim",
    "ask": "ansiyellow",
    "note": "class:dim",
    "error": "ansired",
}
_HEADS: dict[Kind, str] = {"said": "bold ansicyan", "answer": "bold ansigreen"}
_INDENT = "  "
LEAST_WIDTH = 10

Row = StyleAndTextTuples


class Rows:
    """The rows of a conversation."""

    def __init__(self) -> None:
        self._full: list[Row] = []
        self._head: Row = []
        """What the growing row begins with."""
        self._text = ""
        """The rest of the growing row."""
        self._style = ""
        self._of: object = None
        """What the growing paragraph belongs to; None: there is none."""

    @property
    def growing(self) -> Row:
        """The row that is not full yet."""
        return [*self._head, (self._style, self._text)] if self._of is not None else []

    def take(self) -> list[Row]:
        """The rows that are full since the last call."""
        full, self._full = self._full, []
        return full

    def add(self, piece: Piece, width: int) -> None:
        """Lay a piece out in rows of at most that many columns. One of an open block goes on where the last ended."""
        if piece.block is None or piece.block != self._of:
            self.end()
            self._begin(piece)
        width = max(width, LEAST_WIDTH)
        *lines, last = safe(self._text + piece.text).expandtabs(4).split("\n")
        for line in lines:
            self._fill(line, width)
            self._next_row()
        self._fill(last, width)
        if piece.block is None:
            self.end()

    def end(self) -> None:
        """End the paragraph that grows."""
        if self._of is not None and (self._text or self._head):
            self._next_row()
        self._of = None
        self._text, self._head = "", []

    def _begin(self, piece: Piece) -> None:
        if piece.kind == "said":
            self._full.append([])
        self._of = piece.block or piece
        self._style = STYLES[piece.kind]
        head = _HEADS.get(piece.kind)
        self._head = [(head, f"{' '.join(safe(piece.head).split())} > ")] if head else [("", _INDENT)]

    def _fill(self, line: str, width: int) -> None:
        """Put a line where the growing row is, and break it at words."""
        columns = start = sum(get_cwidth(text) for _, text, *_ in self._head)
        begin, space = 0, -1
        for at, character in enumerate(line):
            if character == " ":
                space = at
            columns += get_cwidth(character)
            if columns < width or at == begin:  # the last column stays free: some terminals break after it
                continue
            cut = space if space > begin else at
            self._text = line[begin:cut]
            self._next_row()
            begin = cut + (cut == space)
            start = sum(get_cwidth(text) for _, text, *_ in self._head)
            columns = start + get_cwidth(line[begin : at + 1])
            space = -1
        self._text = line[begin:]

    def _next_row(self) -> None:
        self._full.append(self.growing)
        self._head = [("", _INDENT)] if self._style else []
        self._text = ""
