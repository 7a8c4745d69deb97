"""Sweep decoding settings with Ray Tune: a trial starts one engine and measures it at every load.

Measuring is `carryover.bench`'s own code, against the endpoint that `carryover.serving` starts, so
figures are those of `platform bench online`. Trials run one at a time: two engines on the same
cores would measure each other. The driver writes every measurement to `measurements.jsonl` as it
comes, and MLflow's records: a parent for the sweep, a child for each measurement, a failed child
for each engine that did not start. Running the same sweep again measures what is missing.
"""

from __future__ import annotations

import json
import logging
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ray import tune

from carryover.errors import ConfigError, ServingError, UserError
from carryover.tracking import Run, Tracker
from sweeps.settings import Measurement, Setting, SweepConfig, choose, settings_of, unfinished

EXPERIMENT = "sweeps"

# what happens in a sweep: measurements in hand, measurements in all, what came, why it failed
Progress = Callable[[int, int, Measurement | Setting, str | None], None]

logger = logging.getLogger(__name__)


def measure(trial: dict[str, Any]) -> None:
    """The trial: serve one setting, bench it at every load, report after each.

    Args:
        trial: `config` (values of a SweepConfig with absolute paths) and `setting`.
    """
    config, setting = SweepConfig.parse(trial["config"]), Setting(**trial["setting"])
    try:
        for measurement in _measurements(config, setting):
            tune.report({"measurement": asdict(measurement)})
    except Exception as error:
        known = isinstance(error, UserError)
        tune.report({"failure": str(error) if known else traceback.format_exc()})
        raise


def _measurements(config: SweepConfig, setting: Setting) -> Iterator[Measurement]:
    from carryover.bench import online
    from carryover.serving.endpoint import running

    application = config.serve.model_copy(update={"arms": [setting.served()]})
    with running(application) as endpoint:
        for temperature, concurrency in config.loads():
            bench = online.OnlineConfig(
                url=endpoint.url,
                arms=[setting.name],
                prompts=config.prompts,
                num_prompts=config.num_prompts,
                concurrency=concurrency,
                max_tokens=config.max_tokens,
                temperature=temperature,
                seed=config.seed,
                out=config.out / "requests" / setting.name,
            )
            figures = online.run(bench).summaries[setting.name].metrics()
            yield Measurement(setting.name, temperature, concurrency, figures)


def run(
    config: SweepConfig, *, tracker: Tracker | None = None, on_progress: Progress | None = None
) -> list[Measurement]:
    """Measure what a sweep still lacks; returns all its measurements.

    Args:
        config: the sweep.
        tracker: where to record it; None records nothing.
        on_progress: called with each measurement, and with each setting that failed.

    Raises:
        ConfigError: `out` holds another sweep's results.
        ServingError: no engine of the sweep could be measured.
    """
    config = config.absolute()
    results = Results(config)
    missing = unfinished(config, results.measured)
    if missing:
        name = config.out.name
        opened = (
            nullcontext()
            if tracker is None
            else tracker.run(experiment=EXPERIMENT, name=name, tags={"carryover.sweep": name})
        )
        with opened as parent:
            if parent is not None:
                parent.log_params(config.model_dump(mode="json"))
            _run_trials(config, missing, Recorder(results, config, parent, on_progress))
            if parent is not None and results.measured:
                parent.log_dict([asdict(c) for c in choose(config, results.measured)], "best.json")
    if not results.measured:
        raise ServingError(f"no engine of the sweep could be measured; see {results.failures}")
    return results.measured


def _run_trials(config: SweepConfig, settings: list[Setting], recorder: Recorder) -> None:
    from carryover.serving.cluster import connected, serve_started

    # Tune's own files and its handling of Ctrl-C, which would only mark the sweep as stopped.
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
    one = config.serve.model_copy(update={"arms": config.serve.arms[:1]})
    # Serve starts here: started by a trial, it would live in the trial's placement group.
    with (
        connected(one, os.environ.get("RAY_ADDRESS")) as ours,
        serve_started(one, ours=ours) as http,
    ):
        served = config.model_copy(update={"serve": config.serve.model_copy(update={"http": http})})
        tuner = tune.Tuner(
            # an engine reserves its own CPUs and GPUs; the trial itself only waits for it
            tune.with_resources(measure, {"CPU": 0.1}),
            param_space={
                "config": served.model_dump(mode="json"),
                "setting": tune.grid_search([asdict(setting) for setting in settings]),
            },
            tune_config=tune.TuneConfig(max_concurrent_trials=1, reuse_actors=True),
            run_config=tune.RunConfig(
                name="tune", storage_path=str(config.out), verbose=0, callbacks=[recorder]
            ),
        )
        tuner.fit()


