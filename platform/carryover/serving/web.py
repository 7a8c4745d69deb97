"""The HTTP routes of the ingress, and the form of every error on them."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Sequence

from carryover.serving.openai_errors import ApiError
from carryover.serving.preload import without_gc
from carryover.serving.responses import ErrorAnswer

with without_gc():
    from fastapi import FastAPI, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.middleware.cors import CORSMiddleware
    from ray.serve.llm.ingress import make_fastapi_ingress
    from starlette.exceptions import HTTPException
    from starlette.responses import Response

logger = logging.getLogger("ray.serve")

# Method of the ingress class, by route.
ROUTES: dict[str, Callable[[FastAPI], Callable]] = {
    "models": lambda app: app.get("/v1/models"),
    "model_data": lambda app: app.get("/v1/models/{model:path}"),
    "chat": lambda app: app.post("/v1/chat/completions"),
    "completions": lambda app: app.post("/v1/completions"),
    "health": lambda app: app.get("/health"),
    "admin_traffic": lambda app: app.post("/admin/traffic/{action}"),
}


def with_routes(ingress: type, *, allowed_origins: Sequence[str] = ()) -> type:
    """The ingress class as Ray Serve deploys it.

    Args:
        ingress: a subclass of `OpenAiIngress` with a method for each of `ROUTES`.
        allowed_origins: web pages that may ask from a browser.
    """
    app = FastAPI(title="Carryover", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(HTTPException, _not_routed)
    app.add_exception_handler(RequestValidationError, _not_valid)
    if allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(allowed_origins), allow_methods=["*"],
            allow_headers=["*"], expose_headers=["*"],
        )  # fmt: skip
    return make_fastapi_ingress(ingress, endpoint_map=ROUTES, app=app)


def unexpected(error: Exception, *, request_id: str) -> ApiError:
    """The answer to a fault of ours; the log gets where it was, and nothing of the request."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    logger.error("request %s failed with %s at\n%s", request_id, type(error).__name__, frames)
    return ApiError(500, f"internal error; tell the operator the request's id, {request_id}")


async def _refused(request: Request, error: ApiError) -> Response:
    return ErrorAnswer(error)


async def _not_routed(request: Request, error: HTTPException) -> Response:
    if error.status_code == 404:
        return ErrorAnswer(ApiError(404, "no such path here", code="path_not_found"))
    return ErrorAnswer(
        ApiError(error.status_code, f"{request.method} is not allowed here", code="not_allowed")
    )


async def _not_valid(request: Request, error: RequestValidationError) -> Response:
    return ErrorAnswer(ApiError(400, "the request is not valid"))
