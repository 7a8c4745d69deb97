"""Responses of a target to prompts: which requests to make, and what to keep of the answers.

Pure bookkeeping: `Regeneration` hands out requests and takes completions; `jobs.regenerate` runs
them. Prompts are rendered with the target's chat template once, and the engine gets token ids, so
that what is stored is what the engine read and wrote.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from carryover.config import Config
from carryover.data.duplicates import normalise
from carryover.data.prompts import Prompt, PromptSource, read_prompts
from carryover.data.responses import RESPONSES
from carryover.data.store import RowStore, read_store
from carryover.engine import EngineConfig, PoolConfig
from carryover.engine_worker import Completion, Request
from carryover.errors import DataError, TargetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RegenerateConfig(Config):
    """Settings of `platform data regenerate`."""

    target: str = "embedded"
    prompts: list[PromptSource] = Field(
        default_factory=lambda: [PromptSource(path="runs/data/prompts")], min_length=1
    )
    exclude: list[str] = Field(
        default_factory=list,
        description="prompts files (such as those for evaluation) whose prompts are left out",
    )
    out: str = Field("runs/data/responses", description="folder; run again to resume or extend")
    temperatures: list[float] = Field(
        default=[0.0, 0.8], min_length=1, description="taken in turn by prompt id; repeat to weigh"
    )
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, description="0 keeps all tokens")
    max_new_tokens: int = Field(256, ge=1, description="responses are cut there")
    max_turns: int = Field(
        1, ge=1, description="user turns of a conversation that are answered, one row each"
    )
    system_prompt: str | None = Field(None, description="for prompts that bring none")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="such as enable_thinking: false for Qwen3"
    )
    engine: EngineConfig = EngineConfig()
    pool: PoolConfig = PoolConfig()

    @model_validator(mode="after")
    def _fits(self) -> RegenerateConfig:
        if self.max_new_tokens >= self.engine.max_model_len:
            raise ValueError(
                f"max_new_tokens {self.max_new_tokens} leaves no room for a prompt in "
                f"engine.max_model_len {self.engine.max_model_len}; raise the latter"
            )
        if any(not 0 <= temperature <= 2 for temperature in self.temperatures):
            raise ValueError(f"temperatures lie between 0 and 2, got {self.temperatures}")
        return self

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt that leaves room for a whole response."""
        return self.engine.max_model_len - self.max_new_tokens

    def sampling(self) -> dict[str, Any]:
        """What decides which response a prompt gets; others do not mix in one folder."""
        names = ("temperatures", "top_p", "top_k", "max_new_tokens", "max_turns", "system_prompt")
        return self.model_dump(mode="json", include={*names, "chat_template_kwargs"})


@dataclass
class Counts:
    """What became of the rows so far.

    Attributes:
        stored: in the folder before this run.
        done: added by this run.
        cut: of those, ended by the length limit.
        too_long: prompts that leave no room for a response.
        excluded: prompts that are in an excluded file.
        refused: requests that the engine refused.
        response_tokens: of the rows that this run added.
        prompt_tokens: of the rows that this run added.
    """

    stored: int = 0
    done: int = 0
    cut: int = 0
    too_long: int = 0
    excluded: int = 0
    refused: int = 0
    response_tokens: int = 0
    prompt_tokens: int = 0


@dataclass
class _Conversation:
    prompt: Prompt
    temperature: float
    replies: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)


