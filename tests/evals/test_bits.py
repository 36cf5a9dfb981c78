"""`onestem check-bits`: what changes a bit is found and named, and nothing passes without hits."""

from __future__ import annotations

import json
import math
import socket
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from onestem.cli.app import app
from onestem.errors import ConfigError, OnestemError
from onestem.evals.bits.engine import EngineBits
from onestem.evals.bits.pairs import Kind, Reply
from onestem.evals.bits.watch import first_change, watch_operations
from onestem.llm import LLM
from onestem.options import EngineOptions
from onestem.request import SamplingParams
from tests.models.tiny import make_tiny

TOKENS = 6


class Fake:
    """A server whose answers follow from the prompt.

    Args:
        flips: after a hit the fourth token's log-probability is the next number.
        other: after a hit the fourth token is another.
        hits: what `usage` says of a prompt that came before; None: nothing.
        metrics: whether vLLM's count of hits is there.
        form: of log-probabilities: `completions`, `chat` (llama.cpp's), or one that is not.
    """

    def __init__(self, *, flips=False, other=False, hits=32, metrics=False, form="completions"):
        self.flips, self.other, self.hits, self.metrics = flips, other, hits, metrics
        self.form = form
        self.seen: Counter[str] = Counter()

    def answer(self, body: dict) -> dict:
        again = self.seen[body["prompt"]] > 0
        self.seen[body["prompt"]] += 1
        rng = Random(f"{body['prompt']} {body['temperature']} {body['seed']}")
        tokens = [f"t{rng.randrange(100)}" for _ in range(TOKENS)]
        own = [-rng.random() for _ in tokens]
        if again and self.flips:
            own[3] = math.nextafter(own[3], 0)
        if again and self.other:
            tokens[3] = "other"
        top = [{"else": -3.0} for _ in tokens]
        forms = {
            "completions": {"tokens": tokens, "token_logprobs": own, "top_logprobs": top},
            "chat": {
                "content": [
                    {"token": t, "logprob": p, "top_logprobs": [{"token": "else", "logprob": -3.0}]}
                    for t, p in zip(tokens, own, strict=True)
                ]
            },
        }
        details = {"cached_tokens": self.hits * again} if self.hits is not None else None
        forms |= {
            "empty": {"tokens": [], "token_logprobs": [], "top_logprobs": []},
            "short": {**forms["completions"], "top_logprobs": top[1:]},
            "words": {"content": tokens},
        }
        choice = {"text": "".join(tokens), "logprobs": forms.get(self.form)}
        return {"choices": [choice], "usage": {"prompt_tokens_details": details}}

    def __enter__(self) -> str:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                hits = 16 * (fake.seen.total() - len(fake.seen))
                pages = {"/v1/models": json.dumps({"data": [{"id": "fake"}]})}
                if fake.metrics:
                    pages["/metrics"] = f'vllm:prefix_cache_hits_total{{engine="0"}} {hits}.0\n'
                self.reply(pages.get(self.path))

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.reply(json.dumps(fake.answer(body)))

            def reply(self, text):
                self.send_response(404 if text is None else 200)
                self.end_headers()
                self.wfile.write((text or "nothing is here").encode())

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever).start()
        return f"http://127.0.0.1:{self.http.server_port}/v1"

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()


