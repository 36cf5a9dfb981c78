"""PML schemas as objects: named, versioned; a prompt in PML names its schema.

The operator's (`--schema`) serve all keys; a key's own serve that key alone. Modules are computed
with the first prompt that imports them, or, on demand, before the schema can be used. Modules of
the operator's schemas are shared by all, those of a key's by prompts of the same cache salt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from onestem.checked import check, show
from onestem.engine.schedule.admission import check_modules
from onestem.engine.text.bounded import BoundedTokenizer, check_markup
from onestem.engine.text.tokenizer import Tokenizer
from onestem.errors import ConfigError, RequestError
from onestem.models.config import ModelConfig
from onestem.openai.schema import SchemaBody
from onestem.pml import CompiledPrompt, Library, parse_prompt, read_schema, to_markup
from onestem.server.errors import ApiError
from onestem.server.link.client import EngineClient
from onestem.server.objects.encoding import compute_modules
from onestem.server.objects.store import Store, now
from onestem.server.objects.tenants import APP_OWNER, Tenant

ENCODE_SECONDS = 600.0
MOST_SCHEMAS = 256  # of a key

# Markup and isolation -> segments.
CompilePml = Callable[[str, str], CompiledPrompt]


@dataclass(frozen=True, kw_only=True)
class _Schema:
    owner: str
    name: str
    version: int
    source: str  # its markup
    created_at: int = field(default_factory=now)
    library: Library

    @property
    def is_common(self) -> bool:
        """Whether all keys share its modules."""
        return self.owner == APP_OWNER

    def describe(self) -> dict[str, Any]:
        """As the API shows it."""
        layout = self.library.layouts[self.name]
        return {
            "object": "schema",
            "name": self.name,
            "owner": "operator" if self.is_common else "key",
            "version": self.version,
            "positions": layout.end,
            "modules": len(layout.blocks) - 1,
            "created_at": self.created_at,
        }


class Schemas:
    """All schemas of a server, whose model has `config`."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer | None,
        config: ModelConfig,
        store: Store,
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._bounded = (
            BoundedTokenizer(tokenizer, config.max_position_embeddings)
            if tokenizer is not None
            else None
        )
        self._config = config
        self._store = store
        self._current: dict[tuple[str, str], _Schema] = {}
        self._lock = asyncio.Lock()

    def load(self, files: Iterable[Path]) -> None:
        """Load the operator's schemas and those that keys have made."""
        for file in files:
            check_modules(self._config)
            made = self._made(to_markup(read_schema(file)), owner=APP_OWNER, version=1)
            if (APP_OWNER, made.name) in self._current:
                raise ConfigError(f"--schema {file}: another file has a schema {made.name!r}")
            self._current[made.owner, made.name] = made
        for row in self._store.list_named("schemas"):
            made = self._made(**row)
            self._current[made.owner, made.name] = made

    def _made(self, source: str, **row: Any) -> _Schema:
        library = self._library([source])
        (row["name"],) = library.layouts
        return _Schema(**row, source=source, library=library)

    def _library(self, markups: Sequence[str]) -> Library:
        if self._tokenizer is None:
            raise RequestError("PML needs a tokenizer, and this model directory has none")
        library = Library(self._tokenizer, max_positions=self._config.max_position_embeddings)
        for markup in markups:
            library.add(_checked(markup))
        return library

    async def put(self, tenant: Tenant, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Make a schema, or its next version; with `encode`, return when its modules are computed.
        Until then prompts use the version before."""
        asked = check(SchemaBody, body)
        if (APP_OWNER, name) in self._current:
            raise ApiError(409, f"{name!r} is a schema of the operator's: choose another name")
        if asked.encode:
            self._client.check_awake()
        made = await asyncio.to_thread(self._new, tenant.name, asked.pml)
        if made.name != name:
            raise RequestError(f"pml is a schema named {made.name!r}, expected {name!r}")
        if asked.encode:
            await self._encode_in_time(made, tenant)
        async with self._lock:
            before = self._current.get((tenant.name, name))
            if before is None:
                self._check_room(tenant)
            made = replace(made, version=before.version + 1 if before is not None else 1)
            await asyncio.to_thread(self._store.save_named, "schemas", vars(made))
            self._current[tenant.name, name] = made
        return made.describe()

    def _new(self, owner: str, markup: str) -> _Schema:
        check_modules(self._config)
        self._check_length(markup)
        return self._made(markup, owner=owner, version=0)

    async def _encode_in_time(self, schema: _Schema, tenant: Tenant) -> None:
        try:
            async with asyncio.timeout(ENCODE_SECONDS):
                await self._encode(schema, tenant.salt())
        except TimeoutError:
            raise ApiError(
                504, "the modules were not computed in time: try again, what is computed is kept"
            ) from None

    async def encode_common(self) -> int:
        """Compute the modules of the operator's schemas; returns the number of their tokens."""
        common = [schema for schema in self._current.values() if schema.is_common]
        return sum([await self._encode(schema, "") for schema in common])

    async def _encode(self, schema: _Schema, cache_salt: str) -> int:
        facts = self._client.facts
        if facts is not None and facts.options.share == "off":
            raise RequestError("share is off, so that no module is kept: serve without encoding")
        encode = schema.library.encoding
        encoding = await asyncio.to_thread(encode, schema.name, "anchored")
        try:
            await compute_modules(
                self._client, encoding, cache_salt=cache_salt, common=schema.is_common
            )
        except RequestError as error:
            raise RequestError(f"schema {schema.name!r}: {error}") from error
        return sum(len(segment.token_ids) for segment in encoding.segments.values())

    def _check_room(self, tenant: Tenant) -> None:
        """Raise a 409 where a key has as many schemas as it may: all are held in memory."""
        count = sum(owner == tenant.name for owner, _ in self._current)
        if count >= MOST_SCHEMAS:
            raise ApiError(
                409,
                f"this key has {count} schemas, limit is {MOST_SCHEMAS}: delete one that is not "
                "used",
                code="too_many_schemas",
            )

    def _check_length(self, markup: str) -> None:
        if self._bounded is not None:
            check_markup(markup, self._bounded)

    def find(self, tenant: Tenant, name: str) -> _Schema:
        """A tenant's own schema or an operator's of that name; raises a 404 if there is none."""
        for owner in (tenant.name, APP_OWNER):
            found = self._current.get((owner, name))
            if found is not None:
                return found
        raise ApiError(404, f"there is no schema {show(name)}", code="schema_not_found")

    def visible(self, tenant: Tenant) -> list[_Schema]:
        """The tenant's own schemas and the operator's."""
        return [s for s in self._current.values() if s.owner in (tenant.name, APP_OWNER)]

    async def delete(self, tenant: Tenant, name: str) -> None:
        """Delete a tenant's own schema; raises a 404 if there is none, a 403 for an operator's."""
        schema = self.find(tenant, name)
        if schema.is_common:
            raise ApiError(
                403, f"{name!r} is the operator's: it ends with the server", code="operator_only"
            )
        await asyncio.to_thread(self._store.delete_named, "schemas", tenant.name, name)
        self._current.pop((tenant.name, name), None)

    def compile(self, tenant: Tenant, markup: str, isolation: str) -> CompiledPrompt:
        """A prompt's segments.

        Raises:
            PmlError: what is wrong with it; ApiError: its schema is not here.
        """
        self._check_length(markup)
        prompt = parse_prompt(_checked(markup))
        return self.find(tenant, prompt.schema).library.compile(prompt, isolation)

    def prefetch(self, tenant: Tenant, compiled: CompiledPrompt, module_salt: str) -> None:
        """Have modules read from the disk, if there is one, which the next prompt may want in place
        of what this one imports."""
        facts = self._client.facts
        if facts is not None and facts.options.disk_kv is not None:
            library = self.find(tenant, compiled.schema).library
            self._client.tell("prefetch", (library.alternatives(compiled), module_salt))

    def markups(self, tenant: Tenant) -> list[str]:
        """The markup of the tenant's schemas, which a new job keeps."""
        return [schema.source for schema in self.visible(tenant)]

    def compiler(self, markups: Sequence[str]) -> CompilePml | None:
        """Compiles prompts of some schemas; None for a model without a tokenizer."""
        if self._tokenizer is None:
            return None
        library = self._library(markups)

        def compiled(markup: str, isolation: str) -> CompiledPrompt:
            self._check_length(markup)
            return library.compile(markup, isolation)

        return compiled


def _checked(markup: str) -> str:
    """Markup, checked so that it cannot be taken for a file's name."""
    if not markup.lstrip("\ufeff \t\r\n").startswith("<"):
        raise RequestError(f"pml is {show(markup)}, expected markup that begins with <")
    return markup
