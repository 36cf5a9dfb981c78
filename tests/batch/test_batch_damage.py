"""Files that a disk has changed: what is damaged is found, and made or answered again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onestem.batch import EngineDiedError, JobInterrupted
from onestem.batch.workplace import Workplace
from onestem.errors import JobError
from tests.batch.fakes import (
    FakeEngine,
    FakeTokenizer,
    completion,
    mixed_job,
    results,
    run_fake,
    write_lines,
)


class Stopping(FakeEngine):
    """Is interrupted after nine answers."""

    def finish(self, request):
        if len(self.seen) > 13:
            raise KeyboardInterrupt
        return super().finish(request)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return mixed_job(tmp_path / "in.jsonl")


@pytest.fixture
def expected(tmp_path: Path, source: Path) -> bytes:
    run_fake(source, tmp_path / "whole.jsonl")
    return (tmp_path / "whole.jsonl").read_bytes()


@pytest.fixture
def place(tmp_path: Path, source: Path) -> Workplace:
    """Of a job in its middle."""
    output = tmp_path / "out.jsonl"
    with pytest.raises(JobInterrupted):
        run_fake(source, output, Stopping())
    return Workplace(output)


def answers(place: Workplace) -> list[bytes]:
    return place.partial.read_bytes().splitlines(keepends=True)


def flip(path: Path, at: float, bit: int = 2) -> None:
    """Change a bit of a file, at a part of its length."""
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 1 << bit
    path.write_bytes(data)


def goes_on(source: Path, place: Workplace, **changes) -> tuple[int, list[str]]:
    """Run a job to its end; returns the number of answers that were there, and warnings."""
    warnings: list[str] = []
    summary = run_fake(source, place.output, on_warning=warnings.append, **changes)
    assert not place.folder.exists()
    return summary.resumed, warnings


# ----------------------------------------------------------------------------- spool


@pytest.mark.parametrize("name", ["ids", "lines", "requests"])
@pytest.mark.parametrize("at", [0, 0.3, 0.8, 1])
def test_a_spool_with_a_flipped_bit_is_made_anew(source, expected, place, name, at):
    before = len(answers(place))
    flip(place.folder / name, at)
    resumed, warnings = goes_on(source, place)
    assert place.output.read_bytes() == expected
    assert resumed == before
    if name != "lines":  # which is read as a whole, before anything is done with it
        assert len(warnings) <= 1  # none where the line was answered before
        assert all(f"{name} was damaged: the input is read again" in one for one in warnings)


@pytest.mark.parametrize("name", ["ids", "requests"])
def test_every_line_of_a_spool_is_checked(tmp_path, name):
    """Wherever the bit is, no line is answered as another would be."""
    source = write_lines(tmp_path / "in.jsonl", [completion(str(i), "abcdef") for i in range(5)])
    run_fake(source, tmp_path / "whole.jsonl")
    place = Workplace(tmp_path / "out.jsonl")
    damaged = []

    def damage(prompts, **how):
        if not damaged:
            damaged.append(at)
            flip(place.folder / name, at)

    for at in (0, 0.25, 0.5, 0.75, 1):
        damaged.clear()
        place.output.unlink(missing_ok=True)
        warnings: list[str] = []
        run_fake(
            source, place.output, planner=None, validate=lambda request: None,
            on_progress=lambda progress: progress.stage == "run" and damage([]),
            on_warning=warnings.append,
        )  # fmt: skip
        assert place.output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
        assert len(warnings) == (name == "ids" or at < 1)  # the last byte is a line end


def test_a_spool_that_is_damaged_again_says_so(source, place):
    class Rotten(FakeEngine):
        def run(self, requests):
            flip(place.requests, 0.5)
            flip(place.ids, 0.5)
            place.ids.write_bytes(bytes(place.ids.stat().st_size))
            return super().run(requests)

    before = answers(place)
    with pytest.raises(JobError, match="ids is not as it was written, twice: check the disk"):
        run_fake(source, place.output, Rotten(), on_warning=lambda warning: None)
    assert answers(place)[: len(before)] == before


# ----------------------------------------------------------------------------- manifest


def test_what_is_known_of_answers_is_kept_with_them(source, expected, place):
    """Also where the spool, which is made anew, is not finished."""

    class Interrupted(FakeTokenizer):
        def encode_batch(self, texts, **how):
            raise KeyboardInterrupt

    place.manifest.write_bytes(b"")
    place.write_suspects(frozenset({3}))
    sums = place.sums.read_bytes()
    with pytest.raises(JobInterrupted):
        goes_on(source, place, tokenizer=Interrupted())
    assert (place.sums.read_bytes(), place.read_suspects()) == (sums, {3})
    goes_on(source, place)
    assert place.output.read_bytes() == expected


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", None])
def test_a_damaged_manifest_is_made_from_the_answers(source, expected, place, content):
    before = len(answers(place))
    if content is None:  # a bit of a value
        raw = place.manifest.read_bytes()
        content = raw.replace(b"float32", b"float33")
        assert content != raw
    place.manifest.write_bytes(content)
    resumed, (warning,) = goes_on(source, place)
    assert "manifest.json is damaged: it is made anew, answers are kept" in warning
    assert resumed == before
    assert place.output.read_bytes() == expected


def test_a_lost_manifest_is_made_from_the_answers(source, expected, place):
    place.manifest.unlink()
    resumed, (warning,) = goes_on(source, place, force=True)
    assert resumed > 0
    assert "manifest.json is missing" in warning
    assert place.output.read_bytes() == expected


def test_a_damaged_manifest_beside_answers_of_another_job_is_refused(source, place):
    place.manifest.write_text("{")
    before = answers(place)
    with pytest.raises(JobError, match=r"manifest.json is damaged, and no line of .*--force"):
        run_fake(source, place.output, model_identity="model-2")
    assert answers(place) == before


def test_a_damaged_manifest_without_answers_loses_nothing(source, expected, place):
    place.manifest.write_text("{")
    place.partial.unlink()
    assert goes_on(source, place) == (0, [])
    assert place.output.read_bytes() == expected


# ----------------------------------------------------------------------------- journal


def other_text(raw: bytes) -> bytes:
    """A result line with another letter in its answer."""
    record = json.loads(raw)
    choice = record["response"]["body"]["choices"][0]
    field = "text" if "text" in choice else "message"
    text = choice[field] if field == "text" else choice[field]["content"]
    return raw.replace(text.encode(), (chr(ord(text[0]) ^ 1) + text[1:]).encode(), 1)


def of_another_job(raw: bytes) -> bytes:
    return raw.replace(b"batch_req_", b"batch_req_0123456789abcdef_", 1)


DAMAGE = {
    "no JSON": lambda raw: b"x" + raw[1:],
    "another text": other_text,
    "of another job": of_another_job,
    "of a line that is not there": lambda raw: raw.replace(b'_3"', b'_999"', 1),
    "empty": lambda raw: b"\n",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_answer_costs_itself_alone(source, expected, place, damage):
    lines = answers(place)
    number = next(i for i, raw in enumerate(lines) if b'"error":null' in raw)
    if damage == "of a line that is not there":
        number = next(i for i, raw in enumerate(lines) if b'_3"' in raw)
    lines[number] = DAMAGE[damage](raw := lines[number])
    assert lines[number] != raw
    place.partial.write_bytes(b"".join(lines))
    resumed, (warning,) = goes_on(source, place)
    assert resumed == len(lines) - 1
    assert f"1 damaged lines (line {number + 1}) are dropped, and answered again" in warning
    assert place.output.read_bytes() == expected


def test_lines_that_stand_twice_or_are_no_ones_are_dropped(source, expected, place):
    lines = answers(place)
    place.partial.write_bytes(b"".join([b"mine\n", *lines, lines[0], lines[3], b"torn"]))
    warnings: list[str] = []
    summary = run_fake(source, place.output, on_warning=warnings.append)
    assert summary.resumed == len(lines)
    assert summary.damaged == 3
    assert summary.last_line().endswith("3 damaged ones answered again")
    assert f"(line 1, {len(lines) + 2}, {len(lines) + 3})" in warnings[0]
    assert place.output.read_bytes() == expected


def test_the_journal_is_whole_after_a_damaged_line_is_dropped(source, expected, place):
    """A further stop, or the end of a server's batch, finds answers alone."""
    lines = answers(place)
    place.partial.write_bytes(b"".join([*lines[:4], b"damaged\n", *lines[4:]]))

    class StopsAtOnce(FakeEngine):
        def finish(self, request):
            raise KeyboardInterrupt

    with pytest.raises(JobInterrupted):
        run_fake(source, place.output, StopsAtOnce(), on_warning=lambda warning: None)
    assert answers(place) == lines
    assert goes_on(source, place) == (len(lines), [])
    assert place.output.read_bytes() == expected