def typed(*args) -> tuple[int, str, dict]:
    """Exit code, output and figures of the verb."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        done = CliRunner().invoke(app, ["check-bits", *map(str, args), "--json", str(file)])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done.exit_code, done.output, json.loads(file.read_text())


SIZES = ("--prompts", 5, "--tokens", 64, "--max-tokens", TOKENS)


@pytest.mark.parametrize("form", ["completions", "chat"])
def test_a_server_that_keeps_its_bits_passes(form):
    with Fake(form=form) as url:
        code, output, found = typed("--url", url, *SIZES)
    assert code == 0, output
    assert found["passes"]
    assert found["model"] == "fake"
    for kind in found["kinds"]:
        assert kind["pairs"] == 5
        assert kind["positions"] == 5 * TOKENS
        assert kind["cached"] == 5 * 32
        assert kind["changed"] == kind["differ"] == kind["largest"] == 0


@pytest.mark.parametrize("form", ["completions", "chat"])
def test_a_bit_that_flips_after_a_hit_is_found(form):
    with Fake(flips=True, form=form) as url:
        code, output, found = typed("--url", url, *SIZES)
    assert code == 1
    assert not found["passes"]
    for kind in found["kinds"]:
        assert kind["changed"] == 5
        assert kind["positions"] == 5 * TOKENS
        assert kind["differ"] == 0
        assert 0 < kind["largest"] < 1e-15
    assert output.count("differs") == 4  # as it is tried, and in the table


def test_positions_count_up_to_the_first_other_token():
    with Fake(other=True) as url:
        code, _, found = typed("--url", url, *SIZES)
    assert code == 1
    for kind in found["kinds"]:
        assert kind["differ"] == kind["changed"] == 5
        assert kind["positions"] == 5 * 4


@pytest.mark.parametrize(
    ("hits", "told"),
    [(0, "nothing was cached: not shown"), (None, "hits are not known: not shown")],
)
def test_without_hits_nothing_passes(hits, told):
    with Fake(hits=hits) as url:
        code, output, found = typed("--url", url, *SIZES)
    assert code == 1
    assert not found["passes"]
    assert output.count(told) == 4


def test_hits_come_from_metrics_where_answers_say_nothing():
    with Fake(hits=None, metrics=True) as url:
        code, output, found = typed("--url", url, *SIZES)
    assert code == 0, output
    assert [kind["cached"] for kind in found["kinds"]] == [5 * 16, 5 * 16]


def test_what_cannot_be_asked_is_refused():
    with Fake(form="none") as url:
        with pytest.raises(OnestemError, match="it must give logprobs"):
            typed("--url", url, *SIZES)
        with pytest.raises(ConfigError, match="--page-size is of this engine"):
            typed("--url", url, "--page-size", 32)
    with pytest.raises(OnestemError, match="/v1/models does not answer"):
        typed("--url", url, *SIZES)


@pytest.mark.parametrize("form", ["short", "words"])
def test_an_answer_of_another_form_is_refused(form):
    with Fake(form=form) as url, pytest.raises(OnestemError, match="is not one of completions"):
        typed("--url", url, *SIZES)


def test_answers_of_no_token_show_nothing():
    with Fake(form="empty") as url:
        code, output, _ = typed("--url", url, *SIZES)
    assert code == 1
    assert output.count("nothing was compared: not shown") == 4


def test_a_server_of_another_protocol_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet():
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"220 ready\r\n")

        threading.Thread(target=greet).start()
        with pytest.raises(OnestemError, match="does not answer"):
            typed("--url", f"http://127.0.0.1:{server.getsockname()[1]}/v1", *SIZES)


def test_a_place_for_figures_is_found_first(tmp_path):
    file = tmp_path / "none" / "found.json"
    with pytest.raises(OnestemError, match="none does not exist: make it first"):
        CliRunner().invoke(
            app, ["check-bits", "nothing", "--json", str(file)], catch_exceptions=False
        )


def test_whole_rows_count_where_log_probabilities_are_equal():
    kind = Kind("x")
    kind.compare(0, Reply([1], [{1: 0.0}], [b"a"]), Reply([1], [{1: 0.0}], [b"a"]))
    kind.compare(7, Reply([1], [{1: 0.0}], [b"a"]), Reply([1], [{1: 0.0}], [b"b"]))
    assert (kind.pairs, kind.differ, kind.positions, kind.changed) == (2, 0, 2, 1)
    assert kind.first == 7


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> EngineOptions:
    path = make_tiny("llama", tmp_path_factory.mktemp("bits") / "llama")
    return EngineOptions(path, device="cpu", dtype="float32", kv_memory="16MiB")


def test_this_engine_is_asked_in_every_way(options):
    bits = EngineBits(options, prompts=4, tokens=40, sampled=TOKENS)
    kinds = {kind.name: kind for kind in bits.kinds()}
    again = kinds["alone again"]
    assert (again.problem, again.pairs, again.positions) == ("", 4, 4 * TOKENS)
    assert kinds["cached prefix"].cached == 10 + 20 + 30 + 39
    assert kinds["goes on, cold"].positions == 2 * (TOKENS // 2)
    assert kinds["goes on, cached"].cached == 2 * (40 + TOKENS // 2 - 1)
    assert kinds["neighbours"].cached == 3 * 30
    assert kinds["neighbours, cached"].cached == 4 * 39
    assert kinds["n = 4"].pairs == 2 * 4 + 2
    assert kinds["preempted"].preempted > 0
    assert kinds["share off"].cached == 0
    assert all(kind.pairs and not kind.refused for kind in kinds.values())
    assert {kind.problem for kind in kinds.values()} <= {"", "differs"}
    for kind in kinds.values():
        if kind.first is not None:
            assert bits.explain(kind) is not None
            break


@pytest.mark.parametrize("family", ["llama", "qwen3_next_dense"])
def test_an_engine_that_keeps_bits_passes(tmp_path, options, family):
    strict = options.replace(model=make_tiny(family, tmp_path / family), deterministic=True)
    bits = EngineBits(strict, prompts=4, tokens=40, sampled=TOKENS)
    assert {kind.problem or kind.refused for kind in bits.kinds()} == {""}


def test_an_engine_that_caches_nothing_does_not_pass(options):
    bits = EngineBits(options.replace(share="off"), prompts=4, tokens=40, sampled=2)
    told = {kind.name: kind.problem for kind in bits.kinds()}
    assert told["cached prefix"] == "nothing was cached: not shown"


@pytest.mark.parametrize("kept", [{"host_kv": "1MiB"}, {"disk_kv": "kept"}])
def test_what_keeps_prefixes_elsewhere_is_refused(options, kept):
    (name,) = kept
    with pytest.raises(ConfigError, match=f"{name} keeps prefixes"):
        EngineBits(options.replace(**kept), prompts=4, tokens=40, sampled=2)


def test_each_row_is_watched_of_prompts_and_of_answers(options):
    ids = list(range(5, 45))
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    with LLM.from_options(options) as llm:
        (alone,) = llm.generate([ids], params)
        tokens = [*ids, *alone.outputs[0].token_ids]
        llm.reset_prefix_cache()
        found = watch_operations(llm.engine, tokens)
        again, _ = llm.generate([ids, [*ids[:20], 7, 8]], params)
    assert again.outputs[0].token_ids == alone.outputs[0].token_ids
    layers = {name: sorted(rows) for (_, name), rows in found.items()}
    assert layers["layer 0: attention"] == list(range(len(tokens) - 1))
    assert layers["layer 1: MLP"] == list(range(len(ids) - 1, len(tokens) - 1))
    assert all(len(digests) == 1 for rows in found.values() for digests in rows.values())


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("embed_tokens", "layer 0: embedding"),
        ("layers.0.linear_attn.in_proj_b", "layer 0: product after the delta rule"),
        ("layers.2.mlp.down_proj", "layer 2: MLP"),
        ("layers.3.self_attn.o_proj", "layer 3: product after attention"),
    ],
)
def test_operations_beside_states_are_named(tmp_path, name, operation):
    """Some rows below a snapshot are computed again, for the state alone."""
    path = make_tiny("qwen3_5", tmp_path / "tiny")
    weights = load_file(path / "model.safetensors")
    (name,) = (key for key in weights if f"{name}.weight" in key)
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    ids, found = list(range(5, 85)), []
    for factor in (1, 2):
        with LLM(path, device="cpu", dtype="float32", kv_memory="16MiB") as llm:
            llm.update_weights([(name, factor * weights[name])])
            seen = watch_operations(llm.engine, ids)
            for prompt in ([*ids[:50], 7], [*ids[:60], 8], ids):
                llm.generate([prompt], params)
            found.append(seen)
    named = first_change(*found)
    assert named is not None
    assert named[0] == operation


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("model.embed_tokens.weight", "layer 0: embedding"),
        ("model.layers.0.input_layernorm.weight", "layer 0: norm"),
        ("model.layers.0.self_attn.v_proj.weight", "layer 0: product of queries, keys and values"),
        ("model.layers.0.self_attn.o_proj.weight", "layer 0: product after attention"),
        ("model.layers.1.self_attn.q_proj.weight", "layer 1: product of queries, keys and values"),
        ("model.layers.1.mlp.down_proj.weight", "layer 1: MLP"),
        ("model.norm.weight", "layer 2: norm"),
    ],
)
def test_the_first_operation_with_other_bits_is_named(options, name, operation):
    """Weights of one tensor are doubled."""
    ids = list(range(5, 45))
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    weights = load_file(f"{options.model}/model.safetensors")
    found = []
    for factor in (1, 2):
        with LLM.from_options(options) as llm:
            llm.update_weights([(name, factor * weights[name])])
            seen = watch_operations(llm.engine, ids)
            # Neighbours whose rows are not compared, and one whose first rows are.
            llm.generate([ids, [9, *ids], [*ids[:20], 7, 8]], params)
            found.append(seen)
    assert first_change(found[0], found[0]) is None
    named = first_change(*found)
    assert named is not None
    assert named[0] == operation