class Regeneration:
    """Hands out requests for the prompts that have no response yet, and stores the answers.

    The row of turn t of prompt p has the id `p * max_turns + t`, so that with one turn it is the
    prompt's. Rows of one conversation are stored together when its last turn is answered.

    Args:
        config: settings.
        prompts: with unique ids.
        tokenizer: the target's.
        store: where responses go; ids that it holds are not asked again.

    Attributes:
        counts: what became of the rows.
        first_refusal: why the engine refused a request, if it did.

    Raises:
        DataError: an excluded file cannot be read.
    """

    def __init__(
        self,
        config: RegenerateConfig,
        prompts: Sequence[Prompt],
        tokenizer: PreTrainedTokenizerBase,
        store: RowStore,
    ) -> None:
        self.config = config
        self.counts = Counts()
        self.first_refusal = ""
        self._tokenizer = tokenizer
        self._store = store
        excluded = {
            normalise(turn)
            for path in config.exclude
            for prompt in read_prompts(path)
            for turn in prompt.turns
        }
        self._prompts = [p for p in prompts if normalise(p.turns[0]) not in excluded]
        self.counts.excluded = len(prompts) - len(self._prompts)
        self.counts.stored = sum(
            self._row_id(prompt, turn) in store.ids
            for prompt in self._prompts
            for turn in range(self._num_turns(prompt))
        )
        self._stored = _StoredPrompts(store, tokenizer) if self.counts.stored else None
        self._conversations: dict[int, _Conversation] = {}
        self._asked = 0
        self._asked_tokens = 0

    @property
    def mean_prompt_tokens(self) -> float:
        """Length of the prompts asked so far."""
        return self._asked_tokens / max(1, self._asked)

    @property
    def total(self) -> int:
        """Rows that there will be at most, those stored before included."""
        return sum(map(self._num_turns, self._prompts)) - self.counts.too_long - self.counts.refused

    @property
    def left(self) -> int:
        """Rows still to come at most."""
        return self.total - self.counts.stored - self.counts.done

    def requests(self) -> Iterator[Request]:
        """First turns of the prompts that have no response yet.

        Raises:
            DataError: the folder has a response to another prompt under one of the ids.
        """
        for prompt in self._prompts:
            first = self._row_id(prompt, 0)
            prompt_ids = self._render(prompt, [])
            if first in self._store.ids:
                self._stored.check(first, prompt, prompt_ids)
                continue
            if len(prompt_ids) > self.config.max_prompt_tokens:
                self.counts.too_long += self._num_turns(prompt)
                continue
            temperature = self.config.temperatures[prompt.id % len(self.config.temperatures)]
            self._conversations[first] = _Conversation(prompt, temperature)
            yield self._request(first, prompt_ids, temperature)

    def handle(self, completion: Completion) -> list[Request]:
        """Take an answer; returns the request for the conversation's next turn, if there is one."""
        conversation = self._conversations.pop(completion.id)
        prompt, turn = conversation.prompt, len(conversation.rows)
        missing = self._num_turns(prompt) - turn
        if completion.finish not in ("stop", "length"):
            self.counts.refused += missing
            self.first_refusal = self.first_refusal or completion.error or completion.finish
            self._finish(conversation)
            return []
        conversation.rows.append(
            {
                "id": completion.id,
                "source": prompt.source,
                "category": prompt.category,
                "temperature": conversation.temperature,
                "prompt_ids": completion.prompt_ids,
                "response_ids": completion.token_ids,
                "finish": completion.finish,
            }
        )
        if missing == 1:
            self._finish(conversation)
            return []
        reply = self._tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        conversation.replies.append(reply)
        prompt_ids = self._render(prompt, conversation.replies)
        if len(prompt_ids) > self.config.max_prompt_tokens:
            self.counts.too_long += missing - 1
            self._finish(conversation)
            return []
        self._conversations[completion.id + 1] = conversation
        return [self._request(completion.id + 1, prompt_ids, conversation.temperature)]

    def _finish(self, conversation: _Conversation) -> None:
        if not conversation.rows:
            return
        self._store.append(conversation.rows)
        for row in conversation.rows:
            self.counts.done += 1
            self.counts.cut += row["finish"] == "length"
            self.counts.prompt_tokens += len(row["prompt_ids"])
            self.counts.response_tokens += len(row["response_ids"])

    def _request(self, number: int, prompt_ids: list[int], temperature: float) -> Request:
        self._asked += 1
        self._asked_tokens += len(prompt_ids)
        return Request(
            id=number,
            prompt_ids=prompt_ids,
            max_tokens=self.config.max_new_tokens,
            temperature=temperature,
            # At temperature 0 there is nothing to truncate.
            top_p=self.config.top_p if temperature > 0 else 1.0,
            top_k=self.config.top_k if temperature > 0 else 0,
        )

    def _num_turns(self, prompt: Prompt) -> int:
        return min(len(prompt.turns), self.config.max_turns)

    def _row_id(self, prompt: Prompt, turn: int) -> int:
        return prompt.id * self.config.max_turns + turn

    def _render(self, prompt: Prompt, replies: list[str]) -> list[int]:
        messages = prompt.messages(replies)
        if prompt.system is None and self.config.system_prompt is not None:
            messages = [{"role": "system", "content": self.config.system_prompt}, *messages]
        return render_chat(self._tokenizer, messages, **self.config.chat_template_kwargs)


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], **template_kwargs: Any
) -> list[int]:
    """Token ids of a conversation up to where the assistant's next turn begins.

    Raises:
        TargetError: the target has no chat template, or it refuses these messages.
    """
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise TargetError(
            f"{tokenizer.name_or_path} has no chat template; use an instruction-tuned target"
        )
    try:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False, **template_kwargs
        )
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise TargetError(
            f"the chat template of {tokenizer.name_or_path} refuses messages of {roles}: {error}"
        ) from None


def expected_length(*, limit: float, stopped: int, generated: int) -> float:
    """Expected tokens of a response, also while most are unfinished.

    The mean of the finished ones alone is too low at first, since short ones finish first. With a
    constant chance h of ending at each token, the estimate of h is the number of responses that
    stopped over all tokens generated, finished or not, and a response cut at L tokens has the
    expected length (1 - (1 - h)^L) / h.

    Args:
        limit: L.
        stopped: responses that ended by themselves.
        generated: tokens of all responses so far, unfinished ones included.
    """
    if stopped == 0 or generated == 0:
        return float(limit)
    chance = min(1.0, stopped / generated)
    return (1 - (1 - chance) ** limit) / chance


class _StoredPrompts:
    """The prompts behind stored rows, to notice that a prompts file has changed."""

    def __init__(self, store: RowStore, tokenizer: PreTrainedTokenizerBase) -> None:
        self._folder: Path = store.folder
        self._tokenizer = tokenizer
        table = read_store(store.folder, RESPONSES).select(["id", "prompt_ids"])
        self._prompt_ids = table.column("prompt_ids")
        self._row_of = {number: row for row, number in enumerate(table.column("id").to_pylist())}

    def check(self, number: int, prompt: Prompt, prompt_ids: list[int]) -> None:
        stored = self._prompt_ids[self._row_of[number]].as_py()
        if stored == prompt_ids:
            return
        # Some templates write today's date; then the user's words must still be there.
        text = "".join(self._tokenizer.decode(stored).split())
        if "".join(prompt.turns[0].split()) not in text:
            raise DataError(
                f"{self._folder}: row {number} answers another prompt than {number} of the "
                "prompts given now; name another output folder, or give the prompts it was made "
                "from (more may follow them)"
            )
