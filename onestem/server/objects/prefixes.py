"""Prefixes as objects: named, versioned, pinned in the engine, computed before they are ready.

A prefix is a text, messages, or token ids. Messages precede a chat's messages, token ids precede
a completion's prompt. A text does both: it is a chat's first system message, and precedes a
completion's prompt unchanged. Both forms are pinned where the model has a chat template.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from onestem.batch.first_pass import NO_TOKENIZER
from onestem.checked import show
from onestem.engine.text.bounded import BoundedTokenizer
from onestem.engine.text.tokenizer import Tokenizer
from onestem.errors import ConfigError, RequestError
from onestem.openai.read import read_object, read_prefix
from onestem.openai.schema import Kind
from onestem.rawtext import RawText
from onestem.server.errors import ApiError
from onestem.server.link.client import EngineClient
from onestem.server.logs import log
from onestem.server.objects.store import Store, now
from onestem.server.objects.tenants import APP_OWNER, Tenant

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
READY_SECONDS = 600.0
POLL_SECONDS = 0.02


@dataclass(kw_only=True)
class Prefix:
    """A version of a prefix.

    Attributes:
        owner: name of the key, or `APP_OWNER`.
        source: what `read_prefix` makes of its body.
        forms: kind of call -> the token ids that its prompt begins with.
    """

    owner: str
    name: str
    version: int
    source: Mapping[str, Any]
    forms: Mapping[Kind, list[int]]
    created_at: int = field(default_factory=now)
    ready: bool = False
    refused: str | None = None
    infos: list[Mapping[str, Any]] = field(default_factory=list)

    def pin_name(self, kind: Kind) -> str:
        """The name that the engine knows one of its forms by."""
        return f"{self.owner}/{self.name}/{self.version}/{kind}"

    @property
    def is_common(self) -> bool:
        """Whether it is the operator's, for all keys."""
        return self.owner == APP_OWNER

    @property
    def salt(self) -> str:
        """The cache salt that its KV is stored under; "": shared by all."""
        return "" if self.is_common else Tenant(self.owner).salt()

    @property
    def num_tokens(self) -> int:
        """Tokens of all of its forms."""
        return sum(map(len, self.forms.values()))

    def length(self, ids: Sequence[int]) -> int:
        """Number of its tokens that a prompt begins with: all of a form, or 0."""
        lengths = [
            len(form)
            for form in self.forms.values()
            if len(form) < len(ids) and list(ids[: len(form)]) == form
        ]
        return max(lengths, default=0)

    def describe(self) -> dict[str, Any]:
        """As the API shows it."""
        used = [info["last_used"] for info in self.infos if info.get("last_used")]
        return {
            "object": "prefix",
            "name": self.name,
            "owner": "operator" if self.is_common else "key",
            "version": self.version,
            "kind": next(iter(self.source)),
            "ready": self.ready,
            "tokens": self.num_tokens,
            "computed_tokens": self._total("num_computed_tokens"),
            "bytes": self._total("bytes"),
            "readers": self._total("readers"),
            "hits": self._total("hits"),
            "last_used": max(used, default=None),
            "created_at": self.created_at,
        }

    def _total(self, name: str) -> int:
        return sum(int(info.get(name) or 0) for info in self.infos)


