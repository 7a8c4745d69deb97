"""The OpenAI-compatible front of an application: which arm answers, and what is refused.

One request's way: key, size, JSON, limits and the arm (`_accept`), the arm's first byte or
another arm's (`dispatch`), the rest of the answer (`responses`).

Annotations are real objects here: FastAPI reads those of the routes.
"""

import asyncio
import gc
import logging
import random
import time
from typing import Any

from carryover.serving.admission import Gate, Health
from carryover.serving.answers import usage_of
from carryover.serving.call import Call
from carryover.serving.dispatch import FULL, Dispatcher
from carryover.serving.keys import KeyRing
from carryover.serving.link import ControlLink
from carryover.serving.openai_errors import ApiError
from carryover.serving.preload import without_gc
from carryover.serving.requests import (
    info_of,
    parse_object,
    read_body,
    request_id,
    validate,
)
from carryover.serving.responses import ErrorAnswer, JsonAnswer, StreamAnswer
from carryover.serving.routing import ARM_HEADER, Route, choose
from carryover.serving.settings import FrontSettings
from carryover.serving.shadow import Shadows
from carryover.serving.telemetry import Telemetry
from carryover.serving.traffic import initial_traffic
from carryover.serving.web import unexpected

# The ingress's process begins with importing this module.
with without_gc():
    from fastapi import Request
    from ray import serve
    from ray.llm._internal.serve.core.ingress.utils import _sanitize_chat_completion_request
    from ray.serve.llm.ingress import OpenAiIngress
    from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest
    from starlette.responses import JSONResponse, Response
    from vllm.entrypoints.generate.base.protocol import StreamOptions

# Below this, vLLM samples greedily and makes no random generator for the request.
_GREEDY_BELOW = 1e-5
_SHARED_METADATA = ("input_modality", "max_request_context_length")
_BODIES = {"chat": ChatCompletionRequest, "completions": CompletionRequest}
_LONGEST_LABEL = 64
# For the controller's first answer; it starts at the same time as the ingress.
_CONTROLLER_TIMEOUT_S = 60.0
_ADMIN_TIMEOUT_S = 60.0

logger = logging.getLogger("ray.serve")


