"""Logs: a line for each event on stderr, JSON for programs or text for people. Prompts and answers
are only ever in `debug` lines."""

from __future__ import annotations

import json
import logging
import sys
from functools import partialmethod
from typing import Any

from onestem.server.log_lines import line_of

LEVELS = ("debug", "info", "warning", "error")


class _JsonFormatter(logging.Formatter):
    """`log`'s fields as they are; other libraries' records as `event: log` with a message."""

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", None)
        line: dict[str, Any] = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "event": record.getMessage() if fields is not None else "log",
        }
        if fields is None:
            line |= {"logger": record.name, "message": record.getMessage()}
        else:
            line |= fields
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class _TextFormatter(logging.Formatter):
    """The time, the level from warning on, and the event's text."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", None)
        text = record.message if fields is None else line_of(record.message, fields)
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return f"{record.asctime} {level}{text}"


FORMATS: dict[str, type[logging.Formatter]] = {"json": _JsonFormatter, "text": _TextFormatter}


def default_format() -> str:
    """Text for a terminal, JSON otherwise."""
    return "text" if sys.stderr.isatty() else "json"


class _Log:
    """Events with fields."""

    def __init__(self) -> None:
        self._logger = logging.getLogger("onestem.server")

    def _write(
        self, level: int, event: str, error: BaseException | None = None, /, **fields: Any
    ) -> None:
        self._logger.log(level, event, extra={"fields": fields}, exc_info=error)

    debug = partialmethod(_write, logging.DEBUG)
    info = partialmethod(_write, logging.INFO)
    warning = partialmethod(_write, logging.WARNING)
    error = exception = partialmethod(_write, logging.ERROR)


log = _Log()


def set_up(level: str, style: str = "") -> None:
    """All logs of this process, uvicorn's too, as lines on stderr; `style`: of `FORMATS`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FORMATS[style or default_format()]())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("onestem").setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = name != "uvicorn.access"
