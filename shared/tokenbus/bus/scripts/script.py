"""Lua scripts in files, each beside the typed Python function that is the only way to call it.

The function ``acquire`` of leases.py calls the script leases.acquire.lua. The file opens with its contract: what the
script does, its KEYS and ARGV by name, its reply, why it is one atomic step, how a second sending is answered, and the
pieces (pieces/*.lua) and constants that it uses. The script's text begins with locals of these names, so no script
counts its arguments. Loading a script compares the contract with the function's signature: positional parameters are
the KEYS, keyword-only ones the ARGV, both in order.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property, wraps
from hashlib import sha1
from importlib import import_module
from pkgutil import get_data, walk_packages
from typing import Any, ParamSpec, TypeAlias

import msgspec

Arg: TypeAlias = str | bytes | int
Constant: TypeAlias = str | int | float
P = ParamSpec("P")

MAX_VALUES = 4000
"""Maximum values per call of Lua's ``unpack``; Lua's stack ends at about 8000."""
ALONE = MAX_VALUES
"""Weight of a script whose calls are not joined."""
MANY = " of many"
"""How the name of a script's `joined` version ends."""

_HERE = "tokenbus.bus.scripts"
_LISTS = ("KEYS", "ARGV")
_SECTIONS = (*_LISTS, "Reply", "Atomic", "Twice", "Uses", "Constants")
_TYPE = re.compile(r"(hash|stream|sorted set|list|any) (rw|r|w)")
_KEY = re.compile(rf"(\w+)(\.\.\.)?  ({_TYPE.pattern}(?: \+ {_TYPE.pattern})*)(?:  |$)")
_ARG = re.compile(r"(\w+)(\.\.\.)?(?:  |$)")


class Key(msgspec.Struct, frozen=True):
    """A key of a contract. ``more``: it stands for any number of groups of keys, one for each of its types."""

    name: str
    more: bool
    types: Sequence[str]
    access: Sequence[str]
    """``r``, ``w`` or ``rw``, for each type."""


class Contract(msgspec.Struct, frozen=True, kw_only=True):
    """The comment that a script or a piece opens with."""

    what: str
    keys: Sequence[Key] = ()
    args: Sequence[str] = ()
    """Their names. The last one ends in ``...`` if any number of values follow."""
    reply: str = ""
    atomic: str = ""
    twice: str = ""
    """How a second sending is answered: ``reads``, ``same``, ``refused`` or ``again``, and what that means."""
    uses: Sequence[str] = ()
    constants: Sequence[str] = ()


class ContractBroken(TypeError):
    """A Lua file, its contract and its Python function do not fit together."""


class LuaScript:
    """One Lua script. Its text is loaded when it is first needed.

    ``weight``: what one of its keys or arguments costs, 1 in most scripts.
    """

    def __init__(self, name: str, load: Callable[[], str], *, weight: int = 1) -> None:
        self.name = name
        self.weight = weight
        self._load = load

    @cached_property
    def text(self) -> str:
        """What the server runs. Raises ContractBroken."""
        return self._load()

    @cached_property
    def sha(self) -> str:
        """The SHA-1 under which the server caches it."""
        return sha1(self.text.encode(), usedforsecurity=False).hexdigest()


class ScriptCall(msgspec.Struct, frozen=True):
    """One script with its keys and arguments."""

    script: LuaScript
    keys: Sequence[str]
    args: Sequence[Arg]
    durable: bool = False
    """Its reply comes once its writes are where the server's `Durability` says."""


class Declared(msgspec.Struct):
    """A script of this package with what its file and its function say."""

    script: LuaScript
    package: str
    file: str
    signature: inspect.Signature
    constants: Mapping[str, Constant]

    def contract(self) -> Contract:
        """The contract in its file. Raises ContractBroken."""
        return _read(self.package, self.file)[0]


declared: dict[str, Declared] = {}
"""The scripts of all imported modules, by name."""


