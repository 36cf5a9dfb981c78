"""A process that renders chat templates, as transformers does; `onestem.engine.text.templates`
starts it.

It imports the one module of transformers that it needs: the whole takes a second.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import types
from collections.abc import Callable
from typing import Any

from onestem.children import serve

MODULE = "transformers.utils.chat_template_utils"


def _renderer() -> Callable[..., Any]:
    sys.modules["torch"] = None  # type: ignore[assignment]
    there = dict(sys.modules)
    try:
        _stand_in("transformers", importlib.util.find_spec("transformers"))
        _stand_in("transformers.utils", importlib.util.find_spec("transformers.utils"))
        module = importlib.import_module(MODULE)
    except Exception:  # another version needs more of its package
        for name in sys.modules.keys() - there.keys():
            del sys.modules[name]
        module = importlib.import_module(MODULE)
    render: Callable[..., Any] = module.render_jinja_template
    return render


def _stand_in(name: str, found: Any) -> None:
    """An empty package, in which modules are found."""
    package = types.ModuleType(name)
    package.__path__ = list(found.submodule_search_locations or ())
    package.__spec__ = found
    sys.modules[name] = package


def answering(render: Callable[..., Any]) -> Callable[[bytes], bytes]:
    """What answers questions of `onestem.engine.text.templates`, by transformers' function."""
    from jinja2 import TemplateError

    def answer(question: bytes) -> bytes:
        """The text after a T, a reason after an E, or too great a length after an L."""
        template, messages, variables, longest = json.loads(question)
        try:
            rendered, _ = render(conversations=[messages], chat_template=template, **variables)
        except MemoryError:
            raise
        except Exception as error:  # a template is a program: it can do anything wrong
            reason = " ".join(str(error)[:1000].split()) or "it fails"
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            return f"E{kind}{reason}".encode("utf-8", "surrogatepass")
        (text,) = rendered
        if len(text) > longest:
            return f"L{len(text)}".encode()
        return b"T" + text.encode("utf-8", "surrogatepass")

    return answer


if __name__ == "__main__":
    serve(sys.argv[1:], lambda: answering(_renderer()))
