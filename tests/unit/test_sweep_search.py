"""What is tried next: samples, and Optuna over kills of the driver."""

from dataclasses import dataclass

import pytest

from sweeps.search import Listed, OptunaSearch, sample, score_of
from sweeps.settings import SearchSettings


@dataclass(frozen=True)
class Item:
    x: int
    y: int

    @property
    def name(self):
        return f"{self.x}-{self.y}"


ITEMS = {(("x", x), ("y", y)): Item(x, y) for x in range(4) for y in range(4)}
PLAIN = [Item(-1, y) for y in range(4)]


class World:
    """Which items were measured, to what score."""

    def __init__(self, folder, **settings):
        self.file, self.scores, self.failed = folder / "optuna.db", {}, set()
        self.settings = {"kind": "optuna", "num_settings": 10, **settings}

    def driver(self, **options):
        return OptunaSearch(
            ITEMS, SearchSettings(**self.settings), self.file,
            over=lambda item: item.name in self.scores or item.name in self.failed,
            score=self.scores.get, **options,
        )  # fmt: skip

    def measure(self, search, item):
        self.scores[item.name] = (float(item.x + item.y), 1.0)
        search.tell(item.name, self.scores[item.name])


def test_a_list_leaves_out_what_is_over():
    search = Listed(list(ITEMS.values()), over=lambda item: item.x > 0)
    given = [search.next() for _ in range(5)]
    assert [item.y for item in given[:4]] == [0, 1, 2, 3] and given[4] is None


def test_a_sample_is_a_function_of_its_seed_and_comes_after_its_references():
    settings = SearchSettings(kind="random", num_settings=5, seed=3)
    items = list(ITEMS.values())

    def references(item):
        return [plain for plain in PLAIN if plain.y == item.y]

    first = sample(items, settings, references=references)
    assert first == sample(items, settings, references=references)
    drawn = [item for item in first if item.x >= 0]
    assert len(set(drawn)) == 5
    assert {p.y for p in first if p.x < 0} == {item.y for item in drawn}
    larger = sample(items, SearchSettings(kind="random", num_settings=9, seed=3))
    assert set(drawn) < set(larger)
    assert sample(items, SearchSettings(kind="random", num_settings=99)) != items
    assert len(sample(items, SearchSettings(kind="random", num_settings=99))) == 16


def test_optuna_asks_for_different_settings_and_learns(tmp_path):
    world = World(tmp_path, num_settings=12)
    search = world.driver()
    given = []
    while (item := search.next()) is not None:
        given.append(item)
        world.measure(search, item)
    assert len({item.name for item in given}) == len(given) == 12
    assert max(world.scores.values())[0] == 6.0, "the best corner of 16 is among 12"


def test_more_settings_than_there_are_is_all_of_them(tmp_path):
    world = World(tmp_path, num_settings=99)
    search = world.driver()
    while (item := search.next()) is not None:
        world.measure(search, item)
    assert len(world.scores) == 16


def test_a_killed_driver_loses_and_repeats_nothing(tmp_path):
    world = World(tmp_path)
    first = world.driver()
    for _ in range(4):
        world.measure(first, first.next())
    # one was measured, but Optuna was not told; one was being measured; one failed untold
    untold, open_, failed = first.next(), first.next(), first.next()
    world.scores[untold.name] = (1.0, 1.0)
    world.failed.add(failed.name)
    before = set(world.scores) | world.failed

    second = world.driver()
    given = []
    while (item := second.next()) is not None:
        given.append(item)
        world.measure(second, item)
    assert given[0] == open_
    assert not {item.name for item in given} & before
    assert len(world.scores) + len(world.failed) == 10
    assert world.driver().next() is None


def test_settings_measured_by_an_earlier_grid_are_told_and_not_repeated(tmp_path):
    world = World(tmp_path, num_settings=16)
    for item in list(ITEMS.values())[:10]:
        world.scores[item.name] = (float(item.x + item.y), 1.0)
    search = world.driver()
    given = []
    while (item := search.next()) is not None:
        given.append(item)
        world.measure(search, item)
    assert len(given) == 6


def test_references_come_first_and_once(tmp_path):
    world = World(tmp_path, num_settings=16)
    search = world.driver(references=lambda item: [p for p in PLAIN if p.y == item.y])
    order = []
    while (item := search.next()) is not None:
        order.append(item)
        if item.x >= 0:
            world.measure(search, item)
    for y in range(4):
        mine = [item for item in order if item.y == y]
        assert mine[0].x == -1 and [item.x for item in mine].count(-1) == 1


def test_failures_and_two_objectives_are_told(tmp_path):
    import optuna

    world = World(tmp_path, num_settings=3)
    search = world.driver(both=True)
    search.tell(search.next().name, (5.0, 2.0))
    search.tell(search.next().name, None)
    search.tell(search.next().name, (4.0, float("inf")))
    study = optuna.load_study(study_name="sweep", storage=f"sqlite:///{world.file}")
    assert [trial.values for trial in study.trials] == [[5.0, 2.0], None, None]
    states = [trial.state.name for trial in study.trials]
    assert states == ["COMPLETE", "FAIL", "FAIL"]


def test_a_score_needs_every_load():
    figures = {(0.0, 1): (4.0, 10.0), (0.0, 8): (9.0, 40.0)}
    assert score_of(figures, 2) == pytest.approx((6.0, 20.0))
    assert score_of(figures, 3) is None
