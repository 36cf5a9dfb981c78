"""Events of the log as text for people: a line each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from onestem.openai.schema import URL_OF_KIND

Fields = Mapping[str, Any]


def line_of(event: str, fields: Fields) -> str:
    """An event's text. What cannot be printed is escaped: any client may choose a path."""
    line = LINES.get(event) or partial(_any, event)
    text = line.format(**fields) if isinstance(line, str) else line(fields)
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def _any(event: str, fields: Fields) -> str:
    shown = [f"{name} {value}" for name, value in fields.items() if value is not None]
    return ": ".join(part for part in (event.replace("_", " "), ", ".join(shown)) if part)


def _loading(fields: Fields) -> str:
    if not fields["weights_bytes"]:
        return "making weights up"
    return f"loading weights: {_size(fields['weights_bytes'])}, {fields['dtype']}"


def _size(count: float) -> str:
    units = ["B", "KiB", "MiB", "GiB"]
    while count >= 1024 and len(units) > 1:
        count /= 1024
        units.pop(0)
    return f"{count:.4g} {units[0]}"


def _engine_ready(fields: Fields) -> str:
    again = f" again, restart {fields['restarts']}" if fields["restarts"] else ""
    return f"engine ready{again}"


def _request(fields: Fields) -> str:
    who = f", key {fields['key']}" if fields["key"] else ""
    who += f", prefix {fields['app']}" if fields["app"] else ""
    return (
        f"POST {URL_OF_KIND[fields['endpoint']]} {fields['outcome']}: "
        f"{fields['prompt_tokens']} prompt tokens ({fields['cached_tokens']} cached), "
        f"{fields['output_tokens']} answered, {fields['seconds']:.2f} s{who}"
    )


def _rerendered(fields: Fields) -> str:
    app = f" of {fields['app']}" if fields["app"] else ""
    return (
        f"a conversation{app} is written differently than before, {fields['tokens']} cached tokens "
        f"could not be used: {fields['kind'].replace('_', ' ')} differs {fields['offset']} tokens "
        f"into an answer, at token {fields['at']} of the prompt (told once)"
    )


def _refused(fields: Fields) -> str:
    why = [fields[name] for name in ("code", "param") if fields[name]]
    told = f"{fields['method']} {fields['path']} {fields['status']}"
    return f"{told}: {', '.join(why)}" if why else told


LINES: Mapping[str, str | Callable[[Fields], str]] = {
    "starting": "starting, model {model}",
    "model_found": "model found: {path}",
    "loading": _loading,
    "engine_ready": _engine_ready,
    "loaded": (
        "KV memory of {kv_tokens:,} tokens; {dtype} on {device}, attention {attention}; "
        "{seconds:.1f} s"
    ),
    "prefixes_computed": "prefixes computed: {count}, {tokens:,} tokens",
    "listening": "listening on {url}, model {model}",
    "addresses": "page {page}, API {api}",
    "try": "try: {command}",
    "stopping": "stopping: answers have {grace:g} s to end",
    "request": _request,
    "refused": _refused,
    "rerendered": _rerendered,
}
