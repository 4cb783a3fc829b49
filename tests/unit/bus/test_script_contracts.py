"""A linter of the Lua files: contracts are complete, every name is declared, and everything declared is used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import tree_sitter_lua
from tree_sitter import Language, Node, Parser

from tests.rows import over_rows
from tokenbus.bus import scripts
from tokenbus.bus.scripts import script as loading
from tokenbus.bus.scripts.script import ContractBroken, Declared, LuaScript, ScriptCall, all_scripts, declared, script

all_scripts()  # imports the modules
ROOM = Path(scripts.__file__).parent
PIECES = {file.stem: file for file in (ROOM / "pieces").glob("*.lua")}
SCRIPTS = {name: one for name, one in declared.items() if one.package.startswith(scripts.__name__)}
FILES = {name: ROOM.joinpath(*one.package.split(".")[3:], one.file) for name, one in SCRIPTS.items()}
PARSER = Parser(Language(tree_sitter_lua.language()))
GLOBALS = {
    *("KEYS", "ARGV", "redis", "cjson", "cmsgpack", "string", "table", "math"),
    *("ipairs", "next", "pairs", "pcall", "tonumber", "tostring", "type", "unpack"),
}
"""What the server's Lua has, and our scripts use."""


class Lint:
    """Follows the scopes of one text. ``problems``: names that are undeclared, assigned as globals, or not used."""

    def __init__(self, text: str) -> None:
        self.problems: list[str] = []
        self._scopes: list[dict[str, bool]] = [{}]
        self.unused: list[str] = []
        """Locals of the whole text that nothing uses."""
        root = PARSER.parse(text.encode()).root_node
        assert not root.has_error, text
        self._block(root)
        self.unused += [name for name, used in self._scopes[0].items() if not used]

    def _declare(self, node: Node) -> None:
        name = _text(node)
        if name != "_" and any(name in scope for scope in self._scopes):
            self.problems.append(f"{name} hides another")
        self._scopes[-1][name] = name == "_"

    def _use(self, node: Node) -> None:
        name = _text(node)
        for scope in reversed(self._scopes):
            if name in scope:
                scope[name] = True
                return
        if name not in GLOBALS:
            self.problems.append(f"{name} is no local")

    def _inner(self, *nodes: Node | None, names: Sequence[Node] = ()) -> None:
        """A scope of its own."""
        self._scopes.append({})
        for name in names:
            self._declare(name)
        for node in nodes:
            if node is not None:
                self._block(node)
        self.problems += [f"{name} is not used" for name, used in self._scopes.pop().items() if not used]

    def _block(self, block: Node) -> None:
        for node in block.named_children:
            self._visit(node)

    def _visit(self, node: Node) -> None:
        match node.type:
            case "identifier":
                self._use(node)
            case "variable_declaration" | "assignment_statement":
                self._assign(node)
            case "function_declaration" | "function_definition":
                self._function(node)
            case "for_statement":
                clause = _field(node, "clause")
                names, *values = clause.named_children
                for value in values:
                    self._visit(value)
                bound = [names] if clause.type == "for_numeric_clause" else names.named_children
                self._inner(node.child_by_field_name("body"), names=bound)
            case "if_statement" | "elseif_statement" | "while_statement":
                self._visit(_field(node, "condition"))
                self._inner(node.child_by_field_name("consequence") or node.child_by_field_name("body"))
                for other in node.children_by_field_name("alternative"):
                    self._visit(other)
            case "else_statement" | "do_statement":
                self._inner(node.child_by_field_name("body"))
            case "dot_index_expression" | "method_index_expression":
                self._visit(node.named_children[0])
            case "field":
                if node.children[0].type == "[":
                    self._visit(_field(node, "name"))
                self._visit(_field(node, "value"))
            case "repeat_statement" | "goto_statement" | "label_statement":
                self.problems.append(f"{node.type} is not understood by this linter")
            case _:
                self._block(node)

    def _assign(self, node: Node) -> None:
        is_local = node.type == "variable_declaration"
        targets, values = _parts(node.named_children[0] if is_local else node)
        for value in values:
            self._visit(value)
        for target in targets:
            if target.type != "identifier":
                self._visit(target)
            elif is_local:
                self._declare(target)
            elif not any(_text(target) in scope for scope in self._scopes):
                self.problems.append(f"{_text(target)} becomes a global")

    def _function(self, node: Node) -> None:
        name = node.child_by_field_name("name")
        if name is not None and name.type != "identifier":
            self._visit(name)
        elif name is not None:
            if node.children[0].type != "local":
                self.problems.append(f"{_text(name)} becomes a global")
            self._declare(name)
        names = [each for each in _field(node, "parameters").named_children if each.type == "identifier"]
        self._inner(node.child_by_field_name("body"), names=names)


def _field(node: Node, name: str) -> Node:
    found = node.child_by_field_name(name)
    assert found is not None
    return found


def _parts(node: Node) -> tuple[list[Node], list[Node]]:
    """Targets and values of an assignment or a declaration."""
    if node.type != "assignment_statement":
        return node.named_children, []
    targets, values = node.named_children
    return targets.named_children, values.named_children


