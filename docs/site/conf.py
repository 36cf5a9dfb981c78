"""Sphinx builds the site of docs/ with this; `scripts/site` calls it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from reference import write_reference  # noqa: E402
from sphinx.ext.napoleon import Config, GoogleDocstring  # noqa: E402

import onestem  # noqa: E402

project = "Onestem"
author = "The Onestem developers"
copyright = "The Onestem developers. Apache-2.0"
release = version = onestem.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["site", "reference/vllm-*"]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
# Blocks of languages that Pygments does not know stay as they are.
highlight_language = "none"
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # types in signatures are no links

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
add_module_names = False

html_theme = "furo"
html_title = "Onestem"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False


def as_markdown(app, what, name, thing, options, lines) -> None:
    """Docstrings are Google's, with Markdown's backticks: a reference for docutils, code for us."""
    text = re.sub(r"(?<![`:])`([^`]+)`(?!`)", r"``\1``", "\n".join(lines))
    lines[:] = text.split("\n")
    if what != "attribute":  # theirs would be read as "type: text"
        lines[:] = GoogleDocstring(lines, Config(napoleon_use_ivar=True)).lines()


def as_short(app, what, name, thing, options, signature, returns) -> tuple[str | None, str | None]:
    """Classes of many fields have them below, or on a page of their own; types without modules."""
    if what == "class" and len(signature or "") > 300:
        return "(**fields)", None
    return tuple(told and re.sub(r"~(?:\w+\.)*", "", told) for told in (signature, returns))


def setup(app) -> None:
    app.connect("autodoc-process-signature", as_short)
    app.connect("autodoc-process-docstring", as_markdown)
    app.connect("builder-inited", lambda app: write_reference(Path(app.srcdir) / "reference"))
