"""`platform results` from a real MLflow store, filled by benches of known truth."""

import re
import shutil
import sys
from unittest import mock

import pytest
import yaml
from results_scenes import record_bench, record_diagnoses, record_training

from carryover import cli
from carryover.bench import statistics
from carryover.bench.records import Condition
from carryover.tracking import Tracker

DFLASH = {"baseline": ["b"], "control": ["k1", "k2"], "carryover": ["c1", "c2"]}
MARKOV = {"baseline": ["mb"], "control": ["mk"], "carryover": ["mc"]}
# Carryover gains 10% as DFlash, and nothing as Markov
LENGTHS = {
    "ar": None, "b": 2.4, "k1": 2.4, "k2": 2.4, "c1": 2.64, "c2": 2.64,
    "mb": 1.8, "mk": 1.8, "mc": 1.8,
}  # fmt: skip
ONLINE = {name: LENGTHS[name] for name in ("ar", "b", "k1", "c1")}


@pytest.fixture(autouse=True, scope="module")
def few_resamples():
    with mock.patch.object(statistics, "RESAMPLES", 300):
        yield


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """URI of the store, and ids of its runs by what they are; the benches' folders are gone."""
    folder = tmp_path_factory.mktemp("results")
    tracker = Tracker(f"sqlite:///{folder}/store.db")
    benches = folder / "benches"
    loads = [Condition("online", 0.0, load) for load in (1, 32)]
    ids = {
        "offline": record_bench(tracker, benches / "a", LENGTHS, count=96),
        "sweep": record_bench(tracker, benches / "b", ONLINE, mode="online", conditions=loads),
        "invalid": record_bench(
            tracker, benches / "c", {"b": 2.4, "c1": 2.64}, miscount=3.0, count=16,
            conditions=[Condition("offline", 1.0)],
        ),
    }  # fmt: skip
    record_bench(
        tracker, benches / "d", {"b": 2.4, "c1": 2.64}, mode="online", stop_after=4,
        conditions=[Condition("online", 1.0, 1)],
    )  # fmt: skip
    shutil.rmtree(benches)
    record_training(tracker, "small", "baseline", hours=2.0, acceptance=2.3)
    record_training(
        tracker, "small-carryover", "carryover", hours=0.25, states_hours=0.25, acceptance=2.5
    )
    record_training(tracker, "small-control", "control", hours=0.25)
    record_diagnoses(tracker)
    ids["twice"] = [record_training(tracker, "twice", "baseline") for _ in range(2)]
    return tracker.uri, ids


def section(**values):
    return {
        "name": "Laboratory target", "text": "Small, and trained *here*.", "autoregressive": "ar",
        "regimes": {"dflash": DFLASH, "markov": MARKOV}, **values,
    }  # fmt: skip


@pytest.fixture
def results(store, tmp_path, monkeypatch, capsys):
    """Run the command; its exit status and what it said."""

    def run(*sections, arguments=(), out=tmp_path / "docs" / "RESULTS.md"):
        config = tmp_path / "results.yaml"
        config.write_text(yaml.safe_dump({"title": "Does it pay?", "sections": list(sections)}))
        words = ["results", "-c", config, "-o", out, "--tracking-uri", store[0], *arguments]
        monkeypatch.setattr(sys, "argv", ["platform", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, " ".join("".join(capsys.readouterr()).split())

    return run


@pytest.fixture
def whole(store):
    _, ids = store
    return [
        section(
            offline=[ids["offline"]], online=[ids["sweep"]],
            training=["small", "small-carryover", "small-control"],
            diagnostics=["small headroom", "small replay"], ablation=["small replay"],
            tried=[{"what": "twice the marker", "run": "small-control", "gave": "nothing"}],
        ),
        {"name": "Embedded target"},
    ]  # fmt: skip


def row(text, *beginning):
    """Cells of the only table row that begins so."""
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")]
            for line in text.splitlines() if line.startswith("| ")]  # fmt: skip
    (found,) = [cells for cells in rows if cells[: len(beginning)] == list(beginning)]
    return [cell.replace("<br>", " ") for cell in found]


def interval(text):
    """Value, low and high of a figure."""
    return [float(number) for number in re.findall(r"[-+]?\d+\.\d+", text)]


def goals(text, section="Laboratory target"):
    """Verdicts by drafter and the beginning of the goal."""
    part = text.split("## Goals")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in part.splitlines() if section in line]
    return {(drafter, goal.split(":")[0]): verdict for _, drafter, goal, _, verdict in rows}


def test_the_page_holds_what_was_planted(results, whole, tmp_path):
    code, said = results(*whole)
    assert code == 0 and "RESULTS.md and 3 figures" in said
    text = (tmp_path / "docs" / "RESULTS.md").read_text()
    check_goals(text)
    check_tables(text)
    source = text.split("## Where the numbers come from")[1]
    assert re.search(r"`[0-9a-f]{10}`", source) and "torch" in source and "cores of" in source
    assert "\n\n\n" not in text and not re.search(r"\bnan\b", text) and str(tmp_path) not in text
    shown = re.findall(r"\]\((results/[^)]+)\)", text)
    assert len(shown) == 3
    for name in shown:
        assert (tmp_path / "docs" / name).read_bytes()[:4] == b"\x89PNG"


