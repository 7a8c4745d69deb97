"""What must hold of any honest bench, checked on what was measured. Pure: values in, values out.

A finding is `invalid` when figures contradict each other or the comparison is not one of equals:
then no figure of the run is to be believed. It is a `note` when a reader must know it beside the
figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isclose
from typing import Any, Literal

from carryover.bench import statistics
from carryover.bench.records import Condition, Request
from carryover.bench.summary import ArmSummary, Comparison
from carryover.bench.ties import Ties

UNDRAFTED_WORTH_TELLING = 0.02
# between figures that are computed in two ways from the same integers
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Finding:
    """One thing to know about a bench.

    Attributes:
        severity: `invalid` or `note`.
        text: one sentence without a full stop.
    """

    severity: Literal["invalid", "note"]
    text: str


def check_requests(arm: str, about: Mapping[str, Any], requests: Sequence[Request]) -> list[str]:
    """Contradictions in what an arm's responses say, each as a sentence.

    Args:
        arm: its name.
        about: its description; `drafter` None means that it does not speculate.
        requests: of it.
    """
    problems: dict[str, list[int]] = {}

    def found(text: str, request: Request) -> None:
        problems.setdefault(text, []).append(request.prompt_id)

    for request in requests:
        answer = request.response
        if not request.ok:
            continue
        histogram = answer.accepted_histogram
        if sum(histogram) != answer.num_drafts:
            found("the histogram holds other rounds than were counted", request)
        accepted = sum(number * rounds for number, rounds in enumerate(histogram))
        if accepted != answer.num_accepted_tokens:
            found("the histogram holds other acceptances than were counted", request)
        if answer.num_accepted_tokens > answer.num_draft_tokens:
            found("more proposals were accepted than made", request)
        if not answer.ttft_s <= answer.latency_s:
            found("the last token came before the first", request)
        if "drafter" in about and about["drafter"] is None and answer.num_drafts:
            found("there are rounds, and the arm has no drafter", request)
    said = [
        f"{arm}: {text} (prompts {', '.join(map(str, ids[:5]))}{', ...' if ids[5:] else ''})"
        for text, ids in problems.items()
    ]
    whole = [request for request in requests if request.ok]
    longest = max((request.response.output_tokens for request in whole), default=0)
    if about.get("drafter") and longest > 2 and not any(r.response.num_drafts for r in whole):
        said.append(
            f"{arm}: it has a drafter, and no response tells of a round; serve it with "
            "per-request metrics, as `platform serve` does"
        )
    return said


def check_summary(summary: ArmSummary) -> list[str]:
    """Contradictions in an arm's figures, each as a sentence."""
    rates, said = summary.position_rates, []
    if any(later > earlier + _TOLERANCE for earlier, later in pairwise(rates)):
        said.append(f"{summary.arm}: acceptance rates rise with the position")
    if summary.acceptance_length is not None:
        length = 1 + sum(rates)
        if not isclose(summary.acceptance_length.value, length, abs_tol=_TOLERANCE):
            said.append(
                f"{summary.arm}: acceptance length {summary.acceptance_length.value:.4f} is not "
                f"1 + the sum of the rates per position, {length:.4f}"
            )
    return said


def check_counters(
    arm: str, counted: Mapping[str, float], requests: Sequence[Request]
) -> list[str]:
    """Where vLLM's own counters and the responses contradict each other, each as a sentence.

    Args:
        arm: its name.
        counted: what the counters rose by while these requests were answered; by vLLM's names
            without `spec_decode_`, those of positions ending in `.0`, `.1`, ...
        requests: of the arm, all that it answered meanwhile.
    """
    answers = [request.response for request in requests if request.ok]
    histogram = statistics.pool_histograms([answer.accepted_histogram for answer in answers])
    told = {
        "num_drafts": sum(answer.num_drafts for answer in answers),
        "num_draft_tokens": sum(answer.num_draft_tokens for answer in answers),
        "num_accepted_tokens": sum(answer.num_accepted_tokens for answer in answers),
        **{
            f"num_accepted_tokens_per_pos.{position}": sum(histogram[position + 1 :])
            for position in range(max(0, len(histogram) - 1))
        },
    }
    wrong = [
        f"{name} {counted.get(name, 0):.0f} counted, {value} told"
        for name, value in told.items()
        if counted.get(name, 0) != value and (value or name in counted)
    ]
    if not wrong:
        return []
    return [f"{arm}: vLLM's counters and the responses disagree ({'; '.join(wrong[:4])})"]


