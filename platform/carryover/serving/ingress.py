"""The OpenAI-compatible front of an application: which arm answers, and what is refused.

Annotations are real objects here: FastAPI reads those of `chat` and `completions`.
"""

import gc
from typing import Any

from carryover.serving.preload import without_gc

# The ingress's process begins with importing this module.
with without_gc():
    from fastapi import Request
    from ray.serve.llm.ingress import OpenAiIngress
    from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest
    from starlette.responses import JSONResponse, Response

ARM_HEADER = "x-carryover-arm"
# Below this, vLLM samples greedily and makes no random generator for the request.
_GREEDY_BELOW = 1e-5
_SHARED_METADATA = ("input_modality", "max_request_context_length")


class ArmIngress(OpenAiIngress):
    """Sends each request to an arm: by the arm's name, or the control arm for the model's name.

    Args:
        model: the model name that clients ask for.
        control: arm that answers requests for `model`.
        seeds: whether the engines survive a per-request seed.
        described: by arm, what `/v1/models` tells about it.
    """

    def __init__(
        self,
        llm_deployments: dict[str, Any],
        model_cards: dict[str, Any],
        *,
        model: str,
        control: str,
        seeds: bool,
        described: dict[str, dict[str, Any]],
        **kwargs: Any,
    ) -> None:
        super().__init__(llm_deployments, model_cards, **kwargs)
        self._model = model
        self._control = control
        self._seeds = seeds
        for arm, description in described.items():
            self._model_cards[arm].metadata["carryover"] = description
        gc.freeze()

    async def model(self, model_id: str) -> Any:
        """The card of an arm, or of the model that all arms serve."""
        if model_id != self._model:
            return await super().model(model_id)
        control = self._model_cards[self._control]
        metadata = {key: control.metadata[key] for key in _SHARED_METADATA} | {
            "model_id": self._model,
            "arms": list(self._model_cards),
        }
        return control.model_copy(update={"id": self._model, "metadata": metadata})

    async def models(self) -> Any:
        """All cards: the model's first, then the arms'."""
        listed = await super().models()
        return listed.model_copy(update={"data": [await self.model(self._model), *listed.data]})

    async def chat(self, body: ChatCompletionRequest, request: Request) -> Response:
        """Answer a chat request on an arm."""
        refusal = self._refusal(body)
        if refusal is not None:
            return refusal
        body.model = self._choose_arm(body)
        return self._mark(await super().chat(body, request), body.model)

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """Answer a completion request on an arm."""
        refusal = self._refusal(body)
        if refusal is not None:
            return refusal
        body.model = self._choose_arm(body)
        return self._mark(await super().completions(body, request), body.model)

    def _choose_arm(self, body: ChatCompletionRequest | CompletionRequest) -> str | None:
        return self._control if body.model in (None, self._model) else body.model

    def _refusal(self, body: ChatCompletionRequest | CompletionRequest) -> Response | None:
        """The answer to a request that would end the engine, or None."""
        greedy = body.temperature is not None and body.temperature < _GREEDY_BELOW
        if body.seed is None or greedy or self._seeds:
            return None
        return refuse(
            f"seed {body.seed} with sampling is not supported: vLLM's CPU engine stops on a "
            "per-request seed; leave out seed, or set temperature to 0",
            param="seed",
        )

    @staticmethod
    def _mark(response: Response, arm: str) -> Response:
        response.headers[ARM_HEADER] = arm
        return response


def refuse(message: str, *, param: str | None = None, status: int = 400) -> Response:
    """An error in OpenAI's form."""
    error = {
        "message": message,
        "type": "invalid_request_error",
        "param": param,
        "code": status,
    }
    return JSONResponse({"error": error}, status_code=status)
