"""Rules of sweeps that hold whatever was measured: kills, fronts, time."""

import tempfile
from math import isclose
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from sweeps.answer import Gain, Point, crossings, pareto
from sweeps.halving import why_stop
from sweeps.ledger import Ledger
from sweeps.plan import makespan
from sweeps.settings import EarlyStop, Load, Setting

rates = st.floats(0.1, 1e4)


def open_ledger(folder):
    return Ledger(folder, {}, kept=("rate",), part=("part",))


def row(number):
    return {"setting": f"s{number // 3}é", "part": number % 3, "figures": {"rate": float(number)}}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 12), st.data())
def test_a_ledger_cut_anywhere_keeps_whole_lines_and_can_be_completed(count, data):
    with tempfile.TemporaryDirectory() as name:
        ledger = open_ledger(Path(name))
        for number in range(count):
            ledger.add(row(number))
        whole = ledger.rows_file.read_bytes() if count else b""
        at = data.draw(st.integers(0, len(whole)))
        ledger.rows_file.write_bytes(whole[:at])
        again = open_ledger(Path(name))
        kept = list(again.rows())
        assert kept == [row(number) for number in range(len(kept))]
        assert whole[:at].startswith(ledger.rows_file.read_bytes())
        added = [again.add(row(number)) for number in range(count)]
        assert added == [False] * len(kept) + [True] * (count - len(kept))
        assert (ledger.rows_file.read_bytes() if count else b"") == whole


@given(st.lists(st.tuples(rates, rates), max_size=30))
def test_the_front_beats_everything_and_nothing_beats_it(pairs):
    points = [
        Point(Setting("a", None, None), Load(0.0, 1), rate, tpot_ms=tpot) for tpot, rate in pairs
    ]
    front = pareto(points)

    def beats(one, other):
        return one.tpot_ms <= other.tpot_ms and one.rate >= other.rate

    assert all(any(beats(best, point) for best in front) for point in points)
    for one in front:
        assert not any(beats(other, one) for other in front if other is not one)
    assert [p.tpot_ms for p in front] == sorted(p.tpot_ms for p in front)


@given(st.lists(st.floats(0, 1000), max_size=40), st.integers(1, 16))
def test_a_plan_is_no_shorter_than_its_work_and_not_much_longer(durations, slots):
    found = makespan(durations, slots)
    longest, share = max(durations, default=0.0), sum(durations) / slots
    assert found >= longest or isclose(found, longest)
    assert found >= share or isclose(found, share)
    assert found <= share + longest + 1e-6


@given(st.dictionaries(st.integers(1, 512), st.floats(0.1, 5), min_size=2, max_size=8))
def test_a_crossing_lies_between_loads_that_differ(curve):
    setting = Setting("a", "d", 2)
    gains = [
        Gain(Point(setting, Load(0.0, clients), ratio), ratio, ratio, ratio)
        for clients, ratio in curve.items()
    ]
    (found,) = crossings(gains)
    clients = sorted(curve)
    if found.kind == "always":
        assert curve[clients[-1]] >= 1
    elif found.kind == "never":
        assert all(ratio < 1 for ratio in curve.values())
    else:
        few = max(c for c in clients if curve[c] >= 1)
        many = min(c for c in clients if c > few)
        assert few * 0.999 <= found.concurrency <= many * 1.001
        assert all(curve[c] < 1 for c in clients if c > few)


@given(st.lists(st.tuples(rates, rates), min_size=1, max_size=20), st.floats(0, 0.5))
def test_the_best_at_a_load_is_never_stopped(pairs, margin):
    loads = [(0.0, 1), (0.0, 32), (0.0, 8)]
    rule = EarlyStop(after_loads=2, reduction_factor=2, margin=margin)
    measured = {f"s{n}": dict(zip(loads, pair, strict=False)) for n, pair in enumerate(pairs)}
    stopped = {name for name in measured if why_stop(name, measured, loads, rule)}
    for load in loads[:2]:
        best = max(each[load] for each in measured.values())
        assert not {name for name, each in measured.items() if each[load] == best} & stopped
