"""What all clients ask."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import BaseModel

URL = os.environ["ONESTEM_URL"]
# The same API on a model whose template opens each answer with reasoning.
THINKS = os.environ["ONESTEM_THINKS_URL"]
USER = "Is it warm in Rome?"
BRIEF = "Answer in one word."  # answers of all models end soon
# Whether a turn that may not call tools begins as the one before it: where a template knows no
# tools, the system message tells of them, and then of none.
KEEPS_TOOLS = os.environ["ONESTEM_MODEL"] != "generic"
CITIES = ("Paris", "Rome")
City = Literal["Paris", "Rome"]


class Answer(BaseModel):
    yes: bool
    city: City


def is_warm(city: City) -> str:
    """Whether a city is warm."""
    return f"{city} is warm."