def script(*, weight: int = 1, **constants: Constant) -> Callable[[Callable[P, ScriptCall]], Callable[P, ScriptCall]]:
    """Make a function without a body the call of the Lua file that has its name, with values for the file's constants.

    A last parameter of KEYS or ARGV whose name ends in ``...`` in the file takes a sequence. ``weight``: see
    `LuaScript`; ALONE: a call may read so much that it is not joined with others into one command.
    """

    def declare(signature: Callable[P, ScriptCall]) -> Callable[P, ScriptCall]:
        package, _, module = signature.__module__.rpartition(".")
        name = signature.__name__.removeprefix("_")
        name = module if name == module else f"{module}.{name}"
        one = LuaScript(name, lambda: _checked(of), weight=weight)
        of = Declared(one, package, f"{name}.lua", inspect.signature(signature), constants)
        declared[of.script.name] = of
        return _caller(of, signature)

    return declare


def _caller(of: Declared, signature: Callable[P, ScriptCall]) -> Callable[P, ScriptCall]:
    """Return the function that puts keys and arguments in their order."""
    known = of.signature
    names = [each.name for each in known.parameters.values() if each.kind is each.KEYWORD_ONLY]
    defaults = {each.name: each.default for each in known.parameters.values() if each.default is not each.empty}
    many = [_is_many(each) for each in known.parameters.values() if each.kind is each.KEYWORD_ONLY]
    more_args = bool(many) and many[-1]
    positional = [each for each in known.parameters.values() if each.kind is not each.KEYWORD_ONLY]
    more_keys = bool(positional) and _is_many(positional[-1])
    count = len(positional)

    @wraps(signature)
    def call(*given: P.args, **named: P.kwargs) -> ScriptCall:
        keys: list[Any] = list(given)
        if len(keys) != count:  # some keys are given by name; raises TypeError if one is missing
            bound = known.bind(*given, **named)
            bound.apply_defaults()
            keys = list(bound.args)
        if more_keys:
            keys += keys.pop()
        args: list[Any] = [named[name] if name in named else defaults[name] for name in names]
        if more_args:
            args += args.pop()
        return ScriptCall(of.script, keys, args)

    return call


def _is_many(parameter: inspect.Parameter) -> bool:
    return str(parameter.annotation).startswith("Sequence[")


def all_scripts() -> list[LuaScript]:
    """Every script that a process of this version runs, and the `joined` version of each, by name."""
    room = import_module(_HERE)
    for module in walk_packages(room.__path__, f"{_HERE}."):
        import_module(module.name)
    scripts = [each.script for each in declared.values()]
    scripts += [_of_many(one) for one in scripts if one.weight < ALONE]
    return sorted(scripts, key=lambda one: one.name)


def joined(calls: Sequence[ScriptCall]) -> ScriptCall:
    """Join several calls of one script into one call that runs them in order. Not for a Cluster: their slots may
    differ.

    Reply: the reply of each call, in order. If a call fails, its error is its reply, and the others still run.
    """
    keys: list[str] = []
    args: list[Arg] = []
    for call in calls:
        keys += call.keys
        args += (len(call.keys), len(call.args), *call.args)
    return ScriptCall(_of_many(calls[0].script), keys, args, any(call.durable for call in calls))


@cache
def _of_many(one: LuaScript) -> LuaScript:
    def text() -> str:
        return "\n".join(("local function one(KEYS, ARGV)", one.text, "end", _read(_HERE, "pieces/of_many.lua")[1]))

    return LuaScript(f"{one.name}{MANY}", text)