class Results:
    """What a sweep's folder holds.

    Raises:
        ConfigError: the folder belongs to another sweep.
    """

    def __init__(self, config: SweepConfig) -> None:
        self.file = config.out / "measurements.jsonl"
        self.failures = config.out / "failures.jsonl"
        self.measured: list[Measurement] = []
        kept = config.out / "sweep.yaml"
        if not kept.exists():
            config.out.mkdir(parents=True, exist_ok=True)
            kept.write_text(config.to_yaml())
        elif kept.read_text() != config.to_yaml():
            raise ConfigError(
                f"{config.out} holds the results of a sweep with other settings ({kept}); "
                "give this one another `out`, or remove that folder"
            )
        if self.file.exists():
            # a line that was cut by a kill is measured again
            lines = [line for line in self.file.read_text().splitlines(True) if line.endswith("\n")]
            self.file.write_text("".join(lines))
            for line in lines:
                self._keep(Measurement(**json.loads(line)))

    def add(self, measurement: Measurement) -> None:
        """Keep a measurement, on disk before anything else happens."""
        _append(self.file, asdict(measurement))
        self._keep(measurement)

    def _keep(self, measurement: Measurement) -> None:
        """A load that is measured again, with its engine, replaces what was there."""
        self.measured = [kept for kept in self.measured if kept.title != measurement.title]
        self.measured.append(measurement)

    def fail(self, setting: str, reason: str) -> None:
        """Keep why an engine could not be measured."""
        _append(self.failures, {"setting": setting, "reason": reason})


def _append(file: Path, values: dict[str, Any]) -> None:
    with file.open("a") as out:
        out.write(json.dumps(values) + "\n")
        out.flush()
        os.fsync(out.fileno())


class Recorder(tune.Callback):
    """Keeps what trials report, in the driver: on disk and in MLflow."""

    def __init__(
        self,
        results: Results,
        config: SweepConfig,
        parent: Run | None,
        on_progress: Progress | None,
    ) -> None:
        self.results, self.parent, self.on_progress = results, parent, on_progress
        self.total = len(settings_of(config)) * len(config.loads())
        self.failed: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: Tune pickles callbacks for its own resuming, which is not used."""
        return {}

    def on_trial_result(self, iteration, trials, trial, result, **info) -> None:
        """Called by Tune with every report of a trial."""
        if "failure" in result:
            self._fail(Setting(**trial.config["setting"]), result["failure"])
        elif "measurement" in result:
            self._keep(Measurement(**result["measurement"]), trial.config["setting"])

    def on_trial_error(self, iteration, trials, trial, **info) -> None:
        """Called by Tune when a trial failed, which it has told unless its process died."""
        setting = Setting(**trial.config["setting"])
        if setting.name not in self.failed:
            self._fail(setting, "the trial's process died; most often memory ran out")

    def _keep(self, measurement: Measurement, setting: Mapping[str, Any]) -> None:
        self.results.add(measurement)
        self._tell(measurement)
        if self.parent is None:
            return
        with self.parent.child(measurement.title) as child:
            load = {
                "temperature": measurement.temperature,
                "concurrency": measurement.concurrency,
            }
            child.log_params({**setting, **load})
            child.log_metrics(measurement.figures)

    def _fail(self, setting: Setting, reason: str) -> None:
        self.failed.add(setting.name)
        self.results.fail(setting.name, reason)
        self._tell(setting, reason)
        if self.parent is None:
            return
        try:
            with self.parent.child(setting.name) as child:
                child.log_params(asdict(setting))
                child.log_text(reason, "error.txt")
                raise ServingError(reason)
        except ServingError:
            logger.debug("recorded that %s failed", setting.name)

    def _tell(self, what: Measurement | Setting, problem: str | None = None) -> None:
        if self.on_progress is not None:
            self.on_progress(len(self.results.measured), self.total, what, problem)
