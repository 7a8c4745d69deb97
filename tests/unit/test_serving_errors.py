"""Errors in OpenAI's form, and what is read from vLLM's answers."""

import json
from types import SimpleNamespace

import pytest
from pydantic import BaseModel

from carryover.serving.answers import (
    is_error,
    is_usage,
    read_problem,
    read_refusal,
    read_usage,
)
from carryover.serving.openai_errors import ApiError, from_engine
from carryover.serving.requests import parse_object, validate

SECRET = "a secret prompt"


class Body(BaseModel):
    messages: list[str] | str
    max_tokens: int = 1


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b'"text"', b"[]", b"null", b"1", b"[" * 9999])
def test_what_is_no_json_object_is_refused(data):
    with pytest.raises(ApiError) as caught:
        parse_object(data)
    assert caught.value.status == 400 and caught.value.code == "invalid_json"


def test_a_refusal_names_the_field_and_keeps_its_value_to_itself():
    with pytest.raises(ApiError) as caught:
        validate(Body, {"messages": [SECRET], "max_tokens": SECRET})
    assert caught.value.param == "max_tokens" and caught.value.status == 400
    assert SECRET not in caught.value.body().decode()
    with pytest.raises(ApiError) as caught:
        validate(Body, {"messages": {SECRET: 1}})
    assert caught.value.param.startswith("messages") and SECRET not in str(caught.value.content())


def test_an_event_ends_a_stream_as_openais_clients_expect():
    error = ApiError(502, "gone")
    first, second, rest = error.event().decode().split("\n\n")
    assert json.loads(first.removeprefix("data: ")) == error.content()
    assert second == "data: [DONE]" and not rest
    assert error.content()["error"]["type"] == "server_error"


def test_retry_after_is_whole_seconds_and_at_least_one():
    assert ApiError(503, "x", retry_after_s=0.2).headers() == {"retry-after": "1"}
    assert ApiError(429, "x", retry_after_s=7.6).headers() == {"retry-after": "8"}
    assert ApiError(400, "x").headers() == {}


def engine_error(code, message="no"):
    return SimpleNamespace(code=code, message=message, param=None)


def test_engine_errors_become_what_they_mean():
    too_long = from_engine(engine_error(400, "This model's maximum context length is 9 tokens."))
    assert too_long.status == 413 and too_long.code == "context_length_exceeded"
    assert from_engine(engine_error(400)).status == 400
    inside = from_engine(engine_error(500, "Traceback ... /usr/lib/secret.py"))
    assert inside.status == 500 and "secret" not in inside.message
    assert from_engine(engine_error("odd")).status == 500


def test_the_last_chunk_is_told_from_text_that_looks_like_it():
    usage = {"prompt_tokens": 5, "completion_tokens": 9}
    drafts = {
        "acceptance_histogram": [1, 0, 2, 1], "num_spec_steps": 4,
        "num_accepted_draft_tokens": 7, "num_draft_tokens": 12,
    }  # fmt: skip
    last = {"choices": [], "usage": usage, "metrics": {"speculative_decoding": drafts}}
    chunk = f"data: {json.dumps(last, separators=(',', ':'))}\n\n"
    assert is_usage(chunk)
    found = read_usage(chunk)
    assert (found.prompt_tokens, found.output_tokens) == (5, 9)
    assert (found.rounds, found.accepted, found.proposed) == (4, 7, 12)
    # rounds that accepted at least 1, 2, 3; they sum to what was accepted
    assert found.accepted_per_position == (3, 3, 1) and sum(found.accepted_per_position) == 7
    text = {"choices": [{"delta": {"content": '"choices":[] and data: {"error"'}}]}
    chunk = f"data: {json.dumps(text, separators=(',', ':'))}\n\n"
    assert not is_usage(chunk) and not is_error(chunk)
    plain = read_usage('data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}\n\n')
    assert plain.rounds == 0 and plain.accepted_per_position == ()


def test_an_error_chunk_is_a_refusal_and_text_is_not():
    chunk = 'data: {"error": {"message": "too much", "type": "x", "param": null, "code": 400}}\n\n'
    assert read_refusal([chunk]).status == 400
    assert read_refusal(['data: {"choices":[]}\n\n']) is None


def test_both_of_rays_error_classes_are_refusals_and_no_answer_is():
    from ray.llm._internal.serve.core.configs import openai_api_models as inner
    from ray.serve.llm import openai_api_models as outer

    from carryover.bench.stub_engine import StubServer

    error = {"message": "no", "type": "x", "code": 404}
    for models in (inner, outer):
        assert read_refusal(models.ErrorResponse(error=error)).status == 404
        assert read_refusal([models.ErrorResponse(error=error)]).status == 404
    request = SimpleNamespace(request_id="1")
    for chat in (True, False):
        assert read_refusal(StubServer("a")._whole(request, 3, chat=chat)) is None


def test_exceptions_say_what_is_wrong_with_the_arm_if_anything():
    from ray.exceptions import ActorDiedError, RayTaskError
    from ray.serve.exceptions import BackPressureError

    class EngineDeadError(Exception):
        pass

    def raised(error):
        return RayTaskError("f", "Traceback", error)

    assert read_problem(ActorDiedError()).definite
    assert read_problem(TimeoutError()).why == "slow"
    assert read_problem(BackPressureError(num_queued_requests=1, max_queued_requests=1)).why == (
        "overloaded"
    )
    assert read_problem(raised(EngineDeadError())).why == "down"
    broken = read_problem(raised(KeyError(SECRET)))
    assert broken.why == "failed" and not broken.definite and SECRET not in broken.text
    assert read_problem(KeyError("ours")) is None
    assert {read_problem(TimeoutError()).error().status, broken.error().status} == {504, 502}
