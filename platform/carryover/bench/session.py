"""A bench from its start to its records, whoever answers the prompts.

Whatever ends it, what is finished is kept, shown and recorded: Ctrl-C, an arm that dies and a
time budget leave a bench marked partial, and a killed one goes on where it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from time import monotonic
from typing import Any

from carryover import provenance
from carryover.bench.arms import choose_reference
from carryover.bench.ledger import Ledger
from carryover.bench.machine import busy_note, machine_state
from carryover.bench.measure import Backend, Progress, fit_budget, measure
from carryover.bench.outputs import write_outputs
from carryover.bench.recording import EXPERIMENT, record, run_name, run_tags
from carryover.bench.records import Condition
from carryover.bench.result import BenchResult, compile_result, whole_blocks
from carryover.bench.settings import BenchConfig
from carryover.bench.ties import Ties, default_threshold, parting_gap
from carryover.bench.validity import Finding
from carryover.bench.workload import (
    Unit,
    count_categories,
    fingerprint,
    make_plan,
    select_prompts,
)
from carryover.data.prompts import Prompt
from carryover.errors import ServingError
from carryover.tracking import Run, Tracker

# an open loop begins with an idle server, and needs time to fill it
ARRIVALS_S = 20.0


@dataclass(frozen=True)
class Bench:
    """What is to be measured.

    Attributes:
        config: settings.
        mode: `online` or `offline`.
        arms: descriptions by name, in order.
        prompts: the whole workload.
        conditions: in order.
        connect: starts whatever answers, given the ledger's folder.
        tags: further tags of the parent run.
    """

    config: BenchConfig
    mode: str
    arms: dict[str, dict[str, Any]]
    prompts: Sequence[Prompt]
    conditions: Sequence[Condition]
    connect: Callable[[Path], AbstractContextManager[Backend]]
    tags: Mapping[str, Any] | None = None


def run_bench(
    bench: Bench,
    *,
    tracker: Tracker | None,
    on_progress: Progress | None = None,
    on_partial: Callable[[BenchResult], None] | None = None,
    resume: Path | None = None,
) -> BenchResult:
    """Measure, write and record a bench.

    Args:
        bench: what.
        tracker: where to record it: a parent run and a child for each arm and condition; None
            records nothing.
        on_progress: called after every request with requests done, requests in all, and the arm.
        on_partial: given the result of what is finished when an error or Ctrl-C ends the bench;
            without cells where no condition has a block that all arms finished.
        resume: folder of a bench that was cut short, to go on with.

    Raises:
        ConfigError: `resume` is the folder of another bench, or the budget is too small.
        ServingError: an arm stopped answering, or too many requests failed.
    """
    ledger = _open(bench, resume)
    if tracker is None:
        opened: AbstractContextManager[Run | None] = nullcontext()
    else:
        name = run_name(bench.mode, bench.conditions)
        tags = {**run_tags(bench.mode, bench.config, bench.arms), **(bench.tags or {})}
        opened = tracker.run(
            experiment=EXPERIMENT, name=name, tags=tags, run_id=ledger.start.get("run_id")
        )
    with opened as parent:
        if parent is not None:
            ledger.start["run_id"] = parent.id
            ledger.write_start()
        result = _measure(bench, ledger, parent, on_progress, on_partial)
        _check_failures(result)
    return result


def _open(bench: Bench, resume: Path | None) -> Ledger:
    conditions = [condition.title for condition in bench.conditions]
    found = {
        "arms": bench.arms,
        "prompts_sha256": fingerprint(bench.prompts),
        "conditions": conditions,
    }
    if resume is not None:
        ledger = Ledger.resume(resume)
        ledger.check(bench.mode, **found)
        return ledger
    start = {
        **found,
        "prompts": count_categories(bench.prompts),
        "config_sha256": hashlib.sha256(bench.config.to_yaml().encode()).hexdigest(),
        "provenance": provenance.collect(),
        "machine": machine_state(),
    }
    return Ledger.create(bench.config, bench.mode, start)


def _measure(
    bench: Bench,
    ledger: Ledger,
    parent: Run | None,
    on_progress: Progress | None,
    on_partial: Callable[[BenchResult], None] | None,
) -> BenchResult:
    """Measure and keep; the result of what there is, also where this raises."""
    partial, problem = None, None
    ties: dict[tuple[str, str], Ties] = {}
    notes = [busy_note(ledger.start["machine"])]
    try:
        with bench.connect(ledger.folder) as backend:
            before = set(ledger.done)
            try:
                plan, deadline_s = _plan(bench, ledger, backend, on_progress)
                partial = measure(
                    plan, backend, ledger, max_failure_share=bench.config.max_failure_share,
                    deadline_s=deadline_s, on_progress=on_progress,
                )  # fmt: skip
            finally:
                # what was counted covers the units of this process alone, unless one broke off
                backend.end_window([key for key in ledger.done if key not in before], ledger)
            notes += backend.notes()
            ties = explain_differences(bench, ledger, backend, on_progress)
    except KeyboardInterrupt as error:
        partial, problem = "interrupted", error
    except ServingError as error:
        partial, problem = str(error).partition("\n")[0], error
    result = compile_result(
        bench.config, ledger, conditions=bench.conditions, arms=bench.arms, partial=partial,
        ties=ties, run_id=None if parent is None else parent.id,
    )  # fmt: skip
    said = [Finding("note", note) for note in notes if note is not None]
    result = replace(result, findings=[*result.findings, *said])
    if result.cells:
        write_outputs(result)
        if parent is not None:
            record(result, parent, bench.prompts)
    if problem is not None and ledger.done and on_partial is not None:
        on_partial(result)
    if problem is not None:
        raise problem
    return result


def _plan(
    bench: Bench, ledger: Ledger, backend: Backend, on_progress: Progress | None
) -> tuple[list[Unit], float | None]:
    """The plan, the same whenever the bench is resumed, and when to stop."""
    config, arms = bench.config, list(bench.arms)
    prompts = select_prompts(bench.prompts, config.num_prompts, seed=config.seed)
    started_s, deadline_s = monotonic(), None
    if config.budget_s is not None:
        if "budget" not in ledger.start:
            _, ledger.start["budget"] = fit_budget(
                prompts, arms, bench.conditions, backend,
                budget_s=config.budget_s, on_progress=on_progress,
            )  # fmt: skip
            ledger.write_start()
        prompts = prompts[: ledger.start["budget"]["prompts"]]
        spent_s = sum(measured.wall_s for measured in ledger.done.values())
        deadline_s = started_s + config.budget_s - spent_s
    size = config.block_size or default_block_size(bench.conditions)
    plan = make_plan(prompts, arms, bench.conditions, block_size=size, seed=config.seed)
    missing = [unit for unit in plan if unit.key not in ledger.done]
    backend.prepare(list(dict.fromkeys(unit.arm for unit in missing)), bench.conditions)
    return backend.order(plan), deadline_s


def default_block_size(conditions: Sequence[Condition]) -> int:
    """Prompts per block: enough that a block's beginning and end are little of it."""
    clients = max(condition.concurrency or 1 for condition in conditions)
    rate = max(condition.rate or 0.0 for condition in conditions)
    return max(8, 4 * clients, ceil(ARRIVALS_S * rate))


