"""Forms of reasoning and of calls of tools: each family of models is a description."""

from onestem.openai.forms.families import FORMS, GENERIC, described, form_of
from onestem.openai.forms.form import Form, Gaps
from onestem.openai.forms.grammar import HoldSchema, Tools, held_to
from onestem.openai.forms.reader import AnswerReader, Mode, ReadAnswer, Reading
