"""The results page: Markdown and its figures, the same whenever MLflow holds the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from carryover.bench.html import DEFINITIONS
from carryover.results import records
from carryover.results.collect import SectionResults, compute_section, read_section
from carryover.results.config import ResultsConfig
from carryover.results.document import ResultsPage
from carryover.results.markdown import table
from carryover.results.runs import RunReader
from carryover.results.sections import add_section

_HOW = (
    "Written by `platform results` from the MLflow runs listed at the end, and from nothing else; "
    "`platform results --check` tells whether it still says what they say. Offline figures (the "
    "engine alone, one request at a time) and online figures (through a server) are never averaged "
    "together, and the paper's numbers stand in a table of their own."
)
_INTERVALS = (
    "An interval says what other prompts of this kind might give, not what another training or "
    "another machine would: the spread between trainings is that between the seeds' rows. Seeds "
    "are pooled prompt by prompt, and prompts are resampled with their seeds together. Where "
    "several runs measured the same arms under the same condition, a valid one counts before an "
    "invalid, a whole one before a partial, then the one with most of the arms, with most "
    "prompts, and of equals the first listed."
)


def make_page(
    config: ResultsConfig,
    reader: RunReader,
    *,
    folder: str,
    on_section: Callable[[str], None] = lambda name: None,
) -> ResultsPage:
    """Read the runs and put the page together.

    Args:
        config: names the runs.
        reader: of the store.
        folder: of the pictures, relative to the page.
        on_section: told the name of each section before it is computed.

    Raises:
        ConfigError: a run or an arm is missing, or is not what it is listed as.
    """
    read = [read_section(section, reader) for section in config.sections]
    found = []
    for runs in read:
        on_section(runs.section.name)
        found.append(compute_section(runs))
    page = ResultsPage(folder)
    page.add(f"# {config.title}", config.text, _HOW)
    page.add("## Goals", _goals(found))
    for results in found:
        add_section(page, results)
    page.add(
        "## The paper's numbers",
        "arXiv 2609.14717, one H200, vLLM, its own targets and prompts: to compare with, not to "
        "average with.",
        records.paper_table(),
    )
    benches = {run.record.id: run for results in found for run in results.runs.benches}
    others = {run.id: run for results in found for run in results.runs.records}
    page.add("## Where the numbers come from")
    if benches or others:
        page.add(records.provenance_table(benches.values(), others.values()))
    else:
        page.add("No runs yet.")
    page.add("## How to read them", DEFINITIONS, _INTERVALS)
    return page


def _goals(found: Sequence[SectionResults]) -> str:
    rows = []
    for results in found:
        for regime, verdict in results.verdicts:
            shown = verdict.verdict if verdict.met is None else f"**{verdict.verdict}**"
            rows.append([
                results.runs.section.name, regime or "all", verdict.goal, verdict.measured, shown,
            ])  # fmt: skip
    return table(["section", "drafter", "goal", "measured", "verdict"], rows, left=5)
