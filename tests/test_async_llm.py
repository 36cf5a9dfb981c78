"""Many callers of one engine: what they get is what `LLM.generate` gives."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import Counter

import pytest
from safetensors.torch import save_file

from onestem import LLM, AsyncLLM, EngineOptions, SamplingParams
from onestem.errors import ConfigError, OnestemError, RequestError, WeightsError
from onestem.request import Request, RequestOutput
from onestem.server.link.inbox import Inbox
from onestem.server.link.process import LOADER, EngineProcess
from tests.engine.tiny_tokenizers import make_byte_level_tokenizer
from tests.models.changed import changed_model, tensors_of
from tests.models.tiny import VOCAB_SIZE, make_tiny
from tests.server.harness import EngineThread

OPTIONS = {"dtype": "float32", "kv_memory": "8MiB", "seed": 0, "device": "cpu"}
LONG = SamplingParams(max_tokens=500, temperature=0, ignore_eos=True)
SHORT = LONG.replace(max_tokens=8)


@pytest.fixture(scope="module")
def other(model, tmp_path_factory):
    return changed_model(model, tmp_path_factory.mktemp("async") / "after")


@pytest.fixture(scope="module")
def llm(model):
    with LLM(model, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def fresh(other):
    with LLM(other, **OPTIONS) as llm:
        yield llm


def threaded(model, **changes) -> tuple[AsyncLLM, EngineThread]:
    """Its engine in a thread, which a test can look into."""
    options = EngineOptions(model=model, **OPTIONS, **changes)
    launcher = EngineThread(options, lambda llm: llm.engine.launcher.sampler.tell_ranks())
    return AsyncLLM.from_options(options, launcher), launcher


class Launched(EngineProcess):
    """Its process can be looked at."""

    async def launch(self):
        self.link = await super().launch()
        return self.link


async def whole(iterator):
    """The last of its outputs."""
    last = None
    async for output in iterator:
        last = output
    return last


def tokens(answer):
    return [one.token_ids for one in answer.outputs]


def test_fifty_callers_get_what_generate_gives(model, llm):
    prompts = [f"a prompt that many share, and number {i}" for i in range(50)]
    params = [
        SamplingParams(max_tokens=6, temperature=0.8, seed=i, n=i % 3 + 1, logprobs=i % 2 or None)
        for i in range(50)
    ]
    want = llm.generate(prompts, params)

    async def ask(served, i):
        kind = "delta" if i % 5 == 0 else "cumulative"
        answers = [one async for one in served.generate(prompts[i], params[i], output_kind=kind)]
        assert [one.finished for one in answers] == [False] * (len(answers) - 1) + [True]
        if kind == "cumulative":
            return answers[-1]
        joined = {}
        for answer in answers:
            for piece in answer.outputs:
                before = joined.setdefault(piece.index, piece)
                if before is not piece:
                    before.extend(piece)
        answers[-1].outputs = [joined[index] for index in sorted(joined)]
        return answers[-1]

    async def main():
        served, launcher = threaded(model)
        async with served:
            found = await asyncio.gather(*(ask(served, i) for i in range(50)))
            launcher.llms[0].engine.check()
        return found

    for found, one in zip(asyncio.run(main()), want, strict=True):
        assert found.prompt == one.prompt
        assert found.prompt_token_ids == one.prompt_token_ids
        assert tokens(found) == tokens(one)
        for a, b in zip(found.outputs, one.outputs, strict=True):
            assert (a.text, a.finish_reason, a.stop_reason) == (
                b.text,
                b.finish_reason,
                b.stop_reason,
            )
            assert a.weight_versions == [0] * len(a.token_ids)
            assert (a.logprobs is None) == (b.logprobs is None)
            for x, y in zip(a.logprobs or (), b.logprobs or (), strict=True):
                assert list(x) == list(y)
                assert [p.rank for p in x.values()] == [p.rank for p in y.values()]
                assert [p.decoded_token for p in x.values()] == [
                    p.decoded_token for p in y.values()
                ]
        assert found.metrics.num_output_tokens == one.metrics.num_output_tokens


def test_aborted_and_left_requests_end(model):
    async def main():
        served, launcher = threaded(model)
        async with served:
            stream = served.generate([5, 6], LONG, "mine")
            await anext(stream)
            running = asyncio.create_task(whole(stream))
            beside = served.generate([5, 7], LONG.replace(n=2))
            first = await anext(beside)
            assert not first.finished
            with pytest.raises(RequestError, match="request id 'mine' is in use"):
                await anext(served.generate([1], SHORT, "mine"))
            await served.abort(["mine", "unknown"])
            answer = await running
            assert answer.finished
            assert answer.outputs[0].finish_reason == "abort"
            assert 0 < len(answer.outputs[0].token_ids) < 500
            assert answer.reuse is not None
            await beside.aclose()
            task = asyncio.create_task(whole(served.generate([5, 8], LONG)))
            await anext(served.generate([5, 9], SHORT))
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await whole(served.generate([9], SHORT))
            assert await served.reset_prefix_cache() is True
            engine = launcher.llms[0].engine
            assert engine.num_running == engine.num_waiting == 0

    asyncio.run(main())


def test_a_request_id_is_free_when_its_stream_was_left(model, llm):
    """What comes of the request before is not the next one's."""

    async def main():
        served, _ = threaded(model)
        async with served:
            for i in range(24):
                async with contextlib.aclosing(served.generate([5, i], SHORT, "same")) as stream:
                    async for output in stream:
                        if len(output.outputs[0].token_ids) >= i % 9:
                            break
                found = output.outputs[0].token_ids
                whole_answer = llm.generate([[5, i]], SHORT)[0].outputs[0].token_ids
                assert found == whole_answer[: len(found)]
                assert len(found) >= i % 9

    asyncio.run(main())


