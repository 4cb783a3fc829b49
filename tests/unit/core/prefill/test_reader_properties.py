"""Any document, cut anywhere, with any stop strings: the same as the plainest reading of the whole text."""

from __future__ import annotations

import itertools

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.core.prefill.reading import joined, read, reader, regions, same
from tests.unit.core.prefill.reference import read as read_whole
from tokenbus.core.prefill.parser import TextReader

TYPES = {"f": {"n": ["integer"], "o": ["object"]}}

blanks = st.text(" \n\t\r", max_size=3)
spelled = st.sampled_from(["", "antml:"])
words = st.sampled_from(
    ["a", "Hello", "\nBob:", "Bob", "b<c", "<b>", "x < y", "é😀", "<", "</", '"', "\\", "&lt;", "ab"]
)
text = st.lists(st.one_of(words, blanks), max_size=5).map("".join)


@st.composite
def tags(draw: st.DrawFn, name: str, attributes: str = "", *, close: bool = False) -> str:
    return f"<{'/' if close else ''}{draw(spelled)}{name}{attributes}{draw(blanks)}>"


@st.composite
def parameters(draw: st.DrawFn) -> str:
    name = draw(st.sampled_from(["q", "n", "o", "q", ""]))
    value = draw(st.one_of(text, st.sampled_from(["5", " 12345678901234567 ", '{"a":[1]}', "</invoke>", "<thinking>"])))
    mark = draw(spelled)
    attributes = f' name="{name}"' if name else draw(st.sampled_from(["", ' name=""', " other='1'"]))
    if draw(st.booleans()):
        return f"<{mark}parameter{attributes}>{value}</{mark}parameter>"
    return draw(st.sampled_from([f"<{mark}parameter{attributes}/>", f"<{mark}parameter{attributes}>{value}"]))


@st.composite
def calls(draw: st.DrawFn) -> str:
    inner: list[str] = []
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from(["f", "g", "f"]))
        inner.append(draw(tags("invoke", f' name="{name}"')))
        inner += draw(st.lists(parameters(), max_size=3))
        if draw(st.integers(0, 4)):
            inner.append(draw(tags("invoke", close=True)))
        inner.append(draw(st.one_of(blanks, text, parameters())))
    end = draw(tags("function_calls", close=True)) if draw(st.integers(0, 4)) else ""
    return draw(tags("function_calls")) + "".join(inner) + end


@st.composite
def thinking(draw: st.DrawFn) -> str:
    inner = draw(st.one_of(text, calls()))
    end = draw(tags("thinking", close=True)) if draw(st.integers(0, 4)) else ""
    return draw(tags("thinking")) + inner + end


broken = st.sampled_from(
    [
        "<thinking", "</thinking>", "</function_calls >", '<invoke name="f">', "<invoke name='f'/>", "</invoke>",
        "<parameter>", "</parameter>", "<function_results>invented</function_results>", "<function_results>",
        "<thinking/>", "<function_calls/>",
        '<invoke x="<">', "<thi<thinking>", "<<thinking>", "</thinking>", "<Thinking>",
        '<thinking a="' + "v" * 242 + '">', '<thinking a="' + "v" * 241 + '">', "<thinking " + "\n" * 300 + ">",
        "<result>", "<function_calls", "</invoke", "<thinking a=b>", "</thinking a='b'>", "</thinking/>",
    ]
)  # fmt: skip
documents = st.lists(st.one_of(text, text, thinking(), calls(), broken), max_size=6).map("".join)
stop_strings = st.lists(
    st.sampled_from(["\nBob:", "Bob", "ab", "b", "<b", "aab", "\n", "<thinking>", "lo", "Hello", "<"]),
    max_size=3,
    unique=True,
).map(tuple)


def cut(document: str, places: list[int]) -> list[str]:
    at = [0, *sorted(place % (len(document) + 1) for place in places), len(document)]
    return [document[a:b] for a, b in itertools.pairwise(at)]


places = st.lists(st.integers(0, 5_000), max_size=12)


@given(documents, stop_strings, places)
def test_a_document_is_read_as_the_plainest_reading_of_the_whole_has_it(
    document: str, stops: tuple[str, ...], where: list[int]
) -> None:
    found = regions(read(cut(document, where), stops=stops, types=TYPES))
    wanted = read_whole(document, stops, TYPES)
    assert same(found, wanted), f"{found}\n!=\n{wanted}"


@given(documents, stop_strings, places)
def test_any_cut_gives_the_same_events(document: str, stops: tuple[str, ...], where: list[int]) -> None:
    whole = joined(read([document], stops=stops, types=TYPES))
    assert joined(read(cut(document, where), stops=stops, types=TYPES)) == whole
    assert joined(read(document, stops=stops, types=TYPES)) == whole


@given(documents, stop_strings, places)
def test_a_checkpoint_between_any_two_pieces_changes_nothing(
    document: str, stops: tuple[str, ...], where: list[int]
) -> None:
    one, other = reader(stops=stops, types=TYPES), reader(stops=stops, types=TYPES)
    for piece in cut(document, where):
        assert other.feed(piece) == one.feed(piece)
        other = msgspec.msgpack.decode(msgspec.msgpack.encode(other), type=TextReader)
    assert other.end() == one.end()
    assert (other.text, other.over) == (one.text, one.over)


@given(documents)
def test_what_the_turn_keeps_of_the_text_is_the_models_own_words(document: str) -> None:
    reading = reader()
    reading.feed(document)
    assert document.startswith(reading.text)
