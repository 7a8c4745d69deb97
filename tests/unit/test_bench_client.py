"""The client against a real HTTP server whose streams are known to the millisecond."""

import asyncio
import json

import pytest
from aiohttp import web

from carryover.bench.client import Sampling, ask, closed_loop, open_session

USAGE = {"prompt_tokens": 5, "completion_tokens": 9, "total_tokens": 14}
SPECULATIVE = {
    "num_spec_steps": 4, "num_draft_tokens": 12, "num_accepted_draft_tokens": 4,
    "acceptance_histogram": [1, 2, 1, 0],
}  # fmt: skip


def delta(text, finish=None):
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish}]}


def usage(metrics=None):
    return {"choices": [], "usage": USAGE, "metrics": metrics}


def serve(chunks, *, status=200, pause_s=0.0, seen=None, body=None, break_off=False):
    """Ask a server that streams `chunks` with a pause before each but the first."""

    async def handle(request):
        if seen is not None:
            seen.append(await request.json())
        if status != 200:
            return web.Response(status=status, text=body)
        answer = web.StreamResponse()
        await answer.prepare(request)
        for number, chunk in enumerate(chunks):
            if number:
                await asyncio.sleep(pause_s)
            await answer.write(f"data: {json.dumps(chunk)}\n\n".encode())
        if break_off:
            request.transport.close()
            return answer
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def main():
        application = web.Application()
        application.router.add_post("/v1/chat/completions", handle)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        try:
            async with open_session(timeout_s=1.0) as session:
                return await ask(
                    session, f"http://127.0.0.1:{port}", model="arm",
                    messages=[{"role": "user", "content": "hi"}],
                    sampling=Sampling(max_tokens=9, temperature=0.5),
                )  # fmt: skip
        finally:
            await runner.cleanup()

    return asyncio.run(main())


def test_a_stream_is_timed_by_its_token_chunks_and_counted_by_usage():
    seen = []
    answer = serve(
        [delta(""), delta("ab"), delta("cde", "length"),
         usage({"speculative_decoding": SPECULATIVE})],
        pause_s=0.05, seen=seen,
    )  # fmt: skip
    assert answer.error is None and answer.status == 200
    assert answer.text == "abcde" and answer.finish == "length"
    assert (answer.prompt_tokens, answer.output_tokens) == (5, 9)
    # two pauses lie between the first and the last token; the usage chunk's pause does not count
    assert 0.09 < answer.latency_s - answer.ttft_s < 0.14
    assert (answer.num_drafts, answer.num_draft_tokens, answer.num_accepted_tokens) == (4, 12, 4)
    assert answer.accepted_histogram == [1, 2, 1, 0]
    sent = seen[0]
    assert sent["model"] == "arm" and sent["stream"] and sent["temperature"] == 0.5
    assert sent["stream_options"] == {"include_usage": True}
    assert "seed" not in sent


def test_thinking_is_part_of_the_text():
    thought = {"choices": [{"delta": {"reasoning_content": "hm "}, "finish_reason": None}]}
    answer = serve([thought, delta("yes", "stop"), usage()])
    assert answer.text == "hm yes" and answer.error is None


def test_cached_tokens_are_kept_where_the_server_tells_them():
    told = {**usage(), "usage": {**USAGE, "prompt_tokens_details": {"cached_tokens": 4}}}
    assert serve([delta("a", "stop"), told]).cached_tokens == 4
    assert serve([delta("a", "stop"), usage()]).cached_tokens is None


def test_an_autoregressive_arm_has_no_rounds():
    answer = serve([delta("a", "stop"), usage({"speculative_decoding": None})])
    assert answer.error is None and answer.num_drafts == 0


@pytest.mark.parametrize(
    ("chunks", "options", "message"),
    [
        ([], {"status": 400, "body": '{"error": {"message": "too long"}}'}, "too long"),
        ([], {"status": 503, "body": "overloaded"}, "overloaded"),
        ([], {"status": 500, "body": ""}, "empty answer"),
        ([delta("a"), {"error": {"message": "engine died"}}], {}, "engine died"),
        ([delta("a")], {}, "before the response was finished"),
        ([usage()], {}, "held no token"),
        ([delta("a", "stop")], {}, "no usage"),
        ([delta("a"), delta("b", "stop")], {"pause_s": 2.0}, "timed out"),
        ([delta("a")], {"break_off": True}, ""),
    ],
)
def test_failures_are_kept_with_their_reason(chunks, options, message):
    answer = serve(chunks, **options)
    assert answer.error is not None and message in answer.error


def test_a_server_that_is_not_there_is_a_failure_without_a_status():
    async def main():
        async with open_session(timeout_s=1.0) as session:
            return await ask(
                session, "http://127.0.0.1:9", model="m", messages=[],
                sampling=Sampling(max_tokens=1, temperature=0.0),
            )  # fmt: skip

    answer = asyncio.run(main())
    assert answer.status is None and "Connect" in answer.error


def test_the_loop_keeps_exactly_the_concurrency():
    running, most, done = 0, 0, []

    async def task(number):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.002 * (number % 3))
        running -= 1
        done.append(number)

    tasks = [lambda number=number: task(number) for number in range(20)]
    wall_s = asyncio.run(closed_loop(tasks, concurrency=4))
    assert most == 4 and sorted(done) == list(range(20)) and wall_s > 0