def test_what_is_refused(model):
    async def main():
        served, _ = threaded(model)
        for prompt, params, reason in [
            ([999], SHORT, "prompt has token id 999"),
            ([], SHORT, "prompt is empty"),
            ("x", "hot", "sampling_params is 'hot', expected SamplingParams"),
            ({"text": "x"}, SHORT, "expected an object with prompt"),
            ([1], SHORT.replace(structured_outputs={"json": {"type": "any"}}), "any"),
        ]:
            with pytest.raises(RequestError, match=reason):
                await anext(served.generate(prompt, params))
        assert (await whole(served.generate("x", SHORT))).finished
        with pytest.raises(RequestError, match=r"pause mode is 'now', expected abort,"):
            await served.pause_generation("now")
        with pytest.raises(RequestError, match=r"wake_up tags are \['all'\]"):
            await served.wake_up(["all"])
        with pytest.raises(RequestError, match=r"sleep level is 7, expected 1 or 2"):
            await served.sleep(7)
        with pytest.raises(WeightsError, match="no place for: x"):
            await served.update_weights([("x", next(iter(tensors_of(model).values())))])
        stream = served.generate([3], LONG)
        await anext(stream)
        running = asyncio.create_task(whole(stream))
        await asyncio.sleep(0)  # it begins to wait
        await served.close()
        with pytest.raises(OnestemError, match=r"the AsyncLLM of .* was closed"):
            await running
        await served.close()
        with pytest.raises(ConfigError, match=r"the AsyncLLM of .* is closed: make another"):
            await anext(served.generate("x", SHORT))
        return served

    asyncio.run(main())


def check_crossed(answer, prompt, by_version):
    """Each part of an answer is what an LLM with its weights makes of all before it."""
    (one,) = answer.outputs
    assert len(one.weight_versions) == len(one.token_ids)
    for version in sorted(set(one.weight_versions)):
        at, count = one.weight_versions.index(version), one.weight_versions.count(version)
        begun = [*prompt, *one.token_ids[:at]]
        (want,) = by_version[version].generate([begun], SHORT.replace(max_tokens=count))
        assert want.outputs[0].token_ids == one.token_ids[at : at + count]