def explain_differences(
    bench: Bench, ledger: Ledger, backend: Backend, on_progress: Progress | None
) -> dict[tuple[str, str], Ties]:
    """Ask for the probabilities behind texts that differ at temperature 0.

    Returns:
        By condition title and arm; arms without differing texts are left out.
    """
    reference = choose_reference(bench.arms, given=bench.config.reference)
    if reference is None:
        return {}
    differing = _differing(bench, ledger, reference)
    wanted: dict[str, dict[int, Condition]] = {}
    for (_, arm), (condition, ids) in differing.items():
        for number in ids[: bench.config.max_ties]:
            wanted.setdefault(reference, {})[number] = condition
            wanted.setdefault(arm, {})[number] = condition
    prompts = {prompt.id: prompt for prompt in bench.prompts}
    # arm by arm: an offline bench may have room for one engine only
    asked = [(arm, number, at) for arm, by in wanted.items() for number, at in by.items()]
    answers = {}
    for done, (arm, number, condition) in enumerate(asked, 1):
        answers[arm, number] = backend.choices(arm, prompts[number], condition)
        if on_progress is not None:
            on_progress(done, len(asked), f"differing texts, {arm}")
    threshold = bench.config.near_tie_nats
    if threshold is None:
        threshold = default_threshold(next(iter(bench.arms.values())).get("dtype") or "")
    found = {}
    for (title, arm), (_, ids) in differing.items():
        gaps, same, unknown = [], 0, max(0, len(ids) - bench.config.max_ties)
        for number in ids[: bench.config.max_ties]:
            pair = answers[reference, number], answers[arm, number]
            if None in pair:
                unknown += 1
            elif (gap := parting_gap(*pair)) is None:
                same += 1
            else:
                gaps.append(gap)
        found[title, arm] = Ties(threshold, gaps, same, unknown)
    return found


def _differing(
    bench: Bench, ledger: Ledger, reference: str
) -> dict[tuple[str, str], tuple[Condition, list[int]]]:
    """Prompts whose greedy text is not the reference's, by condition title and arm."""
    requests = [
        request
        for request in whole_blocks(ledger, bench.arms)[1]
        if request.ok and request.condition.temperature == 0
    ]
    texts = {
        (request.condition, request.prompt_id): request.response.text
        for request in requests
        if request.arm == reference
    }
    found: dict[tuple[str, str], tuple[Condition, list[int]]] = {}
    for request in requests:
        text = texts.get((request.condition, request.prompt_id))
        if text is not None and text != request.response.text:
            key = (request.condition.title, request.arm)
            found.setdefault(key, (request.condition, []))[1].append(request.prompt_id)
    return found


def _check_failures(result: BenchResult) -> None:
    for cell in result.cells:
        for arm, summary in cell.summaries.items():
            share = summary.failed / summary.requests
            if share > result.config.max_failure_share:
                errors = [
                    r.response.error for r in result.requests
                    if r.arm == arm and r.condition == cell.condition and not r.ok
                ]  # fmt: skip
                raise ServingError(
                    f"arm {arm!r}: {summary.failed} of {summary.requests} requests failed, more "
                    f"than the {result.config.max_failure_share:.0%} allowed; the first: "
                    f"{errors[0]}\nall are in {result.folder / 'requests.parquet'}"
                )
