"""The controller as a plain class: changes, confirmations, guard, ramps, and restarts."""

import asyncio
import contextlib
import json
import tracemalloc
from itertools import pairwise

import pytest
from traffic_scenes import ARMS, START, Clock, Replica, calling, controller, requests

from carryover.serving import arm_statistics, replicas, steering
from carryover.serving.timing import Timing

EVEN = {"baseline": 50, "carryover": 50}
PERIOD_S = 10.5


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def make(tmp_path, clock):
    """Makes controllers, one at a time, on one state folder; each closes the one before."""
    made = []

    def start(**settings):
        close()
        made.append(controller(tmp_path / "state", clock, **settings))
        return made[-1]

    def close():
        while made:
            made.pop().close()

    start.close = close
    yield start
    close()


def run(coroutine):
    return asyncio.run(coroutine)


async def ask(owner, action, **arguments):
    answer = await owner.admin(action, arguments, "admin-1")
    assert "error" not in answer, answer
    return answer


async def refused(owner, action, **arguments):
    error = (await owner.admin(action, arguments, "admin-1"))["error"]
    return error["code"], error["message"]


async def actions(owner):
    entries = (await ask(owner, "log", last=100))["entries"]
    return [(entry["action"], entry["who"]) for entry in entries]


async def see(replica, clock, *, baseline=0, carryover=0, **settings):
    """Some requests of each arm since the last evaluation."""
    weights = replica.traffic.weights
    settings.setdefault("carryover_tpot_s", 0.02)
    tpot_s, outcome = settings["carryover_tpot_s"], settings.get("carryover_outcome", "ok")
    # the last evaluation period is over: what ended at its beginning no longer counts
    clock.pass_(PERIOD_S)
    await replica.call(
        requests(clock, "baseline", baseline, weights=weights)
        + requests(clock, "carryover", carryover, weights=weights, tpot_s=tpot_s, outcome=outcome)
    )


# Changes


def test_a_replica_gets_the_split_once_and_then_only_newer_ones(make):
    async def scene():
        owner = make(weights={"baseline": 90, "carryover": 10})
        replica = Replica(owner)
        assert (await replica.call())["weights"] == {"baseline": 0.9, "carryover": 0.1}
        assert await replica.call() is None
        await ask(owner, "set", weights=EVEN)
        assert (await replica.call())["weights"] == {"baseline": 0.5, "carryover": 0.5}
        assert await replica.call() is None

    run(scene())


def test_a_change_is_answered_when_every_live_replica_has_confirmed_it(make, clock):
    async def scene():
        owner = make(timing=Timing(lead_s=1.0, confirm_timeout_s=20))
        replicas = [Replica(owner, f"replica-{number}") for number in range(3)]
        for replica in replicas:
            await replica.call()
        change = asyncio.create_task(ask(owner, "set", weights=EVEN))
        while owner._split.state.traffic.version == 1:
            await asyncio.sleep(0.01)
        for replica in replicas:
            # told, but not yet confirmed
            await replica.call()
            assert replica.traffic.effective_at == clock.now + 1.0
        await asyncio.sleep(0.05)
        assert not change.done()
        for replica in replicas[:-1]:
            await replica.call()
        await asyncio.sleep(0.05)
        assert not change.done()
        await replicas[-1].call()
        answer = await change
        assert answer["late"] == []
        assert [r["version"] for r in answer["replicas"]] == [2, 2, 2]

    run(scene())


def test_a_replica_that_does_not_confirm_is_named_and_a_dead_one_is_not_waited_for(make, clock):
    async def scene():
        owner = make(timing=Timing(confirm_timeout_s=0.3))
        stuck, dead = Replica(owner, "stuck"), Replica(owner, "dead")
        await dead.call()
        clock.pass_(60)
        await stuck.call()
        answer = await ask(owner, "set", weights=EVEN)
        assert answer["late"] == ["stuck"]
        assert [r["replica"] for r in answer["replicas"]] == ["stuck"]
        assert answer["weights"]["carryover"] == 0.5

    run(scene())


def test_changes_at_the_same_time_are_made_one_after_the_other(make):
    async def scene():
        owner = make()
        async with calling(Replica(owner)):
            many = [
                ask(owner, "set", weights={"baseline": 100 - n, "carryover": n}) for n in range(20)
            ]
            await asyncio.gather(*many)
        entries = (await ask(owner, "log", last=100))["entries"]
        assert [entry["version"] for entry in entries] == list(range(1, 22))
        for before, after in pairwise(entries[1:]):
            assert after["before"] == before["after"]

    run(scene())


