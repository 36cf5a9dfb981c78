"""Faults in running prompts of modules, each put in on purpose: the check must see them."""

from __future__ import annotations

import dataclasses

import pytest

import onestem.engine.step.inputs as inputs_module
from onestem.engine.modules.prompt import PmlPrompt, SequenceModules
from onestem.engine.step.batch_rows import BatchRows
from onestem.errors import OnestemError
from tests.engine.pml_harness import check_pml


def module_shifted(monkeypatch):
    """A module's rows stand one position too high."""
    add_module = inputs_module._ChunkLayout.add_module

    def mutated(layout, chunk):
        add_module(layout, chunk)
        layout.positions[-1] = layout.positions[-1] + 1

    monkeypatch.setattr(inputs_module._ChunkLayout, "add_module", mutated)


def attended_dropped(monkeypatch):
    """A module does not see the last segment that it attends to."""
    attended = SequenceModules.attended
    monkeypatch.setattr(SequenceModules, "attended", lambda *args: attended(*args)[:-1])


def attended_added(monkeypatch):
    """A module sees the segment before it, whether it attends to it or not."""

    def attended(self, index):
        before = {*self.prompt.encoded[index].attends, *([index - 1] if index else [])}
        return [(self._runs[i], 0) for i in sorted(before & self._runs.keys())]

    monkeypatch.setattr(SequenceModules, "attended", attended)


def imports_changed(change):
    def apply(monkeypatch):
        init = PmlPrompt.__init__

        def mutated(self, *args, **options):
            init(self, *args, **options)
            self.imports = tuple(change(self.imports))

        monkeypatch.setattr(PmlPrompt, "__init__", mutated)

    return apply


def other_member(monkeypatch):
    """Modules are found by their position alone: union members are taken for each other."""
    attach = SequenceModules._attach

    def mutated(self, index, segment):
        attach(self, index, dataclasses.replace(segment, key=str(segment.position)))

    monkeypatch.setattr(SequenceModules, "_attach", mutated)


def jump_ignored(monkeypatch):
    """The answer follows the prompt's tokens without a gap."""
    monkeypatch.setattr(
        inputs_module.Sequence, "positions", lambda self, a, b: inputs_module.np.arange(a, b)
    )


def answer_shifted(monkeypatch):
    """Decodes stand one position too high."""

    apply = BatchRows.apply

    def mutated(self, changes):
        apply(self, changes)
        self.inputs.positions[: len(self)] += 1

    monkeypatch.setattr(BatchRows, "apply", mutated)


MUTATIONS = {
    "module_shifted": module_shifted,
    "attended_dropped": attended_dropped,
    "attended_added": attended_added,
    "import_dropped": imports_changed(lambda imports: imports[:-1]),
    "one_row_late": imports_changed(
        lambda imports: [dataclasses.replace(one, first=one.first + 1) for one in imports]
    ),
    "one_row_early": imports_changed(
        lambda imports: [dataclasses.replace(i, first=max(0, i.first - 1)) for i in imports]
    ),
    "last_token_hidden": imports_changed(
        lambda imports: [dataclasses.replace(one, in_use=one.in_use - 1) for one in imports]
    ),
    "other_member": other_member,
    "jump_ignored": jump_ignored,
    "answer_shifted": answer_shifted,
}


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.parametrize("isolation", ["anchored", "isolated"])
def test_the_check_sees(tiny, monkeypatch, isolation, name):
    if isolation == "isolated" and name == "one_row_early":
        pytest.skip("all rows see everything imported: none is earlier")
    MUTATIONS[name](monkeypatch)
    with pytest.raises((AssertionError, OnestemError, KeyError)):
        check_pml(tiny("llama"), isolation, max_step_tokens=48)
