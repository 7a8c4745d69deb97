"""What becomes of a stream whose client hangs up, at every moment."""

import asyncio

import pytest

from carryover.serving.responses import StreamAnswer

WORD = 'data: {"choices":[{"text":"a"}]}\n\n'
USAGE = 'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
DONE = "data: [DONE]\n\n"


class Call:
    """The parts of a call that an answer uses."""

    def __init__(self):
        self.usage, self.hides_usage, self.first, self.last = None, False, 1.0, 1.0
        self.outcomes = []

    def headers(self):
        return []

    def finish(self, outcome):
        self.outcomes.append(outcome)


class Stream:
    """An arm's chunks."""

    def __init__(self, chunks):
        self._chunks, self.cancelled = iter(chunks), False

    async def __anext__(self):
        try:
            return next(self._chunks)
        except StopIteration:
            raise StopAsyncIteration from None

    def cancel(self):
        self.cancelled = True


def answer(chunks, *, hang_up_after=None):
    """Send an answer; the client hangs up once it has read `hang_up_after`."""
    call, stream = Call(), Stream(chunks[1:])
    response = StreamAnswer(call, chunks[0], stream, stall_s=60, rename=None)
    sent = []

    async def send(message):
        sent.append(message.get("body", b"").decode())
        if hang_up_after is not None and hang_up_after in sent[-1]:
            # Ray Serve cancels the request's task.
            raise asyncio.CancelledError

    async def run():
        try:
            await response({}, None, send)
        except asyncio.CancelledError:
            assert hang_up_after is not None

    asyncio.run(run())
    return call, stream, "".join(sent)


def test_a_whole_stream():
    call, stream, sent = answer([WORD, WORD, USAGE, DONE])
    assert call.outcomes == ["ok"] and call.usage.output_tokens == 2
    assert sent == WORD + WORD + USAGE + DONE and not stream.cancelled


@pytest.mark.parametrize(
    "chunks", [[WORD, USAGE, DONE], [[WORD, USAGE], DONE], [[WORD, USAGE, DONE]]]
)
def test_a_client_that_hangs_up_at_the_end_has_its_whole_answer(chunks):
    call, _, _ = answer(chunks, hang_up_after="[DONE]")
    assert call.outcomes == ["ok"] and call.usage.output_tokens == 2


@pytest.mark.parametrize("chunks", [[WORD, WORD, USAGE, DONE], [WORD, [USAGE, DONE]]])
def test_a_client_that_hangs_up_before_has_the_arm_stopped(chunks):
    call, stream, _ = answer(chunks, hang_up_after='"text":"a"')
    assert call.outcomes == ["disconnected"] and stream.cancelled


def test_an_error_stays_one_whenever_the_client_hangs_up():
    error = 'data: {"error":{"message":"x","code":500}}\n\n'
    for hang_up_after in (None, "[DONE]"):
        call, _, _ = answer([WORD, error, DONE], hang_up_after=hang_up_after)
        assert call.outcomes == ["error"]