def test_answers_of_nobody_are_refused(source, place):
    place.partial.write_bytes(b"something\nelse\n")
    place.sums.unlink()
    with pytest.raises(JobError, match=r"partial has no result of this job: move the file away"):
        run_fake(source, place.output)
    assert place.partial.read_bytes() == b"something\nelse\n"


# ----------------------------------------------------------------------------- beside them


@pytest.mark.parametrize("damage", ["lost", "torn", "of an answer", "doubled"])
def test_damaged_checksums_cost_an_answer_at_most(source, expected, place, damage):
    before = len(answers(place))
    raw = place.sums.read_bytes()
    assert len(raw) == 8 * before
    wrong = bytes([raw[0] ^ 1]) + raw[1:8]
    changed = {
        "lost": b"",
        "torn": raw[:-3],
        "of an answer": wrong + raw[8:],
        "doubled": wrong + raw,  # as of a process that was killed before the answer
    }
    place.sums.write_bytes(changed[damage])
    resumed, warnings = goes_on(source, place)
    assert resumed == before - (damage == "of an answer")
    assert len(warnings) == (damage == "of an answer")
    assert place.output.read_bytes() == expected


@pytest.mark.parametrize(
    "content", [b"", b"{", b"5", b"[4, 7]", b'{"line_numbers": [1], "crc32": 1}']
)
def test_damaged_suspects_are_nobody(source, expected, place, content):
    class Dying(FakeEngine):
        def finish(self, request):
            raise EngineDiedError("gone", [one.request_id for one in self.seen])

    with pytest.raises(EngineDiedError):
        run_fake(source, place.output, Dying())
    assert len(place.read_suspects()) == 5
    place.suspects.write_bytes(content)
    assert place.read_suspects() == frozenset()
    goes_on(source, place)
    assert place.output.read_bytes() == expected
    assert len(results(place.output)) == 66
