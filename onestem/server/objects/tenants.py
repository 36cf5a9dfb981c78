"""Tenants: API keys, what belongs to each, and what of the cache each may see.

A key file has one key per line, `name:key` or `name:key:weight`; empty lines and lines that begin
with # are skipped. The line named `operator` is the operator's: its key may also read the page,
/metrics and /internal. Without a key file all callers are one nameless tenant.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from onestem.errors import ConfigError
from onestem.server.errors import ApiError

OPERATOR = "operator"
APP_OWNER = "*"  # owner of what the operator has made for all; no key can have this name
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
LEAST_KEY = 8


@dataclass(frozen=True)
class Tenant:
    """The holder of a key. `weight`: its share of turns where several wait."""

    name: str
    weight: float = 1.0

    def salt(self, own: str = "") -> str:
        """The cache salt that separates this tenant's prompts, and those of its users if it names
        them; "" shares with all."""
        if not self.name and not own:
            return ""
        return json.dumps([self.name, own])


EVERYBODY = Tenant("")


class Keys:
    """The accepted keys; without any, all callers are accepted."""

    def __init__(self, keys: Iterable[tuple[str, str, float]] = ()) -> None:
        self._keys = {_digest(key.encode()): Tenant(name, weight) for name, key, weight in keys}

    @property
    def needed(self) -> bool:
        """Whether callers need a key."""
        return bool(self._keys)

    def named(self, name: str) -> Tenant:
        """The holder of a name, also where its key is not accepted any more."""
        found = (tenant for tenant in self._keys.values() if tenant.name == name)
        return next(found, Tenant(name))

    def tenant(self, authorization: str | None, key: str | None = None) -> Tenant:
        """The holder of the bearer's key in an `Authorization` header, or of `key` (of Anthropic's
        `x-api-key`) where there is no bearer; raises a 401 if there is none."""
        if not self._keys:
            return EVERYBODY
        given = _bearers(authorization) or (key or "").strip().encode("utf-8", "surrogateescape")
        return self._holder(given)

    def _holder(self, given: bytes) -> Tenant:
        """The holder of a key. All keys are compared, each in constant time."""
        digest = _digest(given)
        found: Tenant | None = None
        for key, tenant in self._keys.items():
            if hmac.compare_digest(digest, key):
                found = tenant
        if found is None:
            raise ApiError(
                401,
                "no valid API key: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return found

    def operator(self, authorization: str | None) -> None:
        """Raise unless the header has the operator's key, which a browser sends as a password."""
        if not self._keys:
            return
        ask = {"WWW-Authenticate": 'Basic realm="onestem operator", charset="UTF-8"'}
        try:
            tenant = self._holder(_bearers(authorization) or _password(authorization))
        except ApiError as error:
            error.headers = ask
            raise
        if tenant.name != OPERATOR:
            raise ApiError(
                403,
                f"this is for the operator: use the key of the line named {OPERATOR!r}",
                code="operator_only",
            )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _bearers(authorization: str | None) -> bytes:
    """The key in a header; b"" if there is none."""
    scheme, _, value = (authorization or "").partition(" ")
    return value.strip().encode("utf-8", "surrogateescape") if scheme.lower() == "bearer" else b""


def _password(authorization: str | None) -> bytes:
    """The password of HTTP Basic, as a browser sends it; b"" if there is none.

    A route that takes it must change nothing: a browser sends it whichever page asks.
    """
    scheme, _, value = (authorization or "").partition(" ")
    if scheme.lower() != "basic":
        return b""
    try:
        return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
    except (binascii.Error, ValueError):
        return b""


def read_key_file(file: str | os.PathLike[str]) -> Keys:
    """The keys of a file; raises `ConfigError` with the line that is wrong."""
    path = Path(file)
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"cannot read the key file {path}: {reason}") from error
    keys: dict[str, tuple[str, str, float]] = {}
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, key, weight = _read_line(line.strip(), f"{path}, line {number}")
        if name in keys or key in seen:
            raise ConfigError(f"{path}, line {number}: the name or the key stands there twice")
        keys[name] = (name, key, weight)
        seen.add(key)
    if not keys:
        raise ConfigError(f"the key file {path} has no keys: write lines like name:key")
    return Keys(keys.values())


def _read_line(line: str, where: str) -> tuple[str, str, float]:
    name, _, rest = line.partition(":")
    key, _, weight = rest.partition(":")
    if not NAME.fullmatch(name):
        raise ConfigError(f"{where}: the name is not of letters, digits, '.', '_' and '-'")
    if len(key) < LEAST_KEY or any(character.isspace() for character in key):
        raise ConfigError(f"{where}: a key has at least {LEAST_KEY} characters and no spaces")
    try:
        share = float(weight or 1)
    except ValueError:
        share = 0.0
    if not 0.01 <= share <= 100:
        raise ConfigError(f"{where}: the weight is {weight!r}, expected a number from 0.01 to 100")
    return name, key, share
