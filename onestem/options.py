"""`EngineOptions`: all options of an engine, declared once; `InputOptions`: a job's input.

`LLM`'s arguments, the command line's options, `ONESTEM_*` variables, configuration files, a job's
identity and what a server says of its engine derive from it.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import inspect
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Concatenate,
    Literal,
    ParamSpec,
    TypeVar,
    get_origin,
)

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, WithJsonSchema
from pydantic import ValidationError as Invalid
from pydantic.fields import FieldInfo

from onestem.beside_vllm import ENGINE, Name, way_out
from onestem.checked import EXPECTED, Checked, show, words
from onestem.errors import ConfigError, OnestemError
from onestem.shapes import is_shape

EMBEDDED = "embedded"
"""Name of the model that ships with the package."""

PREFIX = "ONESTEM"
CONFIG = "ONESTEM_CONFIG"
OTHER_VARIABLES = (CONFIG, "ONESTEM_CPU_ISA")
"""Variables of ours that are no options."""

TABLES = ("serve", "input")
"""Tables of a configuration file: options of others than the engine."""

MAX_PASSED = 2048

ShareMode = Literal["full", "storage", "off", "no-attention"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
Levels = Literal["all", "one", "heuristic", "none"]
GroupOrder = Literal["r", "input", "sorted"]
Quantize = Literal["fp8", "int8", "int4"]

P = ParamSpec("P")
Own = TypeVar("Own")
Given = TypeVar("Given", bound="Options")


def parse_memory(size: str | int) -> int:
    """Bytes of `1073741824`, `"512MiB"`, `"2GiB"`, `"2G"` (binary), `"2GB"` (decimal)."""
    if isinstance(size, int):
        return size
    if not isinstance(size, str):
        raise ConfigError(f"memory size is {size!r}, expected bytes (an integer) or text like 2GiB")
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([KMGT]?)(i?)(B?)\s*", size, re.IGNORECASE)
    if match is None:
        raise ConfigError(
            f"memory size is {size!r}, expected a number of bytes or like 512MiB, 2GiB, 2GB"
        )
    number, prefix, binary, unit = match.groups()
    base = 1000 if unit and not binary else 1024
    return int(float(number) * base ** " KMGT".index(prefix.upper() or " "))


def _check_memory(size: str | int) -> str | int:
    try:
        if size != "auto" and parse_memory(size) < 0:
            raise ConfigError("less than nothing")
    except ConfigError:
        raise ConfigError("expected bytes, or text like 512MiB, 2GiB, 2GB") from None
    return size


Memory = Annotated[str | int, AfterValidator(_check_memory)]
Path_ = Annotated[
    str | os.PathLike[str],
    # No shell expands ~ in a file, or in a variable of a service.
    BeforeValidator(
        lambda path: os.path.expanduser(path) if isinstance(path, (str, os.PathLike)) else path
    ),
    WithJsonSchema({"type": "string", EXPECTED: "a path"}),
]


class Options(Checked):
    """Options that the command line, the environment and a file can give.

    Attributes:
        table: the table of a configuration file that holds them; "": its top.
        panel: the panel of a verb's help that lists them; None: that of its own options.
    """

    error: ClassVar[type[OnestemError]] = ConfigError
    table: ClassVar[str] = ""
    panel: ClassVar[str | None] = None

    @classmethod
    def offered(cls) -> dict[str, str]:
        """Fields that can be given, and their names on the command line without dashes in front."""
        named = {
            name: str(extra_of(field).get("flag", name)).replace("_", "-")
            for name, field in cls.model_fields.items()
        }
        return {name: flag for name, flag in named.items() if flag}

    @classmethod
    def variable(cls, name: str) -> str:
        """The environment variable of a field."""
        words = (PREFIX, cls.table, cls.offered()[name])
        return "_".join(word for word in words if word).replace("-", "_").upper()


class EngineOptions(Options):
    """A model, and how it is run.

    Defaults come from `ONESTEM_*` variables and from the file that `ONESTEM_CONFIG` names, where
    `Defaults` reads them; `EngineOptions(...)` itself knows the built-in ones alone.
    """

    panel: ClassVar[str | None] = "Engine"
    beside: ClassVar[Mapping[str, Name]] = ENGINE

    model: Path_ = Field(default=EMBEDDED, kw_only=False)
    """Model directory, GGUF file, hub name (owner/name), short name of a model of this machine
    (`onestem models` lists them), 'embedded', or 'shape:NAME': a size with random weights
    (docs/models.md)."""

    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda or cuda:N."""

    dtype: Annotated[str, BeforeValidator(lambda dtype: _dtype_name(dtype))] = Field(
        default="auto",
        json_schema_extra={
            "enum": ["auto", "float32", "bfloat16", "float16"],
            "identity": True,
        },
    )
    """auto (the model's own; float32 on a CPU without bf16 instructions), float32, bfloat16 or
    float16."""

    quantization: Quantize | None = Field(default=None, json_schema_extra={"identity": True})
    """Round the layers' weights when they are loaded: fp8 or int8 per channel, int4 in groups of
    128 (docs/models.md) (default: as the checkpoint has them)."""

    deterministic: bool = Field(default=False, json_schema_extra={"identity": True})
    """Logits have the same bits in any batch and after any hit: of dense models in 16 bits or
    float32, on one device (docs/sampling.md)."""

    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    """Devices that hold the model together: GPUs from the device on, or processes on the CPU
    (docs/tensor-parallel.md)."""

    kv_memory: Memory = "auto"
    """KV memory of each device: auto, bytes, or like 2GiB. auto: 90% of what is free on a GPU, on a
    CPU the lesser of 4 GiB and a quarter of the RAM."""

    state_share: float = Field(default=0.5, gt=0, lt=1)
    """Share of KV memory for recurrent states, of models whose layers keep some: one for each
    sequence, the others for prefixes."""

    max_model_len: int | None = Field(default=None, ge=1, json_schema_extra={"identity": True})
    """Maximum tokens of prompt and answer (default: the model's, or what fits)."""

    chat_template: Path_ | None = Field(default=None, json_schema_extra={"metavar": "FILE"})
    """Chat template in place of the model's own."""

    default_temperature: float | None = Field(
        default=None, ge=0, le=100, json_schema_extra={"flag": ""}
    )
    """Temperature of requests that have none (default: the model's)."""

    default_top_p: float | None = Field(default=None, gt=0, le=1, json_schema_extra={"flag": ""})
    """top_p of requests that have none (default: the model's)."""

    max_step_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens of a step, prompts' and one of each sequence that decodes (default: 1024 on a
    CPU, 2048 with AMX and weights of 16 bits, 8192 on a GPU)."""

    max_step_ms: float | None = Field(default=None, ge=0)
    """About what a step may take, in milliseconds, while it computes prompts; 0: no limit (default:
    no limit; of a server 300 on a CPU, 100 on a GPU)."""

    max_num_seqs: int | None = Field(default=None, ge=1)
    """Maximum sequences that run at once (default: as many as KV memory holds)."""

    answer_memory: Memory = "auto"
    """Host memory for log-probabilities of running requests, and for answers of n above 1: auto (a
    quarter of the RAM), bytes, or like 2GiB."""

    max_passed: int = Field(default=MAX_PASSED, ge=0)
    """Maximum later requests that go before one that waits, because their prefix is in the cache;
    0: first come, first served."""

    page_size: int = Field(default=16, ge=1)
    """Tokens in a page of KV memory."""

    share: ShareMode = "full"
    """full, storage or off (the last two for measuring); no-attention: a ceiling, for benchmarks
    alone."""

    levels: Levels = "all"
    """What requests of a planned job share: all (prefixes nest), one (a prefix each, BatchLLM's
    Algorithm 1), heuristic (a prefix of more than half of the prompt), none (no groups: what the
    prefix cache finds)."""

    order: GroupOrder | None = None
    """Order of a planned job's groups: r (much to decode for few prompt tokens first), input, or
    sorted (by tokens) (default: r; input where levels is none)."""

    impl: str = Field(default="auto", json_schema_extra={"flag": "attention"})
    """Attention implementation: auto (the fastest there is), or its name."""

    threads: int | None = Field(default=None, ge=1, le=4096)
    """Threads on a CPU, for all of the process, or of each that holds a part of a model (default:
    the cores that affinity and cgroups leave, shared out)."""

    random_weights: bool | None = Field(default=None, json_schema_extra={"identity": True})
    """Use random weights: only config.json is needed (default: for shape:NAME models alone)."""

    logprobs_mode: LogprobsMode = Field(
        default="raw_logprobs", json_schema_extra={"identity": True}
    )
    """Log-probabilities of sampled tokens: raw_logprobs (the model's own) or processed_logprobs (of
    what the token was drawn from)."""

    seed: int | None = Field(
        default=None, ge=-(2**63), le=2**64 - 1, json_schema_extra={EXPECTED: "a 64-bit integer"}
    )
    """Where seeds of requests without one come from (default: drawn)."""

    trace: Path_ | None = Field(default=None, json_schema_extra={"metavar": "FILE"})
    """Write what each step computes there, a JSON line each, in place of what the file holds."""

    host_kv: Memory = 0
    """Host memory, of all devices, for prefixes and PML modules that KV memory has no room for."""

    disk_kv: Path_ | None = None
    """Folder in which prefixes and PML modules outlive the process."""

    disk_kv_size: Memory = "16GiB"
    """Maximum that they take there, of all devices."""

    bits: str | None = Field(default=None, json_schema_extra={"flag": ""})
    """What bits depend on besides, as an engine that is `deterministic` has found it; what is given
    is not read."""

    if not TYPE_CHECKING:  # type checkers take the fields for the arguments

        def __init__(self, /, *args: Any, **fields: Any) -> None:
            super().__init__(**_with_model(args, fields))

    @property
    def makes_weights_up(self) -> bool:
        """`random_weights`; where it is not given, whether the model is a shape."""
        return is_shape(self.model) if self.random_weights is None else self.random_weights

    @property
    def template_text(self) -> str | None:
        """The text of `chat_template`.

        Raises:
            ConfigError: it cannot be read.
        """
        if self.chat_template is None:
            return None
        try:
            return Path(self.chat_template).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"chat_template {self.chat_template} cannot be read: {error}"
            ) from None

    def identity(self) -> dict[str, Any]:
        """What answers depend on besides the model. The options must be settled, as `LLM` has
        them."""
        fields = type(self).model_fields.items()
        marked = {name for name, field in fields if extra_of(field).get("identity")}
        identity = {"device": self.device.partition(":")[0]}
        identity |= {name: getattr(self, name) for name in sorted(marked)}
        template = self.template_text
        given = ("default_temperature", "default_top_p", "bits")
        identity |= {name: value for name in given if (value := getattr(self, name)) is not None}
        if template is not None:
            identity["chat_template"] = hashlib.sha256(template.encode()).hexdigest()
        # Seeds of a job's lines are derived from its identity.
        return identity if self.seed is None else identity | {"seed": self.seed}

    def job_identity(self, asked: EngineOptions) -> dict[str, Any]:
        """`identity` without what was drawn or measured when the engine started: another start
        draws or measures something else, and goes on with the job. `asked`: the options as they
        were given."""
        given = {name: getattr(asked, name) for name in ("max_model_len", "seed")}
        identity = {name: value for name, value in self.identity().items() if name not in given}
        return identity | {name: value for name, value in given.items() if value is not None}


class InputOptions(Options):
    """How a job's input is read. Without a template its lines are OpenAI batch lines; with one each
    row (of JSON lines, CSV, Parquet, a data set) makes a request (docs/inputs.md).

    In templates {column} is a row's value, and {{ and }} are braces.
    """

    table: ClassVar[str] = "input"
    panel: ClassVar[str | None] = "Input"

    prompt: str | None = Field(default=None, json_schema_extra={"metavar": "TEMPLATE"})
    """A prompt of each row: text with {column} for its values. \\n is a new line, \\t a tab,
    \\\\ a backslash."""

    messages: str | None = Field(default=None, json_schema_extra={"metavar": "TEMPLATE"})
    """A chat of each row: text of one user message, a JSON list of messages, or {column} for a
    column that holds messages."""

    completions: str | None = Field(default=None, json_schema_extra={"metavar": "TEMPLATE"})
    """What is scored after --prompt: text, a JSON list of texts, or {column} for a list."""

    text: str | None = Field(default=None, json_schema_extra={"metavar": "TEMPLATE"})
    """A text of each row that is scored whole."""

    parse_special: bool | None = None
    """Read names of control tokens in prompts and texts as these tokens, or as characters, where a
    request does not say it (default: docs/inputs.md)."""

    body: str | None = Field(default=None, json_schema_extra={"metavar": "JSON"})
    """What else each request says: {"max_tokens": 64}."""

    id: str | None = Field(default=None, json_schema_extra={"metavar": "COLUMN"})
    """The column that names the results (default: the row's number, from 1)."""

    split: str | None = Field(default=None, json_schema_extra={"metavar": "NAME"})
    """Which split of a data set."""

    delimiter: str | None = Field(
        default=None, min_length=1, max_length=1, json_schema_extra={"metavar": "CHARACTER"}
    )
    """Separator of the cells of a CSV file (default: a comma; a tab for .tsv)."""


def _with_model(args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """All arguments by their names: the model's may be left out."""
    if len(args) > 1:
        raise TypeError(f"{len(args)} arguments without a name: model alone may have none")
    if args and "model" in named:
        raise TypeError("model is given twice: without its name, and with it")
    return {**named, "model": args[0]} if args else named


def extra_of(field: FieldInfo) -> dict[str, Any]:
    """What a declaration says besides type, range and help: `flag`, its name on the command line
    ("": it has none); `metavar`; `identity`, whether answers depend on it."""
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}


def _dtype_name(dtype: Any) -> Any:
    """A torch.dtype as its name; other values unchanged."""
    name = str(dtype).removeprefix("torch.")
    if name not in ("auto", "float32", "bfloat16", "float16"):
        raise ConfigError("expected auto, float32, bfloat16 or float16")
    return name


class Defaults:
    """Options from the environment and a file; the environment goes before the file.

    Args:
        file: in TOML; None: the one that ONESTEM_CONFIG names, if any. Keys are options' names,
            with `_` or `-`; those of `onestem serve` are in a table [serve].
        environment: variables; None: the process's.

    Raises:
        ConfigError: the file cannot be read.
    """

    def __init__(
        self, file: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        self._environment = os.environ if environment is None else environment
        named = self._environment.get(CONFIG)
        self.file = file or (Path(os.path.expanduser(named)) if named else None)
        self._tables = {} if self.file is None else _read(self.file)

    def sources(self, kind: type[Options]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Names of the file and of variables that give options of `kind`, and values by field, not
        checked yet. Each goes before those listed earlier."""
        table = self._tables if not kind.table else self._tables.get(kind.table, {})
        if self.file is not None:
            values: dict[str, Any] = {}
            for key in (key for key in table if key not in TABLES):
                name = _field(kind, key, self.file)
                if name in values:
                    raise ConfigError(f"{self.file}: {key} stands twice, with _ and with -")
                values[name] = table[key]
            yield str(self.file), values
        for name in kind.offered():
            text = self._environment.get(kind.variable(name), "")
            if text:
                yield kind.variable(name), {name: _parsed(kind, name, text)}

    def options(
        self, kind: type[Given], given: Mapping[str, Any] | None = None
    ) -> tuple[Given, dict[str, str]]:
        """Options of a kind, and the source of each that is not its built-in default.

        Args:
            given: options that go before environment and file.

        Raises:
            ConfigError: a bad value, or no such option; it names the source.
        """
        values: dict[str, Any] = {}
        origins: dict[str, str] = {}
        for source, said in self.sources(kind):
            try:
                kind(**said)
            except ConfigError as error:
                raise ConfigError(f"{source}: {error}") from None
            values |= said
            origins |= dict.fromkeys(said, source)
        values |= given or {}
        origins |= dict.fromkeys(given or {}, "given")
        return kind(**values), origins

    def unknown(self, *kinds: type[Options]) -> list[str]:
        """Variables that begin as ours do and are none of these kinds'."""
        known = {kind.variable(name) for kind in kinds for name in kind.offered()}
        ours = {name for name in self._environment if name.startswith(f"{PREFIX}_")}
        return sorted(ours - known - set(OTHER_VARIABLES))


def _read(file: Path) -> dict[str, Any]:
    try:
        tables = tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:  # of TOML or UTF-8
        raise ConfigError(f"{file} is no TOML: {error}") from error
    for name in TABLES:
        if not isinstance(tables.get(name, {}), dict):
            raise ConfigError(f"{file}: {name} is {show(tables[name])}, expected a table")
    return tables


def _check_names(names: Iterable[str]) -> None:
    fields = EngineOptions.model_fields
    flags = {flag.replace("-", "_"): name for name, flag in EngineOptions.offered().items()}
    for name in names:
        if name not in fields:
            spellings = {field: field for field in fields} | flags
            hint = way_out(name, ENGINE) or _nearest(name, spellings)
            raise ConfigError(f"there is no option {name!r}{hint}")


def _nearest(name: str, spellings: Mapping[str, str]) -> str:
    """A hint at the nearest of some spellings, in the words that each stands for."""
    near = difflib.get_close_matches(name, spellings, 1)
    return f": did you mean {spellings[near[0]]}?" if near else ""


def _field(kind: type[Options], key: str, file: Path) -> str:
    names = {named: name for name, named in kind.offered().items()}
    name = names.get(key.replace("_", "-"))
    if name is None:
        spellings = {named: named.replace("-", "_") for named in (*TABLES, *names)}
        told = way_out(
            key.replace("-", "_"),
            kind.beside,
            lambda ours: kind.offered().get(ours, ours).replace("-", "_"),
        )
        hint = told or _nearest(key.replace("_", "-"), spellings)
        raise ConfigError(f"{file}: there is no option {key!r}{hint}")
    return name


def _parsed(kind: type[Options], name: str, text: str) -> Any:
    """A variable's text as the field's type."""
    annotation: Any = kind.model_fields[name].annotation
    lists = get_origin(annotation) is tuple
    try:
        return TypeAdapter(annotation).validate_python(text.split(",") if lists else text)
    except Invalid:
        wanted = words(kind.model_json_schema()["properties"][name])
        variable = kind.variable(name)
        raise ConfigError(f"{variable} is {text!r}, expected {wanted}") from None


def takes(
    declared: Callable[P, EngineOptions],
) -> Callable[[Callable[[Own, EngineOptions], None]], Callable[Concatenate[Own, P], None]]:
    """Let a method be called with the arguments that options declare; it gets the options, with
    environment and file as defaults."""

    def of(
        method: Callable[[Own, EngineOptions], None],
    ) -> Callable[Concatenate[Own, P], None]:
        @functools.wraps(method)
        def call(self: Own, /, *args: P.args, **kwargs: P.kwargs) -> None:
            _check_names(kwargs)
            method(self, Defaults().options(EngineOptions, _with_model(args, kwargs))[0])

        kind = inspect.Parameter.KEYWORD_ONLY
        parameters = [
            inspect.Parameter(
                name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD if name == "model" else kind,
                default=field.default,
                annotation=field.annotation,
            )
            for name, field in EngineOptions.model_fields.items()
        ]
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        call.__signature__ = inspect.Signature([own, *parameters])  # type: ignore[attr-defined]
        return call

    return of