@pytest.mark.parametrize("where", ["thread", "process"])
def test_weights_change_while_requests_run(model, other, llm, fresh, where):
    """Paused, changed, and resumed: requests go on, and tell which weights each token is of."""
    prompts = [[5, 6, 7, 8], [5, 6, 7, 9, 10], [30, 31]]
    params = SHORT.replace(max_tokens=300)

    async def main():
        served = threaded(model)[0] if where == "thread" else AsyncLLM(model, **OPTIONS)
        async with served:
            streams = [served.generate(prompt, params) for prompt in prompts]
            for stream in streams:
                await anext(stream)
            tasks = [asyncio.create_task(whole(stream)) for stream in streams]
            await served.pause_generation("keep")
            assert await served.is_paused()
            late = asyncio.create_task(whole(served.generate([50, 51], SHORT)))
            assert await served.update_weights(tensors_of(other).items()) == 1
            await served.sleep(1)
            assert await served.is_sleeping()
            await served.wake_up(["weights"])
            await served.wake_up(["kv_cache"])
            assert not await served.is_sleeping()
            assert not any(task.done() for task in [*tasks, late])
            await served.resume_generation()
            answers = await asyncio.gather(*tasks, late)
            assert await served.update_weights(tensors_of(model).items(), version=9) == 9
            answers.append(await whole(served.generate([50, 51], SHORT)))
            assert served.weights_version == 9
            return answers

    answers = asyncio.run(main())
    by_version = {0: llm, 1: fresh, 9: llm}
    for answer, prompt in zip(answers, [*prompts, [50, 51], [50, 51]], strict=True):
        check_crossed(answer, prompt, by_version)
    assert all(set(answer.outputs[0].weight_versions) == {0, 1} for answer in answers[:3])
    assert [set(answer.outputs[0].weight_versions) for answer in answers[3:]] == [{1}, {9}]


def test_pausing_waits_for_requests_or_ends_them(model, llm):
    async def main():
        served, launcher = threaded(model)
        async with served:
            stream = served.generate([5, 6], SHORT)
            task = asyncio.create_task(whole(stream))
            while not any(one.is_sent for one in served._streams.values()):
                await asyncio.sleep(0)
            await served.pause_generation("wait")
            assert tokens(await task) == tokens(llm.generate([[5, 6]], SHORT)[0])
            assert launcher.llms[0].engine.cache.cached_tokens() == 0
            await served.resume_generation()
            stream = served.generate([5, 6], LONG)
            await anext(stream)
            task = asyncio.create_task(whole(stream))
            await served.pause_generation()
            assert (await task).outputs[0].finish_reason == "abort"
            await served.resume_generation()
            assert (await whole(served.generate([5], SHORT))).finished
            stream = served.generate([5, 6], SHORT)
            first = await anext(stream)  # and nobody reads the rest, if there is any
            await served.pause_generation("wait")
            await served.resume_generation()
            answer = await whole(stream) or first
            assert tokens(answer) == tokens(llm.generate([[5, 6]], SHORT)[0])

    asyncio.run(main())


def test_requests_that_were_not_sent_can_be_aborted(model, llm):
    """While the model is loaded, while generation is paused, and while the prompt is read."""

    async def main():
        served, launcher = threaded(model)
        early = asyncio.create_task(whole(served.generate("a text", SHORT, "early")))
        await asyncio.sleep(0)  # it begins
        await served.abort("early")
        ends = [await early]
        async with served:
            await served.pause_generation("keep")
            late = asyncio.create_task(whole(served.generate("a text", SHORT.replace(n=2), "late")))
            going = asyncio.create_task(whole(served.generate("a text", SHORT, "going")))
            while len(served._streams) < 2 or not served._streams["late"]._waiting:
                await asyncio.sleep(0)
            with pytest.raises(RequestError, match="request id 'late' is in use"):
                await anext(served.generate([1], SHORT, "late"))
            # Requests that wait because of a pause are none that a further pause waits for.
            await served.pause_generation("wait", clear_cache=False)
            await served.pause_generation("abort", clear_cache=False)
            await served.abort("late")
            ends.append(await late)
            await served.resume_generation()
            assert tokens(await going) == tokens(llm.generate("a text", SHORT)[0])
            assert set(launcher.finished) == {"going"}
        return ends

    for answer, number in zip(asyncio.run(main()), (1, 2), strict=True):
        assert answer.finished
        assert answer.prompt_token_ids == llm.generate("a text", SHORT)[0].prompt_token_ids
        reasons = [(one.finish_reason, one.token_ids) for one in answer.outputs]
        assert reasons == [("abort", [])] * number