class Prefixes:
    """All prefixes of a server."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer | None, store: Store) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._store = store
        self._current: dict[tuple[str, str], Prefix] = {}
        self._all: dict[int, Prefix] = {}
        self._lock = asyncio.Lock()

    def load(self, apps: Mapping[str, Mapping[str, Any]]) -> None:
        """Load the operator's prefixes and those that keys have made; `pin_all` pins them."""
        for name, source in apps.items():
            self._enter(self._made(owner=APP_OWNER, name=name, version=1, source=source))
        for row in self._store.list_named("prefixes"):
            self._enter(self._made(**row))

    def _enter(self, prefix: Prefix) -> None:
        self._current[prefix.owner, prefix.name] = prefix
        self._all[id(prefix)] = prefix

    def _made(self, **row: Any) -> Prefix:
        return Prefix(**row, forms=self._forms(row["source"]))

    def _forms(self, source: Mapping[str, Any]) -> dict[Kind, list[int]]:
        if "token_ids" in source:
            return {"completion": list(source["token_ids"])}
        if self._tokenizer is None:
            raise RequestError(f"{NO_TOKENIZER}; a prefix needs token_ids")
        if "messages" in source:
            return {"chat": self._chat_form(source["messages"])}
        raw = RawText.of(source["text"], source.get("parse_special", True))
        forms: dict[Kind, list[int]] = {"completion": self._tokenizer.encode_batch([raw])[0]}
        if self._tokenizer.has_chat_template:
            forms["chat"] = self._chat_form(messages_of(source))
        return forms

    def _chat_form(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens that all chats which begin with these messages have in common."""
        assert self._tokenizer is not None
        first, second = (
            self._tokenizer.apply_chat_template([*messages, {"role": "user", "content": text}])
            for text in ("a", "Z")
        )
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
        return [token for token, _ in pairs]

    async def put(self, tenant: Tenant, name: str, body: Mapping[str, Any]) -> Prefix:
        """Make a prefix, or its next version; returns when it is computed. Until then requests get
        the version before."""
        check_name(name)
        source = read_prefix(body)
        if (APP_OWNER, name) in self._current:
            raise ApiError(
                409, f"{name!r} is a prefix of the operator's: choose another name", param="name"
            )
        self._client.supervisor.check_up()
        self._client.check_awake()
        prefix = await asyncio.to_thread(self._new, tenant.name, name, source)
        async with self._lock:
            before = self._current.get((tenant.name, name))
            prefix.version = before.version + 1 if before is not None else 1
            self._check_size(prefix)
            self._all[id(prefix)] = prefix
            try:
                self._pin(prefix)
                await self._until_ready(prefix)
                await asyncio.to_thread(self._store.save_named, "prefixes", vars(prefix))
            except BaseException:
                self._drop(prefix)
                raise
            self._current[tenant.name, name] = prefix
            if before is not None:
                self._drop(before)
        return prefix

    def _new(self, owner: str, name: str, source: Mapping[str, Any]) -> Prefix:
        facts = self._client.facts
        if self._tokenizer is not None and facts is not None:
            bounded = BoundedTokenizer(self._tokenizer, facts.max_model_len)
            bounded.check_messages(next(iter(source)), messages_of(source))
        return self._made(owner=owner, name=name, version=0, source=source)

    def _check_size(self, prefix: Prefix) -> None:
        facts = self._client.facts
        assert facts is not None
        for ids in prefix.forms.values():
            if not 1 <= len(ids) <= facts.max_model_len - 2:
                raise RequestError(
                    f"prefix has {len(ids)} tokens, expected from 1 to {facts.max_model_len - 2}"
                )
            if max(ids) >= facts.vocab_size:
                raise RequestError(
                    f"token_ids has {max(ids)}, expected ids below {facts.vocab_size}"
                )

    def _pin(self, prefix: Prefix) -> None:
        prefix.ready = False
        for kind, ids in prefix.forms.items():
            self._client.tell("pin", (prefix.pin_name(kind), ids, prefix.salt))

    def _drop(self, prefix: Prefix) -> None:
        self._all.pop(id(prefix), None)
        for kind in prefix.forms:
            self._client.tell("unpin", prefix.pin_name(kind))

    def pin_all(self) -> None:
        """Pin all prefixes in a new engine."""
        for prefix in self._all.values():
            self._pin(prefix)

    async def until_ready(self) -> None:
        """Wait until all are computed. A key's that is refused, for less KV memory than it was made
        in, keeps nobody from being served; its prompts compute it themselves."""
        for prefix in sorted(self._all.values(), key=lambda prefix: not prefix.is_common):
            try:
                await self._until_ready(prefix)
            except RequestError as error:
                if prefix.is_common:
                    raise
                log.warning("prefix_refused", key=prefix.owner or None, error=str(error))

    async def _until_ready(self, prefix: Prefix) -> None:
        until = time.monotonic() + READY_SECONDS
        while not prefix.ready:
            self.take_infos(await self._client.ask("prefixes"))
            if prefix.refused is not None:
                self._client.check_awake()  # it may have fallen asleep since
                raise RequestError(prefix.refused)
            if time.monotonic() > until:
                raise ApiError(504, "the prefix was not computed in time: try again later")
            await asyncio.sleep(POLL_SECONDS)

    def take_infos(self, infos: Iterable[Mapping[str, Any]]) -> None:
        """Take what the engine says of its prefixes, one for each form (see `Orders`)."""
        by_name = {info["name"]: info for info in infos}
        for prefix in self._all.values():
            names = [prefix.pin_name(kind) for kind in prefix.forms]
            prefix.infos = [by_name[name] for name in names if name in by_name]
            prefix.ready = len(prefix.infos) == len(names) and all(
                info.get("ready") for info in prefix.infos
            )
            for info in prefix.infos:
                if "refused" in info:  # by another name
                    named = f"prefix {prefix.name!r}"
                    why = info["refused"].replace(f"prefix {info['name']!r}", named)
                    prefix.refused = why if why.startswith(named) else f"{named}: {why}"

    def find(self, tenant: Tenant, name: str) -> Prefix:
        """A tenant's own prefix or an operator's of that name."""
        for owner in (tenant.name, APP_OWNER):
            found = self._current.get((owner, name))
            if found is not None:
                return found
        raise ApiError(404, f"there is no prefix {name!r}", param="prefix", code="prefix_not_found")

    def visible(self, tenant: Tenant) -> list[Prefix]:
        """The tenant's own prefixes and the operator's."""
        return [p for p in self._current.values() if p.owner in (tenant.name, APP_OWNER)]

    @staticmethod
    def shown(pin_name: str) -> str:
        """The name for people of a prefix that has this name in the engine."""
        owner, name, *_ = pin_name.split("/")
        return name if owner in ("", APP_OWNER) else f"{name} of {owner}"

    def everyone(self) -> list[Prefix]:
        """The current version of each prefix, of all owners."""
        return list(self._current.values())

    async def delete(self, tenant: Tenant, name: str) -> None:
        """Delete a tenant's own prefix; raises a 404 if there is none, a 403 for an operator's."""
        prefix = self.find(tenant, name)
        if prefix.is_common:
            raise ApiError(
                403, f"{name!r} is the operator's: it ends with the server", code="operator_only"
            )
        async with self._lock:
            if self._current.get((tenant.name, name)) is not prefix:
                raise ApiError(409, f"prefix {name!r} was replaced meanwhile: delete it again")
            await asyncio.to_thread(self._store.delete_named, "prefixes", tenant.name, name)
            del self._current[tenant.name, name]
            self._drop(prefix)

    def begun_by(
        self, tenant: Tenant, ids: Sequence[int], owner: str | None = None
    ) -> Prefix | None:
        """The longest prefix that a prompt begins with, named or not; of one owner, if given."""
        best, longest = None, 0
        for prefix in self.visible(tenant):
            length = prefix.length(ids) if owner in (None, prefix.owner) else 0
            if length > longest:
                best, longest = prefix, length
        return best


def check_name(name: str) -> None:
    """Raise `RequestError` for what cannot be a prefix's name."""
    if not NAME.fullmatch(name):
        raise RequestError(
            f"name is {show(name)}, expected up to 64 letters, digits, '.', '_' and '-'"
        )


def messages_of(source: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages that a chat begins with."""
    if "text" in source:
        return [{"role": "system", "content": source["text"]}]
    return list(source.get("messages", ()))


def read_app(argument: str) -> tuple[str, dict[str, Any]]:
    """`NAME=FILE` of `--app`: a text, or messages where the file's name ends with .json."""
    name, _, file = argument.partition("=")
    if not NAME.fullmatch(name) or not file:
        raise ConfigError(f"--app is {argument!r}, expected NAME=FILE")
    path = Path(file)
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"--app {name}: cannot read {path}: {reason}") from error
    try:
        if path.suffix == ".json":
            return name, read_prefix(read_object(text.encode()))
        return name, read_prefix({"text": text})
    except RequestError as error:
        raise ConfigError(f"--app {name}: {path}: {error}") from error
