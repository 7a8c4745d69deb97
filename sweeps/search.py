"""Which settings a sweep tries next: all, a sample, or those that Optuna asks for; no Ray.

None of them keeps state that a killed driver could lose: a grid and a sample are functions of the
configuration, Optuna's study is an SQLite file in the sweep's folder, and what was measured is in
the ledger. A *choice* is a setting as sorted (name, value) pairs; its *references* are settings
without a drafter that it will be compared with, and that are tried before it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sweeps.halving import overall
from sweeps.settings import SearchSettings

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial, Trial

# Optuna repeats itself in a small space; after so many repetitions something new is drawn for it
MAX_REPEATS = 20

Choice = tuple[tuple[str, Any], ...]
Score = tuple[float, ...]


class Wait(Enum):
    """There may be more settings, once results of running ones are in."""

    WAIT = "wait"


class Named(Protocol):
    """A setting."""

    @property
    def name(self) -> str:
        """Unique in the sweep."""


class Search(Protocol):
    """Gives settings one by one, and is told how they did."""

    def next(self) -> Named | Wait | None:
        """The next setting to try, `Wait.WAIT`, or None when there is no more."""

    def tell(self, setting: str, score: Score | None) -> None:
        """A setting ended: what it reached, or None if it failed or was stopped."""


class Listed:
    """Settings that are known in advance."""

    def __init__(self, settings: Sequence[Named], *, over: Callable[[Named], bool]) -> None:
        self._left = deque(setting for setting in settings if not over(setting))

    def next(self) -> Named | None:
        """The next that is not over."""
        return self._left.popleft() if self._left else None

    def tell(self, setting: str, score: Score | None) -> None:
        """Nothing to learn."""


def sample(
    settings: Sequence[Named],
    search: SearchSettings,
    *,
    references: Callable[[Named], Sequence[Named]] = lambda setting: (),
) -> list[Named]:
    """A random sample, after the references of all that is in it; a larger one holds it whole."""
    shuffled = list(settings)
    random.Random(search.seed).shuffle(shuffled)
    chosen = shuffled[: search.num_settings]
    first = {each.name: each for setting in chosen for each in references(setting)}
    return [*first.values(), *chosen]


class OptunaSearch:
    """Settings that Optuna's TPE sampler asks for.

    Args:
        choices: all settings that may be asked for.
        search: how many, and the seed.
        file: of the study.
        over: whether a setting needs no more measuring.
        score: of a setting that was measured to its end, the first value to be large and the
            second, if both count, small; None of others.
        both: whether the second value counts too.
        references: of a setting.
    """

    def __init__(
        self,
        choices: Mapping[Choice, Named],
        search: SearchSettings,
        file: Path,
        *,
        over: Callable[[Named], bool],
        score: Callable[[str], Score | None],
        both: bool = False,
        references: Callable[[Named], Sequence[Named]] = lambda setting: (),
    ) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna, self._choices, self._search = optuna, choices, search
        self._over, self._score, self._references = over, score, references
        self._wanted = min(search.num_settings, len(choices))
        self._waiting: deque[Named] = deque()
        self._asked: dict[str, Trial | FrozenTrial] = {}
        self._given: set[str] = set()
        self._referred: set[str] = set()
        storage = optuna.storages.RDBStorage(
            f"sqlite:///{file}", engine_kwargs={"connect_args": {"timeout": 30}}
        )
        studies = storage.get_all_studies()
        known = storage.get_n_trials(studies[0]._study_id) if studies else 0
        self._study = optuna.create_study(
            study_name="sweep",
            storage=storage,
            load_if_exists=True,
            directions=["maximize", "minimize"] if both else ["maximize"],
            # another seed each time, or a resumed sweep would draw its first settings again
            sampler=optuna.samplers.TPESampler(seed=search.seed + known),
        )
        self._adopt()

    def _adopt(self) -> None:
        """Go on with what an earlier driver asked for: open trials are settled, or run first."""
        state = self._optuna.trial.TrialState
        for trial in self._study.get_trials(deepcopy=False):
            setting = self._choices.get(tuple(sorted(trial.params.items())))
            is_open = trial.state == state.RUNNING
            if setting is None or setting.name in self._given:
                if is_open:
                    self._study.tell(trial.number, state=state.FAIL)
                continue
            self._given.add(setting.name)
            if is_open and self._over(setting):
                self._settle(trial.number, self._score(setting.name))
            elif not self._over(setting):
                # cut off, or settled before a load was added to the sweep
                if is_open:
                    self._asked[setting.name] = trial
                self._offer(setting)

    def next(self) -> Named | None:
        """What an earlier driver left, then a new suggestion until there are `num_settings`."""
        repeats = 0
        while not self._waiting and len(self._given) < self._wanted:
            if repeats >= MAX_REPEATS:
                unseen = [c for c, s in self._choices.items() if s.name not in self._given]
                draw = random.Random(self._search.seed + len(self._given))
                self._study.enqueue_trial(dict(draw.choice(unseen)))
            setting = self._ask()
            if setting is None:
                repeats += 1
            else:
                self._offer(setting)
        return self._waiting.popleft() if self._waiting else None

    def _ask(self) -> Named | None:
        """One suggestion; None if that setting was given or measured, of which Optuna is told."""
        trial = self._study.ask(self._distributions())
        setting = self._choices[tuple(sorted(trial.params.items()))]
        if setting.name in self._given or self._over(setting):
            self._given.add(setting.name)
            self._settle(trial.number, self._score(setting.name))
            return None
        self._given.add(setting.name)
        self._asked[setting.name] = trial
        return setting

    def _offer(self, setting: Named) -> None:
        for reference in self._references(setting):
            if reference.name not in self._referred and not self._over(reference):
                self._waiting.append(reference)
            self._referred.add(reference.name)
        self._waiting.append(setting)

    def tell(self, setting: str, score: Score | None) -> None:
        """Let Optuna learn from an ended setting."""
        trial = self._asked.pop(setting, None)
        if trial is not None:
            self._settle(trial.number, score)

    def _settle(self, number: int, score: Score | None) -> None:
        told = None if score is None else score[: len(self._study.directions)]
        if told is None or not all(isfinite(value) for value in told):
            self._study.tell(number, state=self._optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(number, list(told))

    def _distributions(self) -> dict[str, Any]:
        values: dict[str, dict[Any, None]] = {}
        for choice in self._choices:
            for name, value in choice:
                values.setdefault(name, {})[value] = None
        category = self._optuna.distributions.CategoricalDistribution
        return {name: category(list(each)) for name, each in values.items()}


def score_of(figures: Mapping[tuple, tuple[float, float]], num_loads: int) -> Score | None:
    """(throughput that counts, TPOT) over all loads; None while a load is missing.

    Args:
        figures: (throughput under the limit, TPOT in ms) by load.
        num_loads: of the sweep.
    """
    if len(figures) < num_loads:
        return None
    tpots = [tpot if isfinite(tpot) else inf for _, tpot in figures.values()]
    return overall(rate for rate, _ in figures.values()), overall(tpots)
