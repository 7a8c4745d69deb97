"""Prompts that a target writes itself: what to ask it for, and which of its texts to keep.

Pure bookkeeping: `Synthesis` hands out requests and takes completions; `jobs.synthesize` runs them.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from carryover.config import Config
from carryover.data.duplicates import SeenTexts
from carryover.data.prompts import DEFAULT_CATEGORY, PROMPTS
from carryover.data.store import RowStore, read_store
from carryover.data.user_turns import find_user_turn
from carryover.engine import EngineConfig, PoolConfig
from carryover.engine_worker import Completion, Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SOURCE = "self"
_WORD = re.compile(r"\w+")
# A user turn that goes on to answer itself, or in which the model speaks as the assistant: what
# small targets do most often when they are not cut.
_ANSWERS = re.compile(
    r"^\W*(?:the )?(?:final )?(?:answer|solution|assistant|ai)(?: is)?\s*:"
    r"|^\W*(?:assistant|ai)\b\W|^\W*a:\s*$|^#{3,}\s*-?\d|\bthe (?:final )?answer is\b",
    re.IGNORECASE | re.MULTILINE,
)
_ASSISTANT = re.compile(
    r"\bas an ai\b|\bi(?:'| a)m an? (?:ai|chatbot|language model|helpful assistant)\b"
    r"|^(?:sure|certainly|of course|absolutely)\b[,!]|^(?:yes|no),|^here(?:'s| is| are)\b"
    r"|^you are an? (?:ai|helpful)|\bhow (?:can|may) i (?:help|assist) you\b",
    re.IGNORECASE,
)


class Elicitation(Config):
    """One way to make the target write a user turn; the words after the opening are its own."""

    category: str = DEFAULT_CATEGORY
    weight: int = Field(1, ge=1, description="share of the attempts")
    system: str | None = Field(
        None, description="system message while it writes; null: the template's"
    )
    opening: str = Field("", description="first words of the user turn, kept in the prompt")


def default_elicitations() -> list[Elicitation]:
    """Half free user turns, half the kinds of task on which drafters are measured."""
    tutor = "You are a math tutor. The user gives you a word problem to solve."
    return [
        Elicitation(category="general", weight=7),
        Elicitation(category="code", opening="Write a Python function that", weight=2),
        Elicitation(category="math", opening="There are", system=tutor),
        Elicitation(category="math", opening="If", system=tutor),
        Elicitation(category="qa", opening="Explain"),
        Elicitation(category="writing", opening="Write a short"),
        Elicitation(
            category="translation", opening="Translate the following sentence into German:"
        ),
        Elicitation(category="rewriting", opening="Rewrite the following sentence"),
        Elicitation(category="summarization", opening="Summarize the following passage:\n\nThe"),
    ]


class SynthesizeConfig(Config):
    """Settings of `platform data synthesize`."""

    target: str = "embedded"
    out: str = Field("runs/data/prompts", description="folder; run again with more to extend it")
    num_prompts: int = Field(1000, ge=1)
    temperature: float = Field(0.8, gt=0, le=2, description="at 1.0 small targets turn to noise")
    top_p: float = Field(
        1.0, gt=0, le=1, description="below 1 every step sorts the vocabulary: slow on CPU"
    )
    min_tokens: int = Field(5, ge=1, description="of a prompt, opening included")
    max_tokens: int = Field(160, ge=2, description="of a prompt; those not ended by then are left")
    near_duplicate: float = Field(
        0.7, gt=0, le=1, description="share of word triples in common; 1 keeps near duplicates"
    )
    max_attempts_per_prompt: int = Field(10, ge=1, description="gives up when more were needed")
    elicitations: list[Elicitation] = Field(default_factory=default_elicitations, min_length=1)
    engine: EngineConfig = EngineConfig(max_model_len=512)
    pool: PoolConfig = PoolConfig()

    @model_validator(mode="after")
    def _fits(self) -> SynthesizeConfig:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}")
        return self

    def settings(self) -> dict[str, Any]:
        """What decides which prompts come out; prompts made otherwise do not mix with them."""
        names = {"temperature", "top_p", "min_tokens", "max_tokens", "near_duplicate"}
        return self.model_dump(mode="json", include={*names, "elicitations"})


class Synthesis:
    """Hands out requests for user turns and keeps the good ones.

    Args:
        config: settings.
        tokenizer: the target's.
        store: where prompts go; it may hold some already.

    Attributes:
        attempts: completions seen.
        rejected: how many were left out, by reason.

    Raises:
        TargetError: the chat template does not fit an elicitation.
    """

    def __init__(
        self, config: SynthesizeConfig, tokenizer: PreTrainedTokenizerBase, store: RowStore
    ) -> None:
        self.config = config
        self.attempts = 0
        self.rejected: Counter[str] = Counter()
        self._tokenizer = tokenizer
        self._store = store
        self._seen = SeenTexts(config.near_duplicate)
        self._frames = [self._frame(elicitation) for elicitation in config.elicitations]
        self._order = [
            number
            for number, elicitation in enumerate(config.elicitations)
            for _ in range(elicitation.weight)
        ]
        self._waiting: dict[int, Completion] = {}
        self._turn = 0
        self._kept = 0
        if store.ids:
            for row in read_store(store.folder, PROMPTS).to_pylist():
                self._seen.add(self._own_words(row["prompt"]))
        self._next_id = max(store.ids, default=-1) + 1

    @property
    def found(self) -> int:
        """Prompts in the store."""
        return len(self._store.ids)

    @property
    def complete(self) -> bool:
        """Whether the store has as many as asked for."""
        return self.found >= self.config.num_prompts

    @property
    def exhausted(self) -> bool:
        """Whether more attempts were made than the configuration allows."""
        return self.attempts >= self.config.num_prompts * self.config.max_attempts_per_prompt

    def requests(self) -> Iterator[Request]:
        """Requests without end, over the elicitations in proportion to their weights."""
        for number in itertools.count():
            yield Request(id=number, **self._frames[self._order[number % len(self._order)]])

    @property
    def wanted(self) -> int:
        """How many more attempts will probably do, judging by the share that was kept so far."""
        kept_share = (self._kept + 1) / (self.attempts + 2)
        return math.ceil((self.config.num_prompts - self.found) / kept_share)

    def handle(self, completion: Completion) -> None:
        """Take a completion, and keep its text as a prompt if it is one.

        They are judged in the order of the requests: in the order in which they end, short ones
        would be over-represented when the search stops.
        """
        self._waiting[completion.id] = completion
        while not self.complete and (completion := self._waiting.pop(self._turn, None)):
            elicitation = self.config.elicitations[self._order[self._turn % len(self._order)]]
            self._turn += 1
            self.attempts += 1
            reason = self._keep(completion, elicitation)
            if reason is not None:
                self.rejected[reason] += 1

    def _keep(self, completion: Completion, elicitation: Elicitation) -> str | None:
        """Store the prompt, or return why it is none."""
        if completion.finish != "stop":
            return "not ended" if completion.finish == "length" else "refused by the engine"
        written = self._tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        for stop_text in self._frames[0]["stop_texts"]:
            written = written.partition(stop_text)[0]
        text = (elicitation.opening + written).strip()
        num_tokens = len(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        if num_tokens < self.config.min_tokens or not written.strip():
            return "too short"
        reason = why_not_a_prompt(written, system=elicitation.system)
        if reason is None and not self._seen.add(written):
            reason = "repeats another"
        if reason is None:
            row = {"source": SOURCE, "category": elicitation.category, "prompt": text}
            self._store.append([{"id": self._next_id, **row}])
            self._next_id += 1
            self._kept += 1
        return reason

    def _frame(self, elicitation: Elicitation) -> Mapping[str, Any]:
        turn = find_user_turn(self._tokenizer, system=elicitation.system)
        opening = self._tokenizer(elicitation.opening, add_special_tokens=False)["input_ids"]
        return {
            "prompt_ids": [*turn.prefix_ids, *opening],
            "max_tokens": max(1, self.config.max_tokens - len(opening)),
            "temperature": self.config.temperature,
            "top_p": self.config.top_p,
            "stop_ids": turn.stop_ids,
            "stop_texts": turn.stop_texts,
        }

    def _own_words(self, prompt: str) -> str:
        openings = [elicitation.opening for elicitation in self.config.elicitations]
        return prompt[max(len(text) for text in [*openings, ""] if prompt.startswith(text)) :]


def why_not_a_prompt(text: str, *, system: str | None = None) -> str | None:
    """Why a text that the target wrote is not a usable user turn; None if it is.

    Args:
        text: what the target wrote, without the opening.
        system: the system message that it saw; repeating it is a sign of confusion.
    """
    if "\ufffd" in text or any(ord(char) < 32 and char not in "\n\t\r" for char in text):
        return "not text"
    if _ANSWERS.search(text):
        return "answers itself"
    if _ASSISTANT.search(text.strip()):
        return "speaks as the assistant"
    words = _WORD.findall(text.casefold())
    if _is_repetitive(words):
        return "repeats itself"
    if system is not None and _shares_run(words, _WORD.findall(system.casefold()), length=5):
        return "repeats the system message"
    return None


def _is_repetitive(words: list[str], *, length: int = 3) -> bool:
    """Whether more than a third of the word triples of a text of some size occur again."""
    runs = [tuple(words[i : i + length]) for i in range(len(words) - length + 1)]
    return len(runs) >= 8 and len(set(runs)) < len(runs) * 2 / 3


def _shares_run(words: list[str], others: list[str], *, length: int) -> bool:
    runs = {tuple(others[i : i + length]) for i in range(len(others) - length + 1)}
    return any(tuple(words[i : i + length]) in runs for i in range(len(words) - length + 1))
