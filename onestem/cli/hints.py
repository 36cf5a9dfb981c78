"""What is said to somebody who types what another engine's command line has."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

from onestem.beside_vllm import ENGINE, SERVE, way_out
from onestem.errors import ConfigError
from onestem.options import EngineOptions
from onestem.server.settings import Settings

GENERATE = "`onestem generate PROMPT --model DIR` answers prompts"
CHAT = "`onestem chat DIR` talks to a model; `onestem serve DIR` has chats over HTTP"
LISTED = (
    "`onestem models` lists families; a model is a directory, and `onestem models DIR` tells of it"
)
FETCHED = "a name of the hub (owner/name) in place of DIR is fetched when it is first used"

VERBS = {
    "run": CHAT,
    "complete": GENERATE,
    "list": LISTED,
    "ls": LISTED,
    "show": "`onestem models DIR` tells what a model is and needs",
    "pull": FETCHED,
    "download": FETCHED,
    "ps": "`onestem serve` shows what it computes at /",
    "stop": "Ctrl-C or SIGTERM ends `onestem serve`",
    "run-batch": "`onestem batch IN.jsonl -o OUT.jsonl --model DIR`",
    "collect-env": "`onestem env`",
    "launch": "`onestem serve DIR`",
    "tune": "`onestem bench tune`, of onestem-lab: pip install ./lab in a clone",
}
"""What vLLM's and Ollama's users type, and what moved -> what does that here."""

OPTIONS = SERVE | ENGINE
SHORT = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
}


class HintingGroup(TyperGroup):
    """Names the verb that does what another engine's verb of that name does."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name in VERBS and self.get_command(ctx, name) is None:
            raise ConfigError(f"there is no verb {name}: {VERBS[name]}")
        return super().resolve_command(ctx, args)


class HintingCommand(TyperCommand):
    """Says the way out where an option is vLLM's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {flag for one in self.params for flag in (*one.opts, *one.secondary_opts)}
        for given in args:
            if given == "--":
                break
            flag = given.partition("=")[0]
            if flag.startswith("-") and flag not in known and (hint := _hint(flag, known)):
                raise ConfigError(f"there is no option {flag}{hint}")
        return super().parse_args(ctx, args)


def _hint(flag: str, known: set[str]) -> str:
    """The end of the line for an option that is not there; "": nothing is known of it."""
    name = SHORT.get(flag, flag.removeprefix("--").replace("-", "_"))
    for other in (name, name.removeprefix("no_")):
        told = OPTIONS.get(other)
        if told is not None and (told.ours is None or _flag(told.ours) in known):
            return way_out(other, OPTIONS, _flag) or f": give {_flag(other)}"
    return ""


def _flag(name: str) -> str:
    """An option as it is typed; other names as they are."""
    for kind in (EngineOptions, Settings):
        if name in kind.offered():
            return f"--{kind.offered()[name]}"
    return name