def test_an_admin_who_hangs_up_leaves_memory_and_disk_alike(make, monkeypatch):
    async def scene():
        owner = make()
        async with calling(Replica(owner)):
            for delay in (0.0, 0.0, 0.0, 0.001, 0.001, 0.003, 0.01):
                task = asyncio.create_task(ask(owner, "set", weights=EVEN))
                await asyncio.sleep(delay)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            await ask(owner, "set", weights=EVEN)
        entries = (await ask(owner, "log", last=100))["entries"]
        assert [entry["version"] for entry in entries] == list(range(1, len(entries) + 1))
        shown = await ask(owner, "show")
        again = await ask(make(), "show")
        for key in ("version", "weights"):
            assert shown[key] == again[key]

    run(scene())


def test_who_and_why_are_in_the_log_without_control_characters(make):
    async def scene():
        owner = make()
        await ask(owner, "set", weights=EVEN, who="ann@laptop\x1b[31m", why="line\nbreak")
        await ask(owner, "rollback")
        first, second = (await ask(owner, "log", last=2))["entries"]
        assert first["who"] == "ann@laptop [31m (key admin-1)"
        assert first["why"] == "line break"
        assert first["before"]["weights"] == {"baseline": 1.0, "carryover": 0.0}
        assert first["after"]["weights"] == {"baseline": 0.5, "carryover": 0.5}
        assert (second["who"], second["action"]) == ("key admin-1", "rollback")

    run(scene())


@pytest.mark.parametrize(
    ("action", "arguments", "said"),
    [
        ("sho", {}, "no action 'sho'; did you mean 'show'?"),
        ("zzz", {}, "actions: show, set, ramp"),
        ("set", {}, "give weights, or a shadow, or no_shadow"),
        ("set", {"weights": {"baseline": 50, "carryovr": 50}}, "did you mean 'carryover'?"),
        ("set", {"weights": {"baseline": 50, "carryover": 40}}, "got 90"),
        ("set", {"weights": {"baseline": "x"}}, "weights.baseline"),
        ("set", {"wieghts": {}}, "did you mean 'weights'?"),
        ("set", {"weights": EVEN, "experiment": "june"}, "'may' is still running; end it"),
        ("set", {"experiment": "june"}, "an experiment begins with weights"),
        ("ramp", {"steps": [5, 1]}, "must increase"),
        ("ramp", {"steps": []}, "steps"),
        ("ramp", {"steps": [1], "arm": "baseline"}, "is the control arm"),
        ("resume", {}, "not paused"),
        ("revoke", {}, "key: required"),
        ("log", {"last": 0}, "last"),
        ("show", {"x": 1}, "unknown key"),
    ],
)
def test_wrong_requests_are_answered_with_400_and_the_fix(make, action, arguments, said):
    async def scene():
        owner = make()
        code, message = await refused(owner, action, **arguments)
        assert code == 400
        assert said in message
        assert (await ask(owner, "show"))["version"] == 1

    run(scene())


def test_a_full_disk_changes_nothing_and_is_said(make, monkeypatch):
    async def scene():
        owner = make()

        def full(entry):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(owner._split.audit, "append", full)
        code, message = await refused(owner, "set", weights=EVEN)
        assert code == 500
        assert "nothing was changed" in message and "No space left" in message
        assert (await ask(owner, "show"))["version"] == 1
        monkeypatch.undo()
        assert (await ask(owner, "set", weights=EVEN))["version"] == 2
        assert [action for action, _ in await actions(owner)] == ["begin", "set"]

    run(scene())


