"""Measure a plan unit by unit on any backend, until it is done or has to stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any, Protocol

from carryover.bench.client import Choice, Response
from carryover.bench.ledger import Ledger
from carryover.bench.records import Condition, Request
from carryover.bench.statistics import share_of_wall
from carryover.bench.workload import Unit, count_categories
from carryover.data.prompts import Prompt
from carryover.errors import ConfigError, ServingError

# called with requests done, requests in all, and the arm or what is being done
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Answers:
    """What a unit gave.

    Attributes:
        responses: one for each prompt, in their order.
        wall_s: from the first request sent to the last response ended.
        counted: vLLM's counters over the unit by name, where they can be read around it.
    """

    responses: list[Response]
    wall_s: float
    counted: dict[str, float] | None = None


class Backend(Protocol):
    """What answers prompts: a server, or engines of our own."""

    def prepare(self, arms: Sequence[str], conditions: Sequence[Condition]) -> None:
        """Let arms answer a few requests that are not measured; at once, or when they start."""

    def order(self, plan: Sequence[Unit]) -> list[Unit]:
        """The order in which this backend can measure a plan; called after `prepare`."""

    def notes(self) -> list[str]:
        """What a reader must know about how it measured, one sentence each."""

    def send(self, unit: Unit, advance: Callable[[], None]) -> Answers:
        """Measure a unit; failures of requests are returned, not raised."""

    def problem(self, arm: str) -> str | None:
        """Why an arm answers nothing any more; None if it does."""

    def end_window(self, units: Sequence[str], ledger: Ledger) -> None:
        """Measuring is over: let the ledger have what was counted over these units."""

    def choices(self, arm: str, prompt: Prompt, condition: Condition) -> list[Choice] | None:
        """The tokens of a response with their probabilities, not measured."""


def measure(
    plan: Sequence[Unit],
    backend: Backend,
    ledger: Ledger,
    *,
    max_failure_share: float = 1.0,
    deadline_s: float | None = None,
    on_progress: Progress | None = None,
) -> str | None:
    """Measure the units that the ledger lacks.

    Args:
        plan: in this order.
        backend: who answers; prepared.
        ledger: keeps what is finished.
        max_failure_share: of an arm's requests under one condition.
        deadline_s: by `time.monotonic`: no block begins after it, but the first one, and those
            that some arms have finished.
        on_progress: called after every request.

    Returns:
        Why it stopped before the plan was done; None if it is done.

    Raises:
        ServingError: an arm answers no more, or fails more requests than the bench allows; what
            was finished is in the ledger.
    """
    total = sum(len(unit.prompts) for unit in plan)
    done = sum(len(unit.prompts) for unit in plan if unit.key in ledger.done)
    block = None
    for unit in plan:
        if unit.key in ledger.done:
            continue
        overdue = deadline_s is not None and time.monotonic() > deadline_s
        if unit.block != block and overdue and _may_stop(plan, ledger):
            blocks = len({each.block for each in plan})
            return f"the time budget ended before block {unit.block + 1} of {blocks}"
        block = unit.block

        def advance(arm: str = unit.arm) -> None:
            nonlocal done
            done += 1
            if on_progress is not None:
                on_progress(done, total, arm)

        answers = backend.send(unit, advance)
        if _looks_dead(answers.responses):
            problem = backend.problem(unit.arm)
            if problem is not None:
                raise ServingError(
                    f"arm {unit.arm!r} stopped answering: {problem}\n"
                    f"{len(ledger.done)} of {len(plan)} units are finished and kept in "
                    f"{ledger.folder}; when it is back, go on with --resume {ledger.folder}"
                )
        ledger.keep(
            unit, make_requests(unit, answers), wall_s=answers.wall_s, counted=answers.counted
        )
        if any(answer.error for answer in answers.responses):
            _check_failures(unit, plan, ledger, max_failure_share)
    return None


def _check_failures(
    unit: Unit, plan: Sequence[Unit], ledger: Ledger, max_failure_share: float
) -> None:
    """Stop as soon as it is certain that the bench will fail, not after measuring the rest."""
    cell = [each for each in plan if (each.arm, each.condition) == (unit.arm, unit.condition)]
    planned = sum(len(each.prompts) for each in cell)
    failed = [
        request
        for each in cell
        if each.key in ledger.done
        for request in ledger.done[each.key].requests
        if not request.ok
    ]
    if len(failed) > max_failure_share * planned:
        raise ServingError(
            f"arm {unit.arm!r}: {len(failed)} of the {planned} requests of this bench failed "
            f"already, more than the {max_failure_share:.0%} allowed; the first: "
            f"{failed[0].response.error}\nwhat is finished is kept in {ledger.folder}; when the "
            "cause is gone, begin again; to go on without these requests, raise max_failure_share "
            f"in its bench.yaml and give --resume {ledger.folder}"
        )


def _may_stop(plan: Sequence[Unit], ledger: Ledger) -> bool:
    """Whether something is finished, and no block on some arms or conditions alone."""
    finished = {unit.block for unit in plan if unit.key in ledger.done}
    missing = {unit.block for unit in plan if unit.key not in ledger.done}
    return bool(finished) and not finished & missing


def _looks_dead(responses: Sequence[Response]) -> bool:
    """Whether an arm may have died: nothing was answered, or a connection broke."""
    failed = [response for response in responses if response.error is not None]
    broken = any(response.status is None or response.ttft_s is not None for response in failed)
    return broken or len(failed) == len(responses)


def make_requests(unit: Unit, answers: Answers) -> list[Request]:
    """The records of a unit's requests; the whole ones share the time that it took."""
    whole = [index for index, answer in enumerate(answers.responses) if answer.error is None]
    latencies = [answers.responses[index].latency_s for index in whole]
    walls = dict(zip(whole, share_of_wall(latencies, answers.wall_s), strict=True))
    return [
        Request(
            arm=unit.arm, prompt_id=prompt.id, category=prompt.category, source=prompt.source,
            block=unit.block, wall_s=walls.get(index, nan), response=answers.responses[index],
            condition=unit.condition,
        )
        for index, prompt in enumerate(unit.prompts)
    ]  # fmt: skip