def test_closing_while_the_model_is_loaded(model):
    async def main():
        served, _ = threaded(model)
        tasks = [
            asyncio.create_task(one)
            for one in (served.start(), whole(served.generate("a", SHORT, "waiting")))
        ]
        while "waiting" not in served._streams or not served._streams["waiting"]._waiting:
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # it begins to wait
        await served.close()
        return await asyncio.gather(*tasks, return_exceptions=True)

    for error in asyncio.run(main()):
        assert isinstance(error, ConfigError)
        assert "the engine was stopped while it loaded" in str(error)


def test_a_pause_that_failed_holds_nobody_up(model, llm):
    async def main():
        served, launcher = threaded(model)
        async with served:
            stream = served.generate([5, 6], LONG, "running")
            await anext(stream)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(served.pause_generation("wait"), 0.01)
            assert not await served.is_paused()
            await served.abort("running")
            assert (await whole(stream)).finished
            launcher.kill()
            while served.state == "running":
                await asyncio.sleep(0.001)
            with pytest.raises(OnestemError, match="the engine is down"):
                await served.pause_generation()
            answers = [await whole(served.generate([5], SHORT))]
            # A dead engine's successor goes on where that was ordered meanwhile.
            await served.pause_generation("keep")
            late = asyncio.create_task(whole(served.generate([5], SHORT)))
            launcher.kill()
            while served.state == "running":
                await asyncio.sleep(0.001)
            await served.resume_generation()
            answers.append(await late)
            # Who pauses twice, and gives up the second time, has paused once.
            await served.pause_generation()
            waiting = asyncio.create_task(whole(served.generate([5], SHORT)))
            again = asyncio.create_task(served.pause_generation("wait"))
            await asyncio.sleep(0)
            again.cancel()
            await asyncio.gather(again, return_exceptions=True)
            assert await served.is_paused()
            assert not waiting.done()
            await served.resume_generation()
            return [*answers, await waiting]

    want = tokens(llm.generate([[5]], SHORT)[0])
    assert [tokens(answer) for answer in asyncio.run(main())] == [want, want, want]


@pytest.mark.parametrize("state", ["asleep", "awake"])
def test_an_engine_that_dies_keeps_its_requests(model, llm, state):
    """Also those that wait until it is awake, and those whose grammar it has not compiled."""
    formed = SHORT.replace(response_format={"type": "regex", "regex": "[a-c]{4}"})

    async def main():
        served, launcher = threaded(model)
        async with served:
            stream = served.generate([5, 6], LONG)
            await anext(stream)
            if state == "asleep":
                await served.sleep()
            launcher.kill()
            while served.state == "running":
                await asyncio.sleep(0.001)
            running = asyncio.create_task(whole(stream))
            others = [] if state == "asleep" else [whole(served.generate([5], formed))]
            late = [asyncio.create_task(one) for one in others]
            if state == "asleep":
                with pytest.raises(RequestError, match="the LLM is asleep"):
                    await whole(served.generate([5], SHORT))
            while served.state != "running":
                await asyncio.sleep(0.001)
            if state == "asleep":
                assert await served.is_sleeping()
                with pytest.raises(RequestError, match="the LLM is asleep"):
                    await whole(served.generate([5], SHORT))
                await served.wake_up()
            return [tokens(await one) for one in (running, *late)]

    want = [llm.generate([[5, 6]], LONG), llm.generate([[5]], formed)]
    assert asyncio.run(main()) == [tokens(one[0]) for one in want[: 1 + (state == "awake")]]


def test_an_engine_that_dies_does_not_answer_with_the_checkpoints_weights(model, other, fresh):
    """It is started again, and has to be given the weights; before, what ran is answered anew."""

    async def main():
        served, launcher = threaded(model)
        async with served:
            stream = served.generate([5, 6], SHORT.replace(max_tokens=80))
            before = [await anext(stream)]
            launcher.kill()
            before += [one async for one in stream]
            await served.update_weights(tensors_of(other).items())
            stream = served.generate([5, 6], LONG)
            await anext(stream)
            launcher.kill()
            with pytest.raises(OnestemError, match="died and its updated weights are lost"):
                await whole(stream)
            while served.state != "running":
                await asyncio.sleep(0.01)
            with pytest.raises(RequestError, match="have no values yet for"):
                await whole(served.generate([5], SHORT))
            await served.update_weights(tensors_of(other).items())
            return before[-1], await whole(served.generate([5], SHORT)), served.weights_version

    first, last, version = asyncio.run(main())
    assert len(first.outputs[0].token_ids) == len(first.outputs[0].weight_versions) == 80
    assert tokens(last) == tokens(fresh.generate([[5]], SHORT)[0])
    assert last.outputs[0].weight_versions == [2] * 8
    assert version == 2