def check_pairs(condition: Condition, by_arm: Mapping[str, Sequence[Request]]) -> list[str]:
    """Where arms of one condition were not asked alike, each as a sentence."""
    said = []
    asked = {arm: sorted(r.prompt_id for r in requests) for arm, requests in by_arm.items()}
    if len({tuple(ids) for ids in asked.values()}) > 1:
        counts = ", ".join(f"{arm} {len(ids)}" for arm, ids in asked.items())
        said.append(f"{condition.title}: the arms were asked different prompts ({counts})")
    lengths: dict[int, set[int]] = {}
    cached: dict[str, int] = {}
    for arm, requests in by_arm.items():
        for request in requests:
            if request.ok:
                lengths.setdefault(request.prompt_id, set()).add(request.response.prompt_tokens)
                cached[arm] = cached.get(arm, 0) + (request.response.cached_tokens or 0)
    uneven = [number for number, counts in lengths.items() if len(counts) > 1]
    if uneven:
        said.append(
            f"{condition.title}: {len(uneven)} prompts have other lengths in tokens on different "
            "arms, so their chat templates or tokenizers differ"
        )
    complete = all(request.ok for requests in by_arm.values() for request in requests)
    if complete and len(set(cached.values())) > 1:
        counts = ", ".join(f"{arm} {count:,}" for arm, count in cached.items())
        said.append(
            f"{condition.title}: the arms found different amounts of prompt tokens in their "
            f"prefix caches ({counts})"
        )
    return said


def check_lengths(
    condition: Condition, requests: Sequence[Request], *, max_tokens: int, ignore_eos: bool
) -> list[str]:
    """Where responses are not as long as they had to be, each as a sentence."""
    if not ignore_eos:
        return []
    short = [r for r in requests if r.ok and r.response.output_tokens != max_tokens]
    if not short:
        return []
    return [
        f"{condition.title}: {len(short)} responses of {short[0].arm} and others do not have the "
        f"{max_tokens} tokens that ignore_eos asks for (context too short?)"
    ]


def notes_on(
    condition: Condition,
    summaries: Mapping[str, ArmSummary],
    comparisons: Mapping[str, Comparison],
    *,
    ties: Mapping[str, Ties],
    max_tokens: int,
    ignore_eos: bool,
) -> list[str]:
    """What a reader must know beside the figures of a condition, one sentence each."""
    said = []
    for arm, comparison in comparisons.items():
        if comparison.differing:
            said.append(
                f"{arm}: {comparison.differing} of {comparison.prompts} texts differ from "
                f"{comparison.baseline}'s at temperature 0, so its speed-up is on partly "
                f"different text{f': {ties[arm]}' if arm in ties else ''}"
            )
    cut = []
    for arm, summary in summaries.items():
        whole = summary.requests - summary.failed
        if whole and summary.cut == whole and not ignore_eos:
            cut.append(arm)
        if summary.outliers:
            said.append(
                f"{arm}: {summary.outliers} of {whole} requests took over 3 times the median "
                "time per token; they are in every figure"
            )
        if summary.failed:
            said.append(
                f"{arm}: {summary.failed} of {summary.requests} requests failed; they are in "
                "requests.parquet, and count in no figure but this one and goodput"
            )
    if cut:
        said.append(f"{', '.join(cut)}: every response was cut at {max_tokens} tokens")
    return [f"{condition.title}: {text}" for text in said]


def note_on_equal_arms(condition: Condition, again: Comparison) -> str:
    """What two arms with the same checkpoint and engine differ by: an engine's own luck.

    Intervals are over prompts, which both have alike, and hold nothing of what differs between
    processes, such as where their memory lies.
    """
    return (
        f"{condition.title}: {again.baseline} and {again.arm} are the same arm twice, and differ "
        f"by {again.speedup.as_gain} in output tokens/s; so may any two arms, whatever the "
        "intervals of their speeds"
    )


def undrafted_share(requests: Sequence[Request]) -> float:
    """Share of output tokens that no round accounts for: of steps in which nothing was proposed.

    Each round yields its accepted proposals and one token more, reading the prompt one. vLLM
    proposes nothing where a request is about to reach the longest sequence, or when told to stop
    at some batch size.
    """
    answers = [r.response for r in requests if r.ok and r.response.num_drafts]
    tokens = sum(answer.output_tokens for answer in answers)
    outside = sum(
        max(0, a.output_tokens - a.num_accepted_tokens - a.num_drafts - 1) for a in answers
    )
    return outside / tokens if tokens else 0.0
