"""The form of a key and what is kept of it. Pure but for the random bits of a new one.

A key is ``tb-<id>-<secret>``: an id of 8 letters and digits, public, and 256 random bits. Only the key's SHA-256 is
kept. A slow hash, as passwords need, would add nothing to 256 random bits, and cost CPU with each request.
"""

from __future__ import annotations

import re
import secrets
from hashlib import sha256
from hmac import compare_digest

import msgspec

from tokenbus_services.settings.tables.gateway import KeyRules, Sha256

_ID_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
_ID_LENGTH = 8
_FORM = re.compile(r"tb-([a-z0-9]{8})-[A-Za-z0-9_-]{43}")
_NOBODY = "0" * 64


class NewKey(msgspec.Struct, frozen=True):
    """A key that was just made: the only time that it is seen."""

    id: str
    text: str

    @property
    def sha256(self) -> str:
        """What is kept of it."""
        return digest(self.text)


class KeySecret(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One key text that opens an entry."""

    sha256: Sha256
    expires_ms: int | None = None

    def is_valid(self, now_ms: int) -> bool:
        return self.expires_ms is None or now_ms < self.expires_ms


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A client: its rules, and the key texts that stand for it. Rotation adds a text and lets the old one expire."""

    id: str
    rules: KeyRules = KeyRules()
    secrets: tuple[KeySecret, ...] = ()
    name: str = ""
    created_ms: int | None = None
    revoked_ms: int | None = None

    def opens(self, text: str, now_ms: int) -> bool:
        """Whether this key text is valid for this entry. Takes the same time whichever byte differs."""
        given, valid = digest(text), False
        for secret in self.secrets:
            valid |= compare_digest(given, secret.sha256) and secret.is_valid(now_ms)
        return valid and self.revoked_ms is None


NO_ENTRY = KeyEntry(id="", secrets=(KeySecret(sha256=_NOBODY),), revoked_ms=0)
"""Compared with if no entry has the id, so that an unknown key takes the same steps as a wrong one."""


def new_key(key_id: str | None = None) -> NewKey:
    """Make a key, with a new id or for an entry that exists."""
    key_id = key_id or "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))
    return NewKey(key_id, f"tb-{key_id}-{secrets.token_urlsafe(32)}")


def id_of(text: str) -> str | None:
    """The id inside a key; None if the text has not the form of a key."""
    match = _FORM.fullmatch(text)
    return match[1] if match else None


def digest(text: str) -> Sha256:
    return sha256(text.encode(errors="surrogateescape")).hexdigest()