def test_quantised_weights_stay(model):
    """And an engine that is started again has them."""

    async def main():
        served, launcher = threaded(model, quantization="int8")
        async with served:
            before = await whole(served.generate([5, 6], SHORT))
            with pytest.raises(WeightsError, match="weights are int8, which cannot be written"):
                await served.update_weights(tensors_of(model).items())
            with pytest.raises(RequestError, match=r"level 2 .* int8 weights .*use level 1"):
                await served.sleep(2)
            launcher.kill()
            return before, await whole(served.generate([5, 6], SHORT))

    before, after = asyncio.run(main())
    assert tokens(before) == tokens(after)


def test_a_head_of_its_own_is_written(tmp_path):
    """Beside an embedding that the configuration calls tied."""
    path = make_tiny("qwen2", tmp_path / "tied")
    make_byte_level_tokenizer(path, vocab_size=VOCAB_SIZE)
    tensors = tensors_of(path)
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].flip(0)}
    save_file(tensors | head, path / "model.safetensors", {"format": "pt"})
    other = {"lm_head.weight": tensors["model.embed_tokens.weight"].roll(1, 0)}

    async def main():
        async with threaded(path)[0] as served:
            before = await whole(served.generate([5, 6], SHORT))
            await served.update_weights(other.items())
            return before, await whole(served.generate([5, 6], SHORT))

    before, after = asyncio.run(main())
    with LLM(path, **OPTIONS) as llm:
        assert tokens(before) == tokens(llm.generate([[5, 6]], SHORT)[0])
        llm.update_weights(other.items())
        assert tokens(after) == tokens(llm.generate([[5, 6]], SHORT)[0]) != tokens(before)


def test_one_event_loop(model):
    async def main():
        async with threaded(model)[0] as served:
            for late in (served.start, served.close):
                with pytest.raises(ConfigError, match="started in another event loop"):
                    await asyncio.to_thread(asyncio.run, late())
            assert (await whole(served.generate([5], SHORT))).finished

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the loop's own
def test_closing_behind_its_event_loop_ends_the_engine(model):
    launcher = Launched(EngineOptions(model=model, **OPTIONS), LOADER)
    served = AsyncLLM.from_options(EngineOptions(model=model, **OPTIONS), launcher)
    asyncio.run(served.start())
    asyncio.run(served.close())
    assert launcher.link.process.wait(20) is not None
    del served, launcher
    gc.collect()  # the warning is of this test


def test_nothing_of_an_answer_outlives_its_reader(model):
    """Without the collector of cycles: read, left, and refused."""

    async def calls(llm: AsyncLLM) -> None:
        await whole(llm.generate("abc", SHORT.replace(n=2, logprobs=2)))
        left = llm.generate("abc", LONG)
        await anext(left)
        await left.aclose()
        with contextlib.suppress(RequestError):
            await whole(llm.generate("a" * 100_000, SHORT))
        while llm._client.requests.num_aborted:  # the engine has not ended one that was left
            await asyncio.sleep(0)

    async def main() -> None:
        llm, _ = threaded(model)
        async with llm:
            await calls(llm)
            gc.collect()
            gc.disable()
            try:
                before = kept()
                for _ in range(3):
                    await calls(llm)
                # One may be in a local variable of the engine's thread.
                assert max((kept() - before).values(), default=0) < 3
            finally:
                gc.enable()

    def kept() -> Counter[str]:
        kinds = (Inbox, Request, RequestOutput, RequestError, asyncio.Task)
        return Counter(type(one).__name__ for one in gc.get_objects() if type(one) in kinds)

    asyncio.run(main())


def test_what_was_handed_out_does_not_grow(model):
    async def main():
        served, _ = threaded(model)
        async with served:
            answers = served.generate("abc", SHORT.replace(logprobs=1))
            return [(one, [*one.outputs[0].token_ids]) async for one in answers]

    for answer, ids in asyncio.run(main()):
        (one,) = answer.outputs
        assert one.token_ids == ids
        assert len(one.logprobs) == len(one.weight_versions) == len(ids)