def test_the_page_can_be_made_again_without_the_store(results, whole, tmp_path, store):
    """From the runs that were kept beside it, in which nothing tells of the machine."""
    assert results(*whole)[0] == 0
    docs = tmp_path / "docs"
    page = (docs / "RESULTS.md").read_text()
    kept = sorted((docs / "results" / "runs").iterdir())
    assert [file.suffix for file in kept].count(".parquet") == 2 and len(kept) == 9
    told = "".join(file.read_text() for file in kept if file.suffix == ".json")
    for secret in (str(tmp_path), "someone", "carryover.host", "LD_PRELOAD"):
        assert secret not in told
    (docs / "RESULTS.md").unlink()
    elsewhere = ["--tracking-uri", f"sqlite:///{tmp_path}/empty.db"]
    assert results(*whole, arguments=elsewhere)[0] == 0
    assert (docs / "RESULTS.md").read_text() == page
    assert results(*whole, arguments=[*elsewhere, "--check"])[0] == 0
    kept[0].write_text("{")
    code, said = results(*whole, arguments=elsewhere)
    assert code == 2 and "restore it" in said


def check_goals(text):
    found = goals(text)
    gain = "acceptance gain over the {} at T=0, offline"
    assert found["dflash", gain.format("baseline")] == "**met**"
    assert found["dflash", gain.format("control")] == "**met**"
    for other in ("baseline", "control"):
        assert "the interval has 0 in it" in found["markov", gain.format(other)]
    length = "baseline acceptance length at T=0, offline"
    assert found["dflash", length] == "**met**"
    assert re.fullmatch(r"\*\*missed: by 0\.[12]\d\*\*", found["markov", length])
    assert found["all", "speed-up of the best arm at concurrency 1, T=0, online"] == "**met**"
    load = "throughput gain over the baseline at every concurrency 1..32, T=0, online"
    assert found["dflash", load] == "**met**" and found["markov", load] == "not measured"
    assert set(goals(text, "Embedded target").values()) == {"not measured"}
    empty = text.split("\n## Embedded target")[1].split("\n## ")[0]
    assert empty.count("Not measured yet.") >= 3 and "|" not in empty


def check_tables(text):
    offline = text.split("T=0, by set")[1].split("####")[0]
    dflash, markov = offline.split("**markov**")
    micro = row(dflash, "**micro average**", "96")
    value, low, high = interval(micro[5])
    assert low < 10.0 < high and low > 4.0 and value == pytest.approx(10, abs=3)
    assert interval(micro[2])[0] == pytest.approx(2.4, abs=0.05)
    assert interval(micro[7])[0] == pytest.approx(2.4 * 0.9, abs=0.08)
    macro = interval(row(dflash, "**macro average**", "96")[5])
    assert macro[1] < 10.0 < macro[2]
    assert interval(row(dflash, "chat", "48")[4])[0] == pytest.approx(2.64, abs=0.1)
    null = interval(row(markov.split("![")[0], "**micro average**", "96")[5])
    assert null[1] < 0 < null[2]
    seeds = text.split("Gain in acceptance length, seed by seed:")[1].split("####")[0]
    for arm in ("c1", "c2", "**all 2 seeds**"):
        assert interval(row(seeds, "dflash", "T=0", arm)[4])[1] > 2
    assert "One seed of markov" in seeds
    positions = row(text.split("by position")[1].split("###")[0], "dflash", "baseline")
    # the rates add up to the acceptance length less 1
    assert sum(map(float, positions[2:])) == pytest.approx(interval(micro[2])[0] - 1, abs=0.008)
    online = text.split("online, concurrency 1")[1]
    assert row(online, "–", "autoregressive", "ar")[5] == "–"
    sweep = text.split("sweep over concurrency")[1]
    assert interval(row(sweep, "32", "48")[6])[1] > 2
    carried = text.split("is there anything to carry?")[1].split("\n### ")[0]
    (headroom,) = set(re.findall(r"`small headroom` \(`\w{8}`\)", carried))
    cells = row(carried, headroom, "90")
    rates = ["2.50", "1.75", "0.50", "0.25", "0.125"]
    assert cells[2:] == [*rates, "2.10", "2.17", "+3.4% [+1.1, +5.8]"]
    assert row(carried, headroom, "only the rejected row")[2:] == ["0.062", "0.125"]
    (replay,) = set(re.findall(r"`small replay` \(`\w{8}`\)", carried))
    assert row(carried, replay)[1:] == ["90", "2.25", "2.20", "–", "+5.0 ± 1.3", "–"]
    variants = text.split("what to carry, and how to mark it")[1].split("\n### ")[0]
    assert row(variants, "target tokens", "none")[3:] == [
        "90", "2.25", "2.20", "–", "+0.050 ± 0.031", "–"
    ]  # fmt: skip
    training = text.split("what training cost")[1]
    cost = row(training, next(c for c in re.findall(r"`small-carryover` \(`\w{8}`\)", training)))
    seen = ["carryover", "dflash", "100", "5,000,000"]
    assert cost[1:] == [*seen, "0.50", "0.25", "2", "1.00", "2.50"]
    assert row(training, "dflash", "32")[2:4] == ["1.00", "0.50"]
    assert row(text, "twice the marker")[2] == "nothing"
    assert "4.85" in text.split("## The paper's numbers")[1]