def test_a_full_disk_does_not_keep_users_on_a_broken_arm(make, clock, monkeypatch):
    async def scene():
        owner = make(weights=EVEN)
        replica = Replica(owner)
        await replica.call()

        def full(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(owner._split._folder, "_write", full)
            await see(replica, clock, baseline=30, carryover=30, carryover_outcome="error")
            await owner.evaluate()
            await replica.call()
            assert replica.traffic.weights["carryover"] == 0.0
            with pytest.raises(OSError, match="No space"):
                await owner._steering.save()
        # once there is room, the log has it too
        await owner._steering.save()
        await owner._steering.save()
        assert await actions(owner) == [("begin", "configuration"), ("rollback", "guard")]
        assert (await ask(make(weights=EVEN), "show"))["weights"]["carryover"] == 0.0

    run(scene())


def test_an_answer_holds_no_nan(make):
    async def scene():
        owner = make()
        for action in ("show", "report", "log"):
            json.dumps(await ask(owner, action), allow_nan=False)

    run(scene())


def test_revoked_keys_reach_every_replica_and_survive_restarts_and_changes(make):
    async def scene():
        owner = make()
        replica = Replica(owner)
        await replica.call()
        async with calling(replica):
            await ask(owner, "revoke", key="team-a")
            await ask(owner, "set", weights=EVEN)
            await ask(owner, "stop")
            await ask(owner, "set", weights=EVEN, experiment="june")
        assert replica.traffic.revoked == ("team-a",)
        assert (await Replica(make()).call())["revoked"] == ["team-a"]

    run(scene())


# What replicas saw


def test_a_batch_delivered_twice_is_counted_once(make, clock):
    async def scene():
        owner = make(weights=EVEN)
        replica = Replica(owner)
        await replica.call()
        rows = requests(clock, "carryover", 7, weights=replica.traffic.weights)
        await replica.call(rows)
        await replica.call(rows, again=True)
        assert (await ask(owner, "show"))["arms"][1]["requests"] == 7
        await replica.call(rows)
        # the same number from another replica is another batch
        other = Replica(owner, "replica-2")
        other.sequence = 1
        await other.call(rows)
        assert (await ask(owner, "show"))["arms"][1]["requests"] == 21

    run(scene())


def test_what_cannot_be_read_and_what_was_dropped_is_counted(make, clock):
    async def scene():
        owner = make(weights=EVEN)
        replica = Replica(owner)
        await replica.call()
        good = requests(clock, "carryover", 2, weights=replica.traffic.weights)
        gone = requests(clock, "gone", 3, weights=replica.traffic.weights)
        await replica.call([*good, *gone, [], ["x"] * 18, [1, 2]], dropped=5)
        await Replica(owner, "replica-2").call(dropped=4)
        shown = await ask(owner, "show")
        assert shown["arms"][1]["requests"] == 2
        assert (shown["unknown"], shown["dropped"]) == (6, 9)

    run(scene())


def test_arms_that_go_down_and_come_up_are_logged_once(make, clock):
    async def scene():
        owner = make()
        one, two = Replica(owner, "one"), Replica(owner, "two")
        down, up = ((clock.now, "carryover", kind, f"it went {kind}") for kind in ("down", "up"))
        for replica in (one, two, one):
            await replica.call(events=[down])
        assert (await ask(owner, "show"))["down"] == ["carryover"]
        # events of a batch that is delivered again count too
        await one.call(events=[up], again=True)
        assert (await ask(owner, "show"))["down"] == ["carryover"]
        await two.call(events=[up, (clock.now, "unheard-of", "down", "x")])
        assert (await ask(owner, "show"))["down"] == []
        entries = (await ask(owner, "log"))["entries"][1:]
        assert [(e["action"], e["after"], e["why"]) for e in entries] == [
            ("arm down", {"arm": "carryover"}, "it went down"),
            ("arm up", {"arm": "carryover"}, "it went up"),
        ]

    run(scene())


def test_an_arm_that_only_a_gone_replica_missed_is_not_down_for_ever(make, clock):
    async def scene():
        owner = make(evaluation_period_s=0.02)
        replica = Replica(owner)
        await replica.call(events=[(clock.now, "carryover", "down", "no answer")])
        # a restart of the controller, which takes a while, is no news of the arm
        make.close()
        clock.pass_(30)
        replica.owner = owner = make(evaluation_period_s=0.02)
        await replica.call()
        assert (await ask(owner, "show"))["down"] == ["carryover"]
        clock.pass_(60)
        for _ in range(200):
            await asyncio.sleep(0.01)
            if len(await actions(owner)) == 3:
                break
        assert [action for action, _ in await actions(owner)] == ["begin", "arm down", "arm up"]

    run(scene())


def test_memory_does_not_grow_with_requests_replicas_or_labels(make, clock, monkeypatch):
    monkeypatch.setattr(replicas, "MAX_REMEMBERED", 50)
    monkeypatch.setattr(arm_statistics, "MAX_RECENT", 400)

    async def scene():
        owner = make(weights=EVEN)
        weights = {"baseline": 0.5, "carryover": 0.5}

        async def load(times):
            for number in range(times):
                clock.pass_(1)
                replica = Replica(owner, f"replica-{clock.now}-{number}")
                rows = requests(clock, "carryover", 20, weights=weights)
                for index, row in enumerate(rows):
                    row[7] = f"label-{clock.now}-{index}"
                await replica.call(rows)

        tracemalloc.start()
        await load(60)
        full = tracemalloc.get_traced_memory()[0]
        await load(60)
        grown = tracemalloc.get_traced_memory()[0] - full
        tracemalloc.stop()
        # so many requests with labels of their own, by so many replicas, again
        assert grown < 0.02 * full

    run(scene())


# Guard and ramps


def test_a_broken_rule_rolls_back_at_the_next_evaluation_and_says_why(make, clock):
    async def scene():
        owner = make(weights={"baseline": 80, "carryover": 20})
        replica = Replica(owner)
        await replica.call()
        for _ in range(20):
            await see(replica, clock, baseline=40, carryover=10)
            await owner.evaluate()
        assert (await ask(owner, "show"))["version"] == 1
        # ten minutes of good answers must not hide that it fails now
        await see(replica, clock, baseline=40, carryover=10, carryover_outcome="error")
        await owner.evaluate()
        shown = await ask(owner, "show")
        assert shown["weights"] == {"baseline": 1.0, "carryover": 0.0}
        entry = (await ask(owner, "log"))["entries"][-1]
        assert (entry["who"], entry["action"]) == ("guard", "rollback")
        assert "carryover: error rate 100.0% (10 of 10 requests)" in entry["why"]
        assert "max_error_rate" in entry["why"]
        newer = await replica.call()
        # no replica waits for another to stop the harm
        assert newer["effective_at"] <= clock.now

    run(scene())


@pytest.mark.parametrize(
    ("rules", "worse"),
    [
        ({"max_p95_tpot_s": 0.1}, {"tpot_s": 0.2}),
        ({"min_acceptance_length": 1.5}, {"accepted": 2}),
        ({"max_error_rate": 0.2}, {"outcome": "timeout"}),
    ],
)
def test_every_kind_of_rule_rolls_back(make, clock, rules, worse):
    async def scene():
        owner = make(weights=EVEN, guard={"min_requests": 20, **rules})
        replica = Replica(owner)
        await replica.call()
        weights = replica.traffic.weights
        clock.pass_(10)
        await replica.call(requests(clock, "carryover", 60, weights=weights))
        await owner.evaluate()
        assert (await ask(owner, "show"))["version"] == 1
        clock.pass_(PERIOD_S)
        await replica.call(requests(clock, "carryover", 60, weights=weights, **worse))
        await owner.evaluate()
        shown = await ask(owner, "show")
        assert shown["weights"]["carryover"] == 0.0
        assert next(iter(rules)) in shown["evaluation"]["why"]

    run(scene())


def test_a_broken_control_arm_is_not_rolled_back_to_itself(make, clock):
    async def scene():
        owner = make(weights={"baseline": 100})
        replica = Replica(owner)
        await replica.call()
        clock.pass_(10)
        await replica.call(
            requests(clock, "baseline", 50, weights=replica.traffic.weights, outcome="error")
        )
        await owner.evaluate()
        assert (await ask(owner, "show"))["version"] == 1

    run(scene())


def test_an_arm_put_back_after_a_repair_does_not_fall_to_its_past(make, clock):
    async def scene():
        owner = make(weights=EVEN)
        replica = Replica(owner)
        await replica.call()
        await see(replica, clock, baseline=30, carryover=30, carryover_outcome="error")
        await owner.evaluate()
        assert (await ask(owner, "show"))["weights"]["carryover"] == 0.0
        clock.pass_(5)
        async with calling(replica):
            await ask(owner, "set", weights=EVEN, why="repaired")
        await see(replica, clock, baseline=30, carryover=30)
        await owner.evaluate()
        assert (await ask(owner, "show"))["weights"]["carryover"] == 0.5

    run(scene())


def test_a_ramp_goes_on_after_good_evaluations_with_enough_requests_only(make, clock):
    async def scene():
        owner = make()
        replica = Replica(owner)
        await replica.call()
        async with calling(replica):
            await ask(owner, "ramp", steps=[1, 5, 25, 50], why="evening")
        seen = [replica.traffic.weights["carryover"]]
        for requests_seen in (0, 10, 9, 1, 20, 20, 20, 20):
            await see(replica, clock, baseline=30, carryover=requests_seen)
            await owner.evaluate()
            await replica.call()
            seen.append(replica.traffic.weights["carryover"])
        # 10 + 9 + 1 make the 20 that a step needs
        assert seen == [0.01, 0.01, 0.01, 0.01, 0.05, 0.25, 0.5, 0.5, 0.5]
        shown = await ask(owner, "show")
        assert shown["ramp"] is None
        assert await actions(owner) == [
            ("begin", "configuration"), ("ramp", "key admin-1"), ("ramp step", "ramp"),
            ("ramp step", "ramp"), ("ramp step", "ramp"), ("ramp done", "ramp"),
        ]  # fmt: skip

    run(scene())


def test_a_step_is_held_as_long_as_asked(make, clock):
    async def scene():
        owner = make()
        replica = Replica(owner)
        await replica.call()
        async with calling(replica):
            await ask(owner, "ramp", steps=[10, 20], hold_s=35)
        for expected in (0.1, 0.1, 0.1, 0.2):
            await see(replica, clock, baseline=30, carryover=30)
            await owner.evaluate()
            await replica.call()
            assert replica.traffic.weights["carryover"] == expected
        why = (await ask(owner, "log"))["entries"][-1]["why"]
        assert "no rule broken at 10%" in why

    run(scene())


def test_a_failed_evaluation_never_ramps_and_is_shown(make, clock, monkeypatch):
    async def scene():
        owner = make()
        replica = Replica(owner)
        await replica.call()
        async with calling(replica):
            await ask(owner, "ramp", steps=[10, 20])

        def broken(*_, **__):
            raise RuntimeError("statistics are broken")

        with monkeypatch.context() as patch:
            patch.setattr(steering, "evaluate", broken)
            for _ in range(3):
                await see(replica, clock, baseline=30, carryover=30)
                await owner.evaluate()
        shown = await ask(owner, "show")
        assert shown["weights"]["carryover"] == 0.1
        assert shown["evaluation"]["failed"] == "RuntimeError: statistics are broken"
        await see(replica, clock, baseline=30, carryover=30)
        await owner.evaluate()
        shown = await ask(owner, "show")
        assert shown["weights"]["carryover"] == 0.2
        assert shown["evaluation"]["failed"] == ""

    run(scene())


def test_a_ramp_waits_while_the_arm_is_known_to_be_worse(make, clock):
    async def scene():
        owner = make()
        replica = Replica(owner)
        await replica.call()
        async with calling(replica):
            await ask(owner, "ramp", steps=[50, 60], hold_s=100)
        for _ in range(15):
            await see(replica, clock, baseline=40, carryover=40, carryover_tpot_s=0.03)
            await owner.evaluate()
        shown = await ask(owner, "show")
        assert shown["comparisons"]["carryover"]["tpot_s"]["verdict"] == "worse"
        assert shown["weights"]["carryover"] == 0.5
        assert "carryover is worse than baseline: TPOT" in shown["evaluation"]["why"]

    run(scene())


def test_nothing_is_evaluated_during_a_pause(make, clock):
    async def scene():
        owner = make(weights=EVEN)
        replica = Replica(owner)
        await replica.call()
        async with calling(replica):
            await ask(owner, "ramp", steps=[60, 70])
            before = replica.traffic.weights
            await ask(owner, "pause")
        clock.pass_(10)
        late = requests(clock, "carryover", 50, weights=before, outcome="error")
        await replica.call(late)
        await owner.evaluate()
        shown = await ask(owner, "show")
        assert (shown["status"], shown["ramp"]["position"]) == ("paused", 0)

    run(scene())


# Restarts


def test_split_ramp_statistics_and_log_survive_a_restart(make, clock):
    async def scene():
        owner = make()
        replica = Replica(owner)
        await replica.call()
        async with calling(replica):
            await ask(owner, "ramp", steps=[10, 20, 30])
        await see(replica, clock, baseline=90, carryover=25)
        await owner.evaluate()
        await replica.call()
        await see(replica, clock, baseline=80, carryover=15)
        before = await ask(owner, "report")

        replica.owner = owner = make()
        after = await ask(owner, "report")
        for key in ("experiment", "version", "weights", "ramp", "arms", "comparisons", "statistics",
                    "log", "began_s", "since_s"):  # fmt: skip
            assert after[key] == before[key], key
        assert after["ramp"]["position"] == 1
        assert (await ask(owner, "show"))["evaluation"]["count"] == 1
        # the batch that was counted before is not counted again
        await replica.call(
            requests(clock, "carryover", 15, weights=replica.traffic.weights), again=True
        )
        assert (await ask(owner, "show"))["arms"][1]["requests"] == 40
        # and the ramp goes on: 15 and 5 are 20 at this step
        await see(replica, clock, carryover=5)
        await owner.evaluate()
        assert (await ask(owner, "show"))["weights"]["carryover"] == 0.3

    run(scene())


def test_a_killed_controller_loses_no_change_and_at_most_one_period_of_statistics(
    make, clock, tmp_path, monkeypatch
):
    async def scene():
        owner = make(weights=EVEN)
        replica = Replica(owner)
        await replica.call()
        await see(replica, clock, baseline=10, carryover=10)
        await owner._steering.save()
        await see(replica, clock, baseline=10, carryover=10)
        async with calling(replica):
            await ask(owner, "set", weights={"baseline": 100})
        # as a kill does: the lock goes, nothing is written
        owner._split._folder.close()
        shown = await ask(make(weights=EVEN), "show")
        assert shown["weights"]["baseline"] == 1.0
        assert [row["requests"] for row in shown["arms"]] == [10, 10]

    run(scene())


@pytest.mark.parametrize("damage", ["{", "[]", '{"began_s": 1800000000.0}', "other format"])
def test_statistics_that_cannot_be_read_do_not_keep_a_roll_back_from_holding(
    make, clock, tmp_path, damage
):
    async def scene():
        owner = make(weights=EVEN)
        replica = Replica(owner)
        await replica.call()
        await see(replica, clock, baseline=5, carryover=5)
        await ask(owner, "rollback")
        make.close()
        file = tmp_path / "state/results.json"
        if damage == "other format":
            values = json.loads(file.read_text())
            values["results"]["statistics"]["format"] = 99
            file.write_text(json.dumps(values))
        else:
            file.write_text(damage)
        damaged = file.read_text()
        owner = make(weights=EVEN)
        shown = await ask(owner, "show")
        assert shown["weights"]["carryover"] == 0.0
        assert [row["requests"] for row in shown["arms"]] == [0, 0]
        entry = (await ask(owner, "log"))["entries"][-1]
        assert (entry["action"], entry["who"]) == ("statistics lost", "controller")
        assert (tmp_path / "state" / entry["after"]["kept"]).read_text() == damaged

    run(scene())


def test_the_same_configuration_does_not_undo_a_roll_back_but_a_changed_one_counts(make):
    async def scene():
        await ask(make(weights=EVEN), "rollback")
        assert (await ask(make(weights=EVEN), "show"))["weights"]["carryover"] == 0.0
        owner = make(weights={"baseline": 70, "carryover": 30})
        assert (await ask(owner, "show"))["weights"]["carryover"] == 0.3
        assert await actions(owner) == [
            ("begin", "configuration"), ("rollback", "key admin-1"), ("set", "configuration"),
        ]  # fmt: skip
        entry = (await ask(owner, "log"))["entries"][-1]
        assert entry["why"] == "the configuration changed: weights"

    run(scene())


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        ({"experiment": "may"}, {"experiment": "june"}, "experiment, salt"),
        ({"arms": ARMS}, {"arms": ("carryover", "baseline")}, "weights, control"),
        ({"arms": ARMS}, {"arms": (*ARMS, "new")}, "weights, arms (new)"),
        ({"arms": (*ARMS, "old")}, {"arms": ARMS}, "weights, arms (old)"),
        (
            {"described": {"carryover": {"drafter": "runs/a"}}},
            {"described": {"carryover": {"drafter": "runs/b"}}},
            "arms (carryover)",
        ),
    ],
)
def test_other_arms_or_another_name_begin_an_experiment(
    make, clock, tmp_path, first, second, why
):
    async def scene():
        owner = make(**first)
        replica = Replica(owner)
        await replica.call()
        await see(replica, clock, baseline=10, carryover=10)
        owner = make(**second)
        shown = await ask(owner, "show")
        assert [row["requests"] for row in shown["arms"]] == [0] * len(shown["arms"])
        assert shown["began_s"] == clock.now
        assert shown["weights"] == {
            arm: float(arm == shown["control"]) for arm in second.get("arms", ARMS)
        }
        entry = (await ask(owner, "log"))["entries"][-1]
        assert (entry["action"], entry["why"]) == ("begin", f"the configuration changed: {why}")
        archived = json.loads((tmp_path / f"state/results-may-{START:.0f}.json").read_text())
        assert archived["experiment"] == "may"

    run(scene())