class ArmIngress(OpenAiIngress):
    """Sends each request to an arm, and to another if that one cannot begin to answer."""

    def __init__(
        self,
        llm_deployments: dict[str, Any],
        model_cards: dict[str, Any],
        *,
        settings: FrontSettings,
        controller: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(llm_deployments, model_cards, **kwargs)
        self._settings, self._controller = settings, controller
        self._arms = tuple(model_cards)
        for arm, description in settings.described.items():
            self._model_cards[arm].metadata["carryover"] = description
        traffic, ingress = settings.traffic, settings.ingress
        self._keys = KeyRing(settings.keys, replicas=ingress.replicas)
        self._admin_keys = KeyRing(settings.admin_keys, required=True)
        self._gate = Gate(
            self._arms, limit=traffic.max_queue_per_arm, replicas=ingress.replicas
        )
        self._health = Health()
        self._telemetry = Telemetry()
        self._link = ControlLink(
            controller, initial_traffic(traffic), replica=_replica_id(),
            telemetry=self._telemetry, gate=self._gate, health=self._health,
        )  # fmt: skip
        self._dispatcher = Dispatcher(
            self._default_serve_handles, fallback=traffic.fallback,
            first_token_timeout_s=traffic.first_token_timeout_s,
            whole_timeout_s=ingress.request_timeout_s, replicas=settings.replicas,
            gate=self._gate, health=self._health, link=self._link,
        )  # fmt: skip
        self._shadows = Shadows(
            self._dispatcher.method, most=ingress.max_shadows, timeout_s=ingress.request_timeout_s
        )
        gc.freeze()

    async def reconfigure(self, user_config: dict[str, Any] | None) -> None:
        """Called by Ray Serve before the first request, and with every changed `user_config`.

        Raises:
            ValueError: the controller refuses the section; Serve shows the message.
        """
        await self._link.start(timeout_s=_CONTROLLER_TIMEOUT_S)
        section = (user_config or {}).get("traffic")
        if section and self._controller is not None:
            answer = await self._controller.reconfigure_traffic.remote(section)
            if "error" in answer:
                raise ValueError(f"user_config.traffic: {answer['error']['message']}")

    # Routes

    async def chat(self, request: Request) -> Response:
        """Answer a chat request on an arm."""
        return await self._answer("chat", request)

    async def completions(self, request: Request) -> Response:
        """Answer a completion request on an arm."""
        return await self._answer("completions", request)

    async def models(self, request: Request) -> Any:
        """All cards: the model's first, then the arms'."""
        self._check_key(request)
        cards = [self._logical_card(), *self._model_cards.values()]
        return JSONResponse(
            {"object": "list", "data": [card.model_dump(mode="json") for card in cards]}
        )

    async def model_data(self, model: str, request: Request) -> Any:
        """The card of an arm, or of the model that all arms serve."""
        self._check_key(request)
        card = self._logical_card() if model == self._settings.model else None
        card = card or self._model_cards.get(model)
        if card is None:
            raise self._no_model(model)
        return JSONResponse(card.model_dump(mode="json"))

    async def health(self) -> Response:
        """200 while some arm with weight answers, else 503; for load balancers."""
        weights, down = self._link.traffic.weights, self._health.down
        alive = [arm for arm, weight in weights.items() if weight > 0 and arm not in down]
        return JSONResponse(
            {"arms": {arm: "down" if arm in down else "up" for arm in self._arms}},
            status_code=200 if alive else 503,
        )

    async def admin_traffic(self, action: str, request: Request) -> Response:
        """Pass an admin's request on to the controller."""
        who = self._admin_keys.check(request.headers.get("authorization"))
        data = await read_body(request, most=self._settings.ingress.max_body_bytes)
        arguments = parse_object(data) if data.strip() else {}
        if self._controller is None:
            raise ApiError(503, "this application has no traffic controller")
        try:
            async with asyncio.timeout(_ADMIN_TIMEOUT_S):
                answer = await self._controller.admin.remote(action, arguments, who)
        except Exception as error:
            logger.warning("the traffic controller did not answer: %s", type(error).__name__)
            raise ApiError(
                503, "the traffic controller does not answer; arms go on with the last split",
                code="controller_unavailable", retry_after_s=2,
            ) from None  # fmt: skip
        status = answer["error"].get("code", 400) if "error" in answer else 200
        return JSONResponse(answer, status_code=status if isinstance(status, int) else 400)

    # One request

    async def _answer(self, kind: str, request: Request) -> Response:
        started = time.perf_counter()
        gate = self._gate
        gate.total += 1
        try:
            call = await self._accept(kind, request, started)
        except ApiError as error:
            gate.total -= 1
            return self._refuse(error)
        except Exception as error:
            gate.total -= 1
            return self._refuse(unexpected(error, request_id=request_id(request)))
        except BaseException:
            gate.total -= 1
            raise
        try:
            return self._respond(call, *await self._dispatcher.ask(call))
        except ApiError as error:
            return self._refuse(error)
        except Exception as error:
            call.finish("error")
            return self._refuse(unexpected(error, request_id=request_id(request)))

    async def _accept(self, kind: str, request: Request, started: float) -> Call:
        """Check a request and choose its arm.

        Raises:
            ApiError: it is not answered.
        """
        headers = request.headers
        if self._gate.total > self._gate.total_limit:
            raise FULL.error()
        self._check_key(request)
        settings = self._settings
        body = validate(
            _BODIES[kind],
            parse_object(await read_body(request, most=settings.ingress.max_body_bytes)),
        )
        if kind == "chat":
            body = _sanitize_chat_completion_request(body)
        self._check_limits(body)
        named = None if body.model in (None, settings.model) else body.model
        if named is not None and named not in self._model_cards:
            raise self._no_model(named)
        link, config = self._link, settings.traffic
        route = choose(
            link.traffic,
            arms=self._arms,
            named=named,
            header=headers.get(ARM_HEADER),
            allow_override=config.allow_override,
            key=headers.get(config.sticky_header) or getattr(body, "user", None) or None,
            uniform=random.random(),
        )
        body.request_id = name = request_id(request)
        label = headers.get(config.label_header)
        call = Call(
            kind=kind, body=body, info=info_of(request, name), route=route,
            label=None if label is None else label[:_LONGEST_LABEL], started=started,
            experiment=link.traffic.experiment, split=link.split, gate=self._gate,
            telemetry=self._telemetry,
        )  # fmt: skip
        if body.stream:
            # Usage and acceptance come with the last chunk, if it is asked for.
            options = body.stream_options
            if options is None or not options.include_usage:
                call.hides_usage = True
                body.stream_options = StreamOptions(include_usage=True)
        return call

    def _respond(self, call: Call, item: Any, stream: Any) -> Response:
        call.after = self._copy
        settings, route = self._settings, call.route
        if not call.body.stream:
            call.usage = usage_of(item)
            if route.reason != "model":
                item.model = settings.model
            return JsonAnswer(call, item.model_dump_json().encode())
        call.first = call.last = time.perf_counter()
        rename = None
        if route.reason != "model":
            rename = (f'"model":"{call.arm}"', f'"model":"{settings.model}"')
        return StreamAnswer(
            call, item, stream, stall_s=settings.ingress.request_timeout_s, rename=rename
        )

    def _copy(self, call: Call) -> None:
        """Send a copy of an answered request to the shadow arm, if there is one."""
        shadow = self._link.traffic.shadow
        if shadow is None or call.route.is_explicit or shadow.arm == call.arm:
            return
        if random.random() >= shadow.share:
            return
        if shadow.arm in self._health.down or self._gate.is_full(shadow.arm):
            self._shadows.left_out += 1
            return
        name = f"{call.body.request_id}-shadow"
        self._shadows.send(
            Call(
                kind=call.kind,
                body=call.body.model_copy(update={"model": shadow.arm, "request_id": name}),
                info=type(call.info)(headers={**call.info.headers, "x-request-id": name}),
                route=Route(shadow.arm, "shadow", call.route.unit),
                label=call.label, started=time.perf_counter(),
                experiment=self._link.traffic.experiment, split=self._link.split,
                gate=self._gate, telemetry=self._telemetry, shadow=True,
            )
        )  # fmt: skip

    # Small things

    def _check_key(self, request: Request) -> None:
        if self._keys.required:
            self._keys.check(
                request.headers.get("authorization"), revoked=self._link.revoked
            )

    def _check_limits(self, body: ChatCompletionRequest | CompletionRequest) -> None:
        """Refuse what the engine would not survive, or what the operator does not allow."""
        greedy = body.temperature is not None and body.temperature < _GREEDY_BELOW
        if body.seed is not None and not greedy and not self._settings.seeds:
            raise ApiError(
                400, f"seed {body.seed} with sampling is not supported: vLLM's CPU engine stops on "
                "a per-request seed; leave out seed, or set temperature to 0", param="seed",
            )  # fmt: skip
        name = "max_tokens"
        if getattr(body, "max_completion_tokens", None) is not None:
            name = "max_completion_tokens"
        asked, most = getattr(body, name), self._settings.ingress.max_tokens
        if asked is not None and asked < 0:
            raise ApiError(400, f"{name} must be at least 1, got {asked}", param=name)
        if most is None:
            return
        if asked is None:
            setattr(body, name, most // (body.n or 1) or 1)
        elif asked * (body.n or 1) > most:
            raise ApiError(
                400, f"{name} {asked} times n {body.n or 1} exceeds the {most} tokens that a "
                f"request may ask for here; lower it", param=name,
            )  # fmt: skip

    def _refuse(self, error: ApiError) -> Response:
        experiment = self._link.traffic.experiment
        self._telemetry.refuse(error.status, experiment=experiment)
        return ErrorAnswer(error, [(b"x-carryover-experiment", experiment.encode())])

    def _no_model(self, model: Any) -> ApiError:
        known = ", ".join((self._settings.model, *self._arms))
        return ApiError(
            404, f"no model {str(model)[:100]!r} here; models: {known}", param="model"
        )

    def _logical_card(self) -> Any:
        control = self._model_cards[self._settings.control]
        metadata = {
            key: control.metadata[key] for key in _SHARED_METADATA if key in control.metadata
        } | {
            "model_id": self._settings.model,
            "arms": list(self._arms),
            "experiment": self._link.traffic.experiment,
        }
        return control.model_copy(update={"id": self._settings.model, "metadata": metadata})


def _replica_id() -> str:
    try:
        return serve.get_replica_context().replica_id.unique_id
    except Exception:
        return "local"
