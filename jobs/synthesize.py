"""Make a target write its own prompts: `platform data synthesize`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from carryover.data.prompts import PROMPTS
from carryover.data.store import RowStore
from carryover.data.synthesis import Synthesis, SynthesizeConfig
from carryover.errors import DataError
from carryover.provenance import package_versions
from carryover.targets import resolve
from jobs.engine_pool import EnginePool, engines_for


@dataclass(frozen=True)
class SynthesisProgress:
    """How far a synthesis is."""

    found: int
    wanted: int
    tokens_per_s: float


@dataclass(frozen=True)
class SynthesisSummary:
    """What a synthesis did.

    Attributes:
        path: folder with the prompts.
        found: prompts in it.
        added: of them, by this run.
        attempts: texts that the target wrote in this run.
        rejected: how many of those were left out, by reason.
    """

    path: str
    found: int
    added: int
    attempts: int
    rejected: dict[str, int]


def synthesize(
    config: SynthesizeConfig,
    *,
    pool: EnginePool | None = None,
    report: Callable[[str | SynthesisProgress], None] = lambda event: None,
) -> SynthesisSummary:
    """Fill `config.out` with prompts; returns at once if it has enough.

    Args:
        config: settings.
        pool: started engines of the same target to use; None starts and stops them here.
        report: called with remarks and, about every second, with the progress.

    Raises:
        DataError: the folder was made otherwise, or too few texts are usable.
        TargetError: the target has no usable chat template.
    """
    target = resolve(config.target)
    tokenizer = target.load_tokenizer()
    store = RowStore(
        config.out,
        schema=PROMPTS,
        target=target.identity(),
        settings=config.settings(),
        details={"versions": package_versions()},
    )
    with store:
        synthesis = Synthesis(config, tokenizer, store)
        before = synthesis.found
        if before:
            report(f"{config.out} has {before:,} of {config.num_prompts:,} prompts")
        if not synthesis.complete:
            # An engine with the same seed would write the same prompts again.
            engine = config.engine.model_copy(update={"seed": config.engine.seed + before})
            with engines_for(target, engine, config.pool, borrowed=pool, report=report) as engines:
                store.metadata["engine"] = engines.details
                _run(synthesis, engines, report)
        return SynthesisSummary(
            path=config.out,
            found=synthesis.found,
            added=synthesis.found - before,
            attempts=synthesis.attempts,
            rejected=dict(synthesis.rejected.most_common()),
        )


def _run(
    synthesis: Synthesis,
    engines: EnginePool,
    report: Callable[[str | SynthesisProgress], None],
) -> None:
    wanted = synthesis.config.num_prompts
    requests = synthesis.requests()
    while not synthesis.complete:
        for _ in range(min(engines.wanted, synthesis.wanted - engines.in_flight)):
            engines.submit(next(requests))
        for completion in engines.collect():
            synthesis.handle(completion)
        report(SynthesisProgress(synthesis.found, wanted, engines.tokens_per_s))
        if synthesis.exhausted and not synthesis.complete:
            reasons = ", ".join(f"{n} {why}" for why, n in synthesis.rejected.most_common())
            raise DataError(
                f"{synthesis.attempts} attempts gave {synthesis.found} of {wanted} prompts "
                f"(left out: {reasons}); those are kept. Lower num_prompts, or raise "
                "temperature, max_tokens or max_attempts_per_prompt"
            )