def test_serve_user_config_is_taken_once_and_live(make):
    async def scene():
        owner = make(weights={"baseline": 90, "carryover": 10})
        replica = Replica(owner)
        await replica.call()
        changed = {"weights": {"baseline": 60, "carryover": 40}}
        for _ in range(3):
            answer = await owner.reconfigure_traffic(changed)
            assert answer["weights"]["carryover"] == 0.4
        await ask(owner, "rollback")
        assert (await owner.reconfigure_traffic(changed))["weights"]["carryover"] == 0.0
        tighter = {**changed, "guard": {"max_error_rate": 0.01}}
        assert (await owner.reconfigure_traffic(tighter))["guard"]["max_error_rate"] == 0.01
        wrong = await owner.reconfigure_traffic({"weights": {"x": 1}})
        assert wrong["error"]["code"] == 400
        assert await actions(owner) == [
            ("begin", "configuration"), ("set", "serve user_config"), ("rollback", "key admin-1"),
            ("guard", "serve user_config"),
        ]  # fmt: skip

    run(scene())


def test_a_lost_state_folder_does_not_leave_replicas_on_the_old_split(make, clock, tmp_path):
    async def scene():
        owner = make()
        replica = Replica(owner)
        await replica.call()
        async with calling(replica):
            for share in (10, 20, 30):
                await ask(owner, "set", weights={"baseline": 100 - share, "carryover": share})
        assert replica.version == 4
        make.close()
        for path in (tmp_path / "state").iterdir():
            path.unlink()
        replica.owner = make()
        await replica.call()
        assert replica.version == 5
        assert replica.traffic.weights == {"baseline": 1.0, "carryover": 0.0}
        assert ("renumber", "controller") in await actions(replica.owner)

    run(scene())