def _text(node: Node) -> str:
    assert node.text is not None
    return node.text.decode()


def _numbered(node: Node) -> Iterator[str]:
    """Keys and arguments that are picked by a number."""
    if node.type == "bracket_index_expression":
        table, index = node.named_children
        if _text(table) in ("KEYS", "ARGV") and index.type == "number":
            yield _text(node)
    for child in node.named_children:
        yield from _numbered(child)


def _functions(file: Path) -> set[str]:
    """The locals that a piece gives to a script."""
    names: set[str] = set()
    for node in PARSER.parse(file.read_bytes()).root_node.named_children:
        if node.type == "function_declaration":
            name = _field(node, "name")
            names |= {_text(name)} if name.type == "identifier" else set()
        elif node.type == "variable_declaration":
            names |= {_text(target) for target in _parts(node.named_children[0])[0]}
    return names


@over_rows("name", SCRIPTS)
def test_a_script_uses_only_what_it_declares_and_all_of_that(name: str) -> None:
    lint = Lint(SCRIPTS[name].script.text)
    assert lint.problems == []
    contract = SCRIPTS[name].contract()
    given = set[str]().union(*map(_functions, PIECES.values()))
    # All KEYS may be counted by the table's own length.
    counted = {f"{key.name}_at" for key in contract.keys if key.more}
    routing = {
        key.name for key in contract.keys if key.types == ["any"]
    }  # such a key only says which node runs the script
    assert set(lint.unused) <= given | counted | routing, "a key, an argument, a constant or a local that nothing uses"
    for piece in contract.uses:
        assert _functions(PIECES[piece]) - set(lint.unused), f"nothing uses {piece}"


@over_rows("name", SCRIPTS)
def test_a_contract_says_what_the_script_does_why_it_is_one_step_and_how_a_second_sending_is_answered(
    name: str,
) -> None:
    contract = SCRIPTS[name].contract()
    assert contract.what.endswith(".")
    assert contract.keys
    assert contract.reply
    assert contract.atomic
    answered = contract.twice.partition(":")[0]
    assert answered in ("reads", "same", "refused", "again")
    only_reads = all(access == "r" for key in contract.keys for access in key.access)
    assert only_reads == (answered == "reads")


@over_rows("file", [*FILES.values(), *PIECES.values()], ids=lambda file: file.stem)
def test_no_file_counts_its_keys_or_arguments_and_no_line_is_long(file: Path) -> None:
    text = file.read_text()
    assert list(_numbered(PARSER.parse(text.encode()).root_node)) == []
    assert [line for line in text.splitlines() if len(line) > 120 or line != line.rstrip()] == []
    assert text.startswith("-- ")


def test_every_lua_file_is_a_script_or_a_piece_of_one() -> None:
    used = {piece for one in SCRIPTS.values() for piece in _used(one.contract().uses)}
    assert used | {"of_many"} == set(PIECES)
    assert {*ROOM.rglob("*.lua")} == {*FILES.values(), *PIECES.values()}


def _used(pieces: Sequence[str]) -> set[str]:
    found = set(pieces)
    for piece in pieces:
        head = next((line for line in PIECES[piece].read_text().splitlines() if line.startswith("-- Uses: ")), "")
        found |= _used([name.strip() for name in head[9:].split(",") if name.strip()])
    return found


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("total = 1", "total becomes a global"),
        ("function total() end", "total becomes a global"),
        ("local a = tonumber(b)\nreturn a", "b is no local"),
        ("local a = 1\nif a then local a = 2 return a end", "a hides another"),
        ("for i = 1, 2 do local x = i end", "x is not used"),
        ("os.time()", "os is no local"),
    ],
)
def test_the_linter_finds_what_is_wrong(text: str, problem: str) -> None:
    assert Lint(text).problems == [problem]


def _declared(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Declared:
    """A script of that text whose function is `probe` below."""
    monkeypatch.setattr(loading, "get_data", lambda package, file: (tmp_path / file).read_bytes())
    loading._read.cache_clear()  # pyright: ignore[reportPrivateUsage]
    (tmp_path / "test_script_contracts.probe.lua").write_text(text)

    def probe(key: str, *, value: str) -> ScriptCall: ...  # type: ignore[empty-body]

    script()(probe)
    return declared.pop("test_script_contracts.probe")


@pytest.mark.parametrize(
    ("keys", "args", "problem"),
    [
        ("key  hash r", "amount", r"ARGV \['amount'\], but its function has \['value'"),
        ("other  hash r", "value", r"KEYS \['other'\], but its function has \['key'"),
        ("key  tree r", "value", "'key  tree r' is no key"),
        ("key  hash r", "value\n-- Constants: MOST", r"constants \['MOST'\], but its function has \[\]"),
    ],
)
def test_a_script_that_does_not_fit_its_function_is_refused_when_it_is_loaded(
    keys: str, args: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"-- Do.\n-- KEYS\n--   {keys}\n-- ARGV\n--   {args}\n"
    one: LuaScript = _declared(text, tmp_path, monkeypatch).script
    with pytest.raises(ContractBroken, match=problem):
        _ = one.text