def _checked(of: Declared) -> str:
    """The script's text, after its contract was compared with the function's signature and the constants given."""
    contract, body = _read(of.package, of.file)
    parameters = of.signature.parameters.values()
    keys = [each.name + "..." * _is_many(each) for each in parameters if each.kind is not each.KEYWORD_ONLY]
    args = [each.name + "..." * _is_many(each) for each in parameters if each.kind is each.KEYWORD_ONLY]
    pieces = list(_pieces(contract, []))
    constants = {name for each, _ in ((contract, ""), *pieces) for name in each.constants}
    for what, there, here in (
        ("KEYS", [each.name + "..." * each.more for each in contract.keys], keys),
        ("ARGV", list(contract.args), args),
        ("constants", sorted(constants), sorted(of.constants)),
    ):
        if there != here:
            raise ContractBroken(f"{of.file}: {what} {there}, but its function has {here}")
    parts = [f"local {name} = {_literal(value)}" for name, value in of.constants.items()]
    parts += [text for _, text in pieces]  # before the names of KEYS and ARGV, which they cannot use
    return "\n".join(part for part in (*parts, _locals("KEYS", keys), _locals("ARGV", args), body) if part)


def _pieces(contract: Contract, known: list[str]) -> Iterator[tuple[Contract, str]]:
    """The pieces that the contract uses, each once, after its own dependencies."""
    for name in contract.uses:
        if name not in known:
            known.append(name)
            piece, text = _read(_HERE, f"pieces/{name}.lua")
            yield from _pieces(piece, known)
            yield piece, text


def _locals(table: str, names: Sequence[str]) -> str:
    """Lua: a local for each value, and for the last ones where they begin, as ``<name>_at``."""
    single = [name for name in names if not name.endswith("...")]
    lines = (
        [f"local {', '.join(single)} = {', '.join(f'{table}[{i + 1}]' for i in range(len(single)))}"] if single else []
    )
    if len(single) < len(names):
        lines.append(f"local {names[-1].removesuffix('...')}_at = {len(names)}")
    return "\n".join(lines)


def _literal(value: Constant) -> str:
    if isinstance(value, str):
        assert re.fullmatch(r"[\w :-]*", value), value  # nothing to escape
        return f"'{value}'"
    return repr(value)


@cache
def _read(package: str, file: str) -> tuple[Contract, str]:
    """The contract and the Lua of a file, without comments and empty lines."""
    try:
        text = (get_data(package, file) or b"").decode()
    except FileNotFoundError as e:
        raise ContractBroken(f"{package} has no {file}") from e
    lines = text.splitlines()
    head = next((i for i, line in enumerate(lines) if not line.startswith("--")), len(lines))
    body = "\n".join(line for line in lines[head:] if line.strip() and not line.lstrip().startswith("--"))
    return _parsed([line[2:] for line in lines[:head]], file), body


def _parsed(lines: list[str], file: str) -> Contract:
    """Read the contract from the lines of its comment, without their dashes."""
    sections: dict[str, list[str]] = {"what": []}
    into = sections["what"]
    for line in lines:
        title, colon, rest = line.strip().partition(":")
        if line.startswith(" ") and title in _SECTIONS and (colon or title in _LISTS):
            into = sections[title] = [rest] if rest else []
        else:
            into.append(line)
    # A name is indented by three; a line indented further continues the one before.
    lists = {name: [line[3:] for line in sections.get(name, []) if line[3:4] != " "] for name in _LISTS}
    texts = {name: " ".join(map(str.strip, section)) for name, section in sections.items()}
    return Contract(
        what=texts["what"],
        keys=[_key(line, file) for line in lists["KEYS"]],
        args=[_arg(line, file) for line in lists["ARGV"]],
        reply=texts.get("Reply", ""),
        atomic=texts.get("Atomic", ""),
        twice=texts.get("Twice", ""),
        uses=texts.get("Uses", "").replace(",", " ").split(),
        constants=texts.get("Constants", "").replace(",", " ").split(),
    )


def _key(line: str, file: str) -> Key:
    found = _KEY.match(line)
    if not found:
        raise ContractBroken(f"{file}: {line!r} is no key: name, type and access (r, w or rw)")
    types = _TYPE.findall(found[3])
    return Key(found[1], bool(found[2]), [kind for kind, _ in types], [access for _, access in types])


def _arg(line: str, file: str) -> str:
    found = _ARG.match(line)
    if not found:
        raise ContractBroken(f"{file}: {line!r} is no argument: its name, two spaces, what it is")
    return found[1] + (found[2] or "")