# Two controllers with one state folder: one application takes the place of another


@pytest.fixture
def pair(tmp_path, clock):
    """A controller, and makes one that stands by; both are closed at the end."""
    old = controller(tmp_path / "state", clock, weights=EVEN)
    made = [old]

    def make(**settings):
        made.append(controller(tmp_path / "state", clock, **{"weights": EVEN, **settings}))
        return made[-1]

    yield old, make
    for each in made:
        each.close()


def test_a_controller_stands_by_until_the_one_before_has_gone(pair, clock):
    async def scene():
        old, make = pair
        before = Replica(old, "before")
        await before.call()
        async with calling(before):
            await ask(old, "set", weights={"baseline": 70, "carryover": 30})
        await see(before, clock, baseline=30, carryover=10)

        new = make()
        after = Replica(new, "after")
        # the split that people have set, not that of the configuration
        assert (await after.call())["weights"]["carryover"] == 0.3
        assert (await ask(new, "show"))["standby"]
        code, message = await refused(new, "set", weights=EVEN)
        assert code == 400 and "another application still has the state folder" in message
        # it neither evaluates nor logs
        await see(after, clock, baseline=5, carryover=40, carryover_outcome="error")
        assert (await new.reconfigure_traffic({"guard": {"max_error_rate": 0.5}}))["standby"]
        assert not await new._steering.take_over()
        assert [action for action, _ in await actions(old)] == ["begin", "set"]
        # and follows what is changed at the other meanwhile
        async with calling(before):
            await ask(old, "set", weights={"baseline": 60, "carryover": 40})
        assert not await new._steering.take_over()
        await after.call()
        assert after.traffic.weights["carryover"] == 0.4

        old.close()
        assert await new._steering.take_over()
        shown = await ask(new, "show")
        assert not shown["standby"]
        # what both saw, and what user_config asked for meanwhile
        assert [row["requests"] for row in shown["arms"]] == [35, 50]
        assert shown["guard"]["max_error_rate"] == 0.5
        assert [action for action, _ in await actions(new)] == ["begin", "set", "set", "guard"]
        # the other's replicas are gone too
        clock.pass_(5)
        async with calling(after):
            assert (await ask(new, "set", weights=EVEN))["late"] == []

    run(scene())