def test_check_tells_what_is_out_of_date(results, store, tmp_path):
    _, ids = store
    arms = {"dflash": {"baseline": ["b"], "carryover": ["c1"]}}
    whole = [section(online=[ids["sweep"]], regimes=arms), {"name": "Embedded target"}]
    out = tmp_path / "docs" / "RESULTS.md"
    assert results(*whole, arguments=["--check"]) == (
        2, f"error: the page is not what MLflow gives: there is no {out}. Write it again without "
        "--check",
    )  # fmt: skip
    assert not out.exists()
    results(*whole)
    text = out.read_text()
    pictures = {path.name: path.read_bytes() for path in out.parent.glob("results/*.png")}
    # everything is computed again, and is the same
    assert results(*whole, arguments=["--check"])[0] == 0
    out.write_text(text.replace("**met**", "**surpassed**", 1))
    (out.parent / "results" / "old.png").write_bytes(b"")
    first = next(iter(pictures))
    (out.parent / "results" / first).write_bytes(b"")
    code, said = results(*whole, arguments=["--check"])
    assert code == 2
    for expected in ("RESULTS.md differs, first in line", f"{first} differs", "old.png is of no"):
        assert expected in said, expected
    results(*whole)
    assert out.read_text() == text
    assert (out.parent / "results" / first).read_bytes() == pictures[first]


def test_invalid_and_partial_runs_are_marked(results, store, tmp_path):
    _, ids = store
    cut = next(
        run for run in Tracker(store[0]).client().search_runs(
            [Tracker(store[0]).client().get_experiment_by_name("bench").experiment_id]
        ) if run.info.run_name == "online T=1 c=1"
    )  # fmt: skip
    arms = {"dflash": {"baseline": ["b"], "carryover": ["c1"]}}
    # a bench by its name, which no other has
    given = section(
        regimes=arms, offline=[ids["invalid"], ids["offline"]], online=["online T=1 c=1"]
    )
    assert results(given)[0] == 0
    text = (tmp_path / "docs" / "RESULTS.md").read_text()
    assert f"> **INVALID: no figure of `offline T=1` (`{ids['invalid'][:8]}`)" in text
    assert "counters and the responses disagree" in text
    assert f"> **PARTIAL: `online T=1 c=1` (`{cut.info.run_id[:8]}`)**: interrupted" in text
    assert "(`" + ids["invalid"][:8] + "`) **INVALID**" in text
    # the valid run alone decides at T=0
    assert goals(text)["dflash", "baseline acceptance length at T=0, offline"] == "**met**"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"offline": ["absent"]}, "no run 'absent' in the experiment 'bench'"),
        ({"offline": ["f" * 32]}, "it has: 'online T=1 c=1' ("),
        ({"training": ["smal"]}, "no run 'smal' in the experiment 'train' or 'targets' of"),
        ({"training": ["smal"]}, "'small-carryover' ("),
        ({"training": ["twice"]}, "2 runs in"),
        ({"tried": [{"what": "x", "gave": "y", "run": "gone"}]}, "'train' or 'targets' or 'bench'"),
        ({"diagnostics": ["gone"]}, "no run 'gone' in the experiment 'diagnostics'"),
        ({"offline": ["sweep"]}, "is an online bench and is listed as offline"),
        ({"offline": ["small"]}, "is no bench"),
        ({"offline": ["offline"], "regimes": {"dflash": {"baseline": ["bb"]}}},
         "no bench of it has the arm bb; they have: ar, b, c1"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(results, store, tmp_path, values, said):
    _, ids = store
    ids = {**ids, "small": training_id(store[0], "small")}
    for key in ("offline", "online"):
        values = {**values, key: [ids.get(name, name) for name in values.get(key, [])]}
    code, shown = results(section(**values))
    assert code == 2 and said in shown, shown
    assert not (tmp_path / "docs").exists()


def training_id(uri, name):
    client = Tracker(uri).client()
    experiment = client.get_experiment_by_name("train").experiment_id
    (found,) = client.search_runs([experiment], filter_string=f"attributes.run_name = '{name}'")
    return found.info.run_id


def test_without_a_configuration_it_says_which(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["platform", "results"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2 and "give --config" in capsys.readouterr().err
