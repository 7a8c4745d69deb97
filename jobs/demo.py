"""The whole pipeline on one machine, in minutes: `platform demo`.

Each stage is the job that the stage's own command runs, with the settings of `configs/demo.yaml`.
What a stage made before is reused; an interrupted stage goes on where it was.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
from pydantic import Field, model_validator

from carryover.bench.online import BenchResult, OnlineConfig
from carryover.bench.online import run as run_bench
from carryover.config import Config
from carryover.data.prompts import PROMPTS, Prompt, PromptSource, read_prompts
from carryover.data.regeneration import RegenerateConfig
from carryover.data.responses import RESPONSES
from carryover.data.store import is_store, read_store
from carryover.data.synthesis import SynthesizeConfig
from carryover.drafters import checkpoint
from carryover.drafters.shipped import DrafterFolder, drafter_folder
from carryover.serving.config import ServeConfig
from carryover.serving.endpoint import running
from carryover.targets import resolve
from carryover.tracking import Tracker
from carryover.training.config import TrainConfig
from jobs.engine_pool import EnginePool
from jobs.regenerate import regenerate
from jobs.run_folder import Outcome
from jobs.synthesize import synthesize
from jobs.train import train
from jobs.train_view import View

DEFAULT_CONFIG = Path(__file__).parent / "configs" / "demo.yaml"
NUM_STAGES = 7


class DemoConfig(Config):
    """Settings of the demo: one section for each stage, as that stage's own command takes them."""

    num_bench_prompts: int = Field(
        12, ge=1, description="of the synthesised prompts, kept from training for the bench"
    )
    synthesize: SynthesizeConfig
    regenerate: RegenerateConfig
    baseline: DrafterFolder | None = Field(
        None, description="drafter to continue, such as embedded:dflash; null trains one"
    )
    train: TrainConfig
    carryover_name: str = Field("carryover", description="run that continues the baseline")
    carryover_steps: int = Field(30, ge=1, description="optimizer steps of it")
    serve: ServeConfig
    bench: OnlineConfig

    @model_validator(mode="after")
    def _fits_together(self) -> DemoConfig:
        targets = {
            part.target for part in (self.synthesize, self.regenerate, self.train, self.serve)
        }
        if len(targets) > 1:
            raise ValueError(f"all stages need the same target, got {', '.join(sorted(targets))}")
        if self.num_bench_prompts >= self.synthesize.num_prompts:
            raise ValueError(
                f"num_bench_prompts ({self.num_bench_prompts}) leaves nothing to train on of "
                f"synthesize.num_prompts ({self.synthesize.num_prompts})"
            )
        return self

    @property
    def carryover(self) -> TrainConfig:
        """The baseline's settings for its continuation, which vLLM checks when it serves it."""
        steps = self.carryover_steps
        update = {"name": self.carryover_name, "max_steps": steps, "verify_first": False}
        return self.train.model_copy(update=update)

    @property
    def training_prompts(self) -> int:
        """Prompts that are answered for training."""
        return self.synthesize.num_prompts - self.num_bench_prompts


class Screen(Protocol):
    """What shows the demo to the user; `carryover.commands.demo_display` has the real one."""

    def stage(self, number: int, title: str) -> None:
        """A stage begins."""

    def done(self, text: str, *, reused: bool, seconds: float) -> None:
        """The stage ended."""

    def jobs(self, what: str, hint: str) -> AbstractContextManager[Callable[[Any], None]]:
        """Show the events of a data job."""

    def arms(self) -> AbstractContextManager[Callable[[Any], None]]:
        """Show arms that start."""

    def requests(self) -> AbstractContextManager[Callable[[int, int, str], None]]:
        """Show requests of the bench."""


@dataclass(frozen=True)
class DemoOutcome:
    """What the demo made.

    Attributes:
        bench: the comparison of the arms.
        drafter: the Carryover checkpoint.
        baseline_trained_before: whether the baseline was not trained here.
        seconds: of the whole demo.
        tracking_uri: MLflow store that holds the records.
    """

    bench: BenchResult
    drafter: Path
    baseline_trained_before: bool
    seconds: float
    tracking_uri: str