def test_one_with_other_arms_stands_by_with_the_split_of_its_configuration(pair, clock):
    async def scene():
        old, make = pair
        await ask(old, "rollback")
        clock.pass_(60)
        new = make(arms=("plain", "other"), weights={"plain": 75, "other": 25})
        assert (await Replica(new).call())["weights"] == {"plain": 0.75, "other": 0.25}
        old.close()
        assert await new._steering.take_over()
        shown = await ask(new, "show")
        assert shown["weights"] == {"plain": 0.75, "other": 0.25}
        assert [action for action, _ in await actions(new)] == ["begin", "rollback", "begin"]

    run(scene())


def test_the_background_takes_over_by_itself(pair):
    async def scene():
        old, make = pair
        new = make(evaluation_period_s=0.02)
        await new.check_health()
        old.close()
        for _ in range(500):
            if not (await ask(new, "show"))["standby"]:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("still standing by")

    run(scene())


# The end of an experiment


class Recorder:
    def __init__(self):
        self.records = []
        self.closed = False
        self.failure = None

    def record(self, report, run_id, final):
        if self.failure is not None:
            raise self.failure
        self.records.append((report["experiment"], run_id, final))
        json.dumps(report, allow_nan=False)
        return run_id or f"run-{len(self.records)}"

    def close(self):
        self.closed = True


