"""The paper's numbers (arXiv 2609.14717, one H200, vLLM), beside ours where the settings match.

What decides a match is here in full; a figure without a match is never shown beside ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from carryover.bench.sets import PAPER_COUNTS, PAPER_MIX
from carryover.bench.statistics import Interval

if TYPE_CHECKING:
    from carryover.bench.result import BenchResult, Cell

PROPOSAL_LENGTH = 15
GPU = "H200"
# speculators' names of the regimes
METHODS = {"dflash": "dflash", "dspark": "markov", "markov": "markov"}


@dataclass(frozen=True)
class Published:
    """One figure of the paper.

    Attributes:
        what: in words.
        target: hub name.
        regime: `dflash` or `markov`.
        mode: `online` or `offline`.
        temperature: of sampling.
        concurrency: of the client.
        figure: `acceptance_length`, `speedup` or `output_tokens_per_s`.
        set: one of the sets; None for the whole mix.
        baseline: its value; None where only the gain is published.
        carryover: its value; None where only the gain is published.
        gain: of Carryover over the baseline, as a factor.
    """

    what: str
    target: str
    regime: str
    mode: str
    temperature: float
    concurrency: int
    figure: str
    set: str | None
    baseline: float | None
    carryover: float | None
    gain: float


_QWEN = "Qwen/Qwen3-4B"
PUBLISHED = (
    Published("average acceptance length", _QWEN, "markov", "offline", 0.0, 1,
              "acceptance_length", None, 4.33, 4.85, 4.85 / 4.33),
    Published("online speed-up", _QWEN, "markov", "online", 0.0, 1,
              "speedup", None, 3.44, 3.83, 1.115),
    Published("output tokens/s at concurrency 32", _QWEN, "markov", "online", 0.0, 32,
              "output_tokens_per_s", None, 8608.0, 9402.0, 9402 / 8608),
    Published("speed-up, translation", _QWEN, "markov", "offline", 1.0, 1,
              "speedup", "translation", 1.94, 2.50, 1.288),
    Published("speed-up, QA", _QWEN, "dflash", "offline", 1.0, 1,
              "speedup", "qa", None, None, 1.015),
    Published("acceptance length, RAG", _QWEN, "dflash", "offline", 1.0, 1,
              "acceptance_length", "rag", None, None, 1.011),
)  # fmt: skip


@dataclass(frozen=True)
class Beside:
    """A published figure and ours.

    Attributes:
        published: the paper's.
        baseline: ours.
        carryover: ours.
        gain: ours, as a factor, paired.
    """

    published: Published
    baseline: Interval | None
    carryover: Interval | None
    gain: Interval | None


def beside_paper(result: BenchResult) -> list[Beside]:
    """The paper's figures that this bench has measured under the same settings."""
    if why_not(result) is not None:
        return []
    regime = _regime(result.arms[result.baseline])
    found = []
    for published in PUBLISHED:
        for cell in result.cells:
            condition = cell.condition
            if (
                published.regime == regime
                and published.target == result.arms[result.baseline].get("target")
                and published.mode == condition.mode
                and published.temperature == condition.temperature
                and published.concurrency == condition.concurrency
                and (published.figure != "output_tokens_per_s" or GPU in _gpus(result))
            ):
                found += _ours(published, cell, result.baseline)
    return found


def why_not(result: BenchResult) -> str | None:
    """Why no figure of the paper may stand beside ours; None if some may."""
    if result.config.prompts != PAPER_MIX or result.prompts != PAPER_COUNTS:
        return f"the prompts are not {PAPER_MIX}"
    if result.partial or result.budget is not None or result.config.num_prompts is not None:
        return "only a part of the prompts was measured"
    if not result.valid:
        return "the run is invalid"
    if result.baseline is None or "carryover" not in result.arms:
        return "there are no arms `baseline` and `carryover`"
    for name in (result.baseline, "carryover"):
        about = result.arms[name]
        if about.get("num_speculative_tokens") != PROPOSAL_LENGTH:
            return f"the paper proposes {PROPOSAL_LENGTH} tokens a round"
        if about.get("target") not in {published.target for published in PUBLISHED}:
            return f"the paper's figures here are of {_QWEN}"
        if _regime(about) is None:
            return "the kind of drafter is not known"
    return None


def _ours(published: Published, cell: Cell, baseline: str) -> list[Beside]:
    def of(arm: str) -> Interval | None:
        source: Any = (cell.comparisons if published.figure == "speedup" else cell.summaries)[arm]
        if published.set is not None:
            source = source.by_set[published.set]
        return getattr(source, published.figure)

    gain: Any = cell.gains["carryover"]
    if published.set is not None:
        gain = gain.by_set[published.set]
    is_acceptance = published.figure == "acceptance_length"
    factor = gain.acceptance_ratio if is_acceptance else gain.speedup
    if published.figure == "speedup" and "carryover" not in cell.comparisons:
        return []
    return [Beside(published, of(baseline), of("carryover"), factor)]


def _regime(about: Mapping[str, Any]) -> str | None:
    return METHODS.get(about.get("method") or "")


def _gpus(result: BenchResult) -> str:
    return " ".join(result.start.get("machine", {}).get("gpus", []))
