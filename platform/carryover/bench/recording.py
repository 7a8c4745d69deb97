"""A bench in MLflow: a parent run for the comparison, a child for each arm and condition.

Metrics have the same names everywhere (`ArmSummary.metrics`, `Comparison.metrics`), so runs of any
age can be put side by side; `bench.compare` needs nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from carryover.bench.arms import choose_baseline, choose_reference
from carryover.bench.outputs import output_files
from carryover.bench.records import Condition
from carryover.bench.result import BenchResult
from carryover.bench.settings import BenchConfig
from carryover.bench.workload import count_categories, fingerprint
from carryover.data.prompts import Prompt
from carryover.tracking import Run

EXPERIMENT = "bench"
TAG = "carryover."


def run_name(mode: str, conditions: Sequence[Condition]) -> str:
    """Name of the parent run."""
    first, more = conditions[0].title, len(conditions) - 1
    return f"{mode} {first}" + (f" and {more} more" if more else "")


def run_tags(mode: str, config: BenchConfig, arms: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Tags of the parent run, which its children repeat."""
    return {
        f"{TAG}bench": mode,
        f"{TAG}workload": config.prompts,
        f"{TAG}reference": choose_reference(arms, given=config.reference) or "",
        f"{TAG}baseline": choose_baseline(arms, given=config.baseline) or "",
    }


def record(result: BenchResult, parent: Run, prompts: Sequence[Prompt]) -> None:
    """Write the result into the parent run, and a child run for each arm and condition."""
    # `out` is where this machine keeps its files; the rest decides the figures
    parent.log_params(result.config.model_dump(mode="json", exclude={"out"}))
    source = result.config.prompts
    workload = {
        "name": source, "digest": fingerprint(prompts), "source": source,
        "profile": count_categories(prompts),
    }  # fmt: skip
    parent.log_input(**workload)
    state = {f"{TAG}valid": result.valid, f"{TAG}partial": result.partial or ""}
    machine = result.start["machine"]
    state[f"{TAG}config_sha256"] = result.start["config_sha256"]
    parent.set_tags({**state, **{f"{TAG}machine.{name}": v for name, v in machine.items()}})
    if result.counters_agree is not None:
        parent.set_tags({f"{TAG}counters_agree": result.counters_agree})
        parent.log_dict(result.counters, "counters.json")
    parent.log_dict(result.start, "start.json")
    parent.log_dict(
        [{"severity": f.severity, "text": f.text} for f in result.findings], "findings.json"
    )
    for path in output_files(result):
        parent.log_file(path)
    tags = {**run_tags(result.mode, result.config, result.arms), **state}
    for cell in result.cells:
        for arm in result.arms:
            name = f"{arm} {cell.condition.title}"
            with parent.child(name, tags={**tags, f"{TAG}arm": arm}) as child:
                child.log_params(
                    {
                        "arm": arm,
                        "mode": cell.condition.mode,
                        "temperature": cell.condition.temperature,
                        "concurrency": cell.condition.concurrency,
                        "rate": cell.condition.rate,
                        "max_tokens": result.config.max_tokens,
                        "ignore_eos": result.config.ignore_eos,
                        "workload": source,
                        "workload_digest": workload["digest"],
                        "about": result.arms[arm],
                    }
                )
                child.log_input(**workload)
                child.log_metrics(cell.metrics(arm))