def test_stop_ends_the_experiment_and_records_it_and_another_can_begin(make, clock):
    async def scene():
        recorder = Recorder()
        owner = make(weights=EVEN, recorder=recorder)
        replica = Replica(owner)
        await replica.call()
        await see(replica, clock, baseline=30, carryover=30)
        async with calling(replica):
            answer = await ask(owner, "stop", why="decided")
        assert answer["status"] == "ended"
        assert answer["weights"] == {"baseline": 1.0, "carryover": 0.0}
        assert answer["run_id"] == "run-1"
        assert recorder.records == [("may", None, True)]
        code, message = await refused(owner, "set", weights=EVEN)
        assert code == 400 and "'may' has ended" in message and "--experiment NAME" in message
        assert "is over" in (await refused(owner, "set", weights=EVEN, experiment="may"))[1]
        # what was measured can still be looked at, also after a restart
        owner = replica.owner = make(weights=EVEN, recorder=recorder)
        shown = await ask(owner, "show")
        assert (shown["status"], shown["arms"][1]["requests"]) == ("ended", 30)
        async with calling(replica):
            shown = await ask(owner, "set", weights=EVEN, experiment="june")
        assert (shown["status"], shown["run_id"]) == ("running", None)
        assert [row["requests"] for row in shown["arms"]] == [0, 0]
        assert replica.traffic.experiment == replica.traffic.salt == "june"

    run(scene())