def fit_budget(
    prompts: Sequence[Prompt],
    arms: Sequence[str],
    conditions: Sequence[Condition],
    backend: Backend,
    *,
    budget_s: float,
    on_progress: Progress | None = None,
) -> tuple[int, dict[str, Any]]:
    """Find how many prompts fit a time budget, from a small trial on the last prompts.

    Every arm answers as many prompts as it will have in flight, under every condition, and the
    answers are thrown away.

    Args:
        prompts: in an order of which every beginning is balanced.
        arms: of the bench.
        conditions: of the bench.
        backend: who answers.
        budget_s: from now on.
        on_progress: called after every request.

    Returns:
        The number of prompts, a multiple of the number of categories where that is possible, and
        what was found.

    Raises:
        ConfigError: not even one prompt of each category fits.
    """
    started_s = time.monotonic()
    per_prompt_s = 0.0
    backend.prepare(arms, conditions)
    # arm by arm: there may be room for one engine only
    trials = [(condition, arm) for arm in arms for condition in conditions]
    for number, (condition, arm) in enumerate(trials):
        count = max(2, min(len(prompts), condition.concurrency or 4))
        unit = Unit(-1, condition, arm, tuple(prompts[-count:]))
        answers = backend.send(unit, lambda: None)
        per_prompt_s += answers.wall_s / len(unit.prompts)
        if on_progress is not None:
            on_progress(number + 1, len(trials), f"trial of {arm}")
    left_s = budget_s - (time.monotonic() - started_s)
    categories = len(count_categories(prompts))
    fits = int(left_s / per_prompt_s)
    if fits < categories and fits < len(prompts):
        raise ConfigError(
            f"a budget of {budget_s:.0f} s does not fit one prompt of each of the {categories} "
            f"categories: all arms and conditions take about {per_prompt_s:.1f} s per prompt; "
            "raise --budget, lower --max-tokens, or measure fewer conditions"
        )
    count = len(prompts) if fits >= len(prompts) else fits - fits % categories
    found = {
        "budget_s": budget_s, "trial_s": time.monotonic() - started_s,
        "seconds_per_prompt": per_prompt_s, "prompts": count, "of_prompts": len(prompts),
    }  # fmt: skip
    return count, found