def run_demo(
    config: DemoConfig, screen: Screen, *, tracking_uri: str | None = None, view: View | None = None
) -> DemoOutcome:
    """Run all stages.

    Raises:
        UserError: of the stage that failed; what the stages before it made is kept.
    """
    started = time.monotonic()
    tracker = Tracker(tracking_uri)
    tracker.open(config.train.experiment)
    with _stage(screen, 1, "target") as end:
        target = resolve(config.train.target)
        shape = target.load_config()
        end(f"{target.name}: {shape.num_hidden_layers} layers, vocabulary {shape.vocab_size:,}")
    _make_data(config, screen)
    with _stage(screen, 4, "baseline") as end:
        if config.baseline is None:
            trained = train(config.train, tracking_uri=tracking_uri, view=view)
            baseline = trained.best
            end(_describe(trained), reused=trained.reused)
        else:
            baseline = drafter_folder(config.baseline)
            end(_describe_trained(baseline))
    with _stage(screen, 5, "carryover") as end:
        carryover = train(
            config.carryover,
            kind="carryover",
            start_from=baseline,
            tracking_uri=tracking_uri,
            view=view,
        )
        end(_describe(carryover), reused=carryover.reused)
    with ExitStack() as served:
        with _stage(screen, 6, "serving") as end, screen.arms() as report:
            endpoint = served.enter_context(running(config.serve, report=report))
            end(f"{', '.join(endpoint.arms)} at {endpoint.url}/v1")
        with _stage(screen, 7, "bench") as end, screen.requests() as progress:
            bench = config.bench.model_copy(
                update={"url": endpoint.url, "metrics_url": endpoint.metrics_url}
            )
            result = run_bench(bench, tracker=tracker, on_progress=progress)
            end(f"{len(result.requests)} requests; rows in {_short(result.folder)}")
    return DemoOutcome(
        bench=result,
        drafter=carryover.best,
        baseline_trained_before=config.baseline is not None,
        seconds=time.monotonic() - started,
        tracking_uri=tracker.display_uri,
    )


def _describe(outcome: Outcome) -> str:
    progress = outcome.progress
    best = progress.best or {}
    length = best.get("acceptance_length", float("nan"))
    return (
        f"{progress.step:,} steps, held-out acceptance length {length:.2f}: {_short(outcome.best)}"
    )


def _describe_trained(folder: Path) -> str:
    found = checkpoint.describe(folder)
    length = (found["provenance"].get("evaluation") or {}).get("acceptance_length")
    known = "" if length is None else f", held-out acceptance length {length:.2f}"
    return f"trained before, {found['parameters'] / 1e6:.1f}M parameters{known}: {folder.name}"


def _make_data(config: DemoConfig, screen: Screen) -> None:
    """Prompts, then responses, by the same engines, which start only if something is missing."""
    with ExitStack() as engines:

        @cache
        def pool() -> EnginePool:
            settings = config.regenerate
            started = EnginePool(resolve(settings.target), settings.engine, settings.pool)
            return engines.enter_context(started)

        with (
            _stage(screen, 2, "prompts") as end,
            screen.jobs("prompts", config.synthesize.out) as report,
        ):
            missing = _count(config.synthesize.out, PROMPTS) < config.synthesize.num_prompts
            made = synthesize(config.synthesize, pool=pool() if missing else None, report=report)
            _keep_for_bench(config)
            end(f"{made.found:,} written by the target: {made.path}", reused=made.added == 0)
        with (
            _stage(screen, 3, "responses") as end,
            screen.jobs("responses", config.regenerate.out) as report,
        ):
            source = PromptSource(path=config.synthesize.out, limit=config.training_prompts)
            settings = config.regenerate.model_copy(update={"prompts": [source]})
            missing = _count(settings.out, RESPONSES) < config.training_prompts
            answered = regenerate(settings, pool=pool() if missing else None, report=report)
            end(
                f"{answered.rows:,} by the target: {answered.path}", reused=not answered.counts.done
            )


def _keep_for_bench(config: DemoConfig) -> None:
    """Write the prompts that training does not see to a file of their own."""
    kept = read_prompts(config.synthesize.out)[config.training_prompts :]
    path = Path(config.bench.prompts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(_line(prompt) for prompt in kept), encoding="utf-8")


def _line(prompt: Prompt) -> str:
    row = {"turns": list(prompt.turns), "category": prompt.category, "source": prompt.source}
    return json.dumps(row, ensure_ascii=False) + "\n"


def _count(folder: str | Path, schema: pa.Schema) -> int:
    """Rows that a store holds, those of an interrupted part included."""
    return read_store(folder, schema).num_rows if is_store(Path(folder)) else 0


@contextmanager
def _stage(screen: Screen, number: int, title: str) -> Iterator[Callable[..., None]]:
    started = time.monotonic()
    screen.stage(number, title)

    def end(text: str, *, reused: bool = False) -> None:
        screen.done(text, reused=reused, seconds=time.monotonic() - started)

    yield end


def _short(path: Path) -> Path:
    """Relative to the working folder where it lies in it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def remove(config: DemoConfig) -> None:
    """Delete what an earlier demo made: the folders that the configuration names."""
    runs = Path(config.train.runs_folder)
    folders = (
        Path(config.synthesize.out),
        Path(config.regenerate.out),
        runs / config.train.name,
        runs / config.carryover_name,
        config.bench.out,
    )
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