def test_a_store_that_is_away_does_not_hinder_the_end(make, clock):
    async def scene():
        recorder = Recorder()
        recorder.failure = RuntimeError("nothing answers there")
        owner = make(weights=EVEN, recorder=recorder)
        answer = await ask(owner, "stop")
        assert (answer["status"], answer["run_id"]) == ("ended", None)
        assert answer["unrecorded"] == "nothing answers there"
        make.close()
        assert recorder.closed

    run(scene())


def test_the_background_evaluates_saves_publishes_and_records(make, clock, tmp_path):
    async def scene():
        recorder, published = Recorder(), []
        owner = make(
            weights=EVEN, recorder=recorder, evaluation_period_s=0.05, record_period_s=15,
        )  # fmt: skip
        owner._publish = published.append
        replica = Replica(owner)
        await replica.call()
        for _ in range(200):
            await see(replica, clock, baseline=30, carryover=30)
            await asyncio.sleep(0.02)
            if len(recorder.records) > 1:
                break
        assert published[-1]["experiment"] == "may"
        assert json.loads((tmp_path / "state/results.json").read_text())["experiment"] == "may"
        # the first record starts the run, the next goes on with it
        assert recorder.records[:2] == [("may", None, False), ("may", "run-1", False)]
        assert (await ask(owner, "show"))["run_id"] == "run-1"
        # an experiment that a new configuration puts an end to is recorded to its end
        owner = make(weights=EVEN, recorder=recorder, experiment="june", evaluation_period_s=0.05)
        await owner.check_health()
        for _ in range(200):
            await asyncio.sleep(0.02)
            if recorder.records[-1][2]:
                break
        assert recorder.records[-1] == ("may", "run-1", True)

    run(scene())


def test_a_dead_evaluation_is_found_by_the_health_check(make, monkeypatch):
    async def scene():
        owner = make()

        async def dies():
            raise MemoryError

        monkeypatch.setattr(owner, "_run", dies)
        await owner.check_health()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="no longer evaluated"):
            await owner.check_health()

    run(scene())


def test_what_user_config_changed_survives_a_restart_of_the_controller_alone(make):
    async def scene():
        first = {"weights": {"baseline": 90, "carryover": 10}}
        owner = make(**first)
        live = {"weights": EVEN, "guard": {"max_error_rate": 0.01}}
        await owner.reconfigure_traffic(live)
        shown = await ask(make(**first), "show")
        assert shown["weights"]["carryover"] == 0.5
        assert shown["guard"]["max_error_rate"] == 0.01
        # other arguments of the application count again
        shown = await ask(make(weights={"baseline": 80, "carryover": 20}), "show")
        assert shown["weights"]["carryover"] == 0.2
        assert shown["guard"]["max_error_rate"] == 0.05

    run(scene())


def test_user_config_begins_another_experiment_with_a_salt_of_its_own(make, clock):
    async def scene():
        owner = make(weights=EVEN)
        replica = Replica(owner)
        await replica.call()
        await see(replica, clock, baseline=5, carryover=5)
        await owner.reconfigure_traffic({"experiment": "june", "weights": EVEN})
        await replica.call()
        assert (replica.traffic.experiment, replica.traffic.salt) == ("june", "june")
        assert [row["requests"] for row in (await ask(owner, "show"))["arms"]] == [0, 0]

    run(scene())


def test_user_config_cannot_change_what_needs_another_deployment(make, tmp_path):
    async def scene():
        owner = make(weights=EVEN)
        answer = await owner.reconfigure_traffic({"state": str(tmp_path / "other")})
        assert "cannot change state while the application runs" in answer["error"]["message"]
        assert "experiment, salt, weights, shadow, guard" in answer["error"]["message"]

    run(scene())
