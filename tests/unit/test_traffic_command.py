"""`platform traffic` against a real controller behind HTTP."""

import asyncio
import json
import re
import socket
import subprocess
import sys
import threading

import pytest
from aiohttp import web
from traffic_scenes import Clock, Replica, calling, controller, requests

from carryover import cli
from carryover.serving.admin import read_key
from carryover.serving.timing import Timing

KEY = "secret-admin-key"


class Endpoint:
    """The admin route of an endpoint, its controller, and one replica, in a thread."""

    def __init__(self, folder):
        self.clock, self.folder = Clock(), folder
        self.loop = asyncio.new_event_loop()
        self._ready, self._stop = threading.Event(), None
        self._thread = threading.Thread(target=self.loop.run_until_complete, args=[self._serve()])
        self._thread.start()
        assert self._ready.wait(60)

    async def _serve(self):
        self._stop = asyncio.Event()
        self.owner = controller(
            self.folder / "state", self.clock, timing=Timing(lead_s=0.0, confirm_timeout_s=30)
        )
        self.replica = Replica(self.owner)
        app = web.Application()
        app.router.add_post("/admin/traffic/{action}", self._admin)
        app.router.add_post("/broken/admin/traffic/{action}", self._broken)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        await self.replica.call()
        async with calling(self.replica):
            self._ready.set()
            await self._stop.wait()
        await runner.cleanup()
        self.owner.close()

    async def _admin(self, request):
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return web.json_response({"error": {"message": "no"}}, status=401)
        answer = await self.owner.admin(
            request.match_info["action"], await request.json(), "platform-serve"
        )
        return web.json_response(answer, status=answer.get("error", {}).get("code", 200))

    async def _broken(self, request):
        return web.Response(status=502, text="<html>bad gateway</html>")

    def do(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def see(self, *, baseline, carryover, **settings):
        weights = self.replica.traffic.weights
        self.clock.pass_(10.5)
        rows = requests(self.clock, "baseline", baseline, weights=weights)
        rows += requests(self.clock, "carryover", carryover, weights=weights, **settings)
        self.do(self.owner.exchange("replica-1", self.replica.version, rows, 0))
        self.do(self.owner.evaluate())

    def close(self):
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
        self.loop.close()


@pytest.fixture
def endpoint(tmp_path):
    made = Endpoint(tmp_path)
    yield made
    made.close()


@pytest.fixture
def platform(monkeypatch, capsys, tmp_path):
    """Runs a command line in this process; gives (exit code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("CARRYOVER_ADMIN_KEY", raising=False)
    monkeypatch.delenv("CARRYOVER_URL", raising=False)
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["platform", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return ended.value.code or 0, printed.out, printed.err

    return run


@pytest.fixture
def traffic(platform, endpoint, monkeypatch):
    """Runs `platform traffic ...` at the endpoint, and demands success unless told otherwise."""
    monkeypatch.setenv("CARRYOVER_ADMIN_KEY", KEY)
    monkeypatch.setenv("CARRYOVER_URL", endpoint.url)

    def run(*words, code=0):
        found, out, err = platform("traffic", *words)
        assert found == code, err
        return out if code == 0 else err

    return run


def test_set_show_and_log(traffic, endpoint):
    assert traffic("set", "baseline=90", "carryover=10", "-m", "first real traffic") == (
        "set: split 2: baseline 90%  carryover 10% (confirmed by 1 ingress replica)\n"
    )
    endpoint.see(baseline=90, carryover=60)
    shown = traffic("show")
    assert "10 are needed" in shown, "too short a time for bounds"
    lines = shown.splitlines()
    assert lines[0].startswith("may  running  split 2")
    table = {line.split("  ")[0]: line.split() for line in lines}
    assert lines[2].split() == ["baseline", "carryover"]
    assert table["weight"][-2:] == ["90%", "10%"]
    assert table["requests"][-2:] == ["90", "60"]
    assert table["failed"][-2:] == ["0", "0"]
    assert all(len(line) <= 80 and "…" not in line for line in lines)
    assert "error rate" in shown and "guard: no rule broken" in shown
    logged = traffic("log")
    assert "    why: first real traffic\n" in logged
    assert "    baseline 100% -> 90%; carryover 0% -> 10%\n" in logged
    assert re.search(r"  set  by \S+@\S+ \(key platform-serve\)  \(split 2\)\n", logged)


def test_json_is_what_the_controller_says(traffic):
    shown = json.loads(traffic("show", "--json"))
    assert shown["weights"] == {"baseline": 1.0, "carryover": 0.0}
    changed = json.loads(traffic("set", "carryover=1", "--json"))
    assert (changed["version"], changed["late"]) == (2, [])
    entries = json.loads(traffic("log", "--json", "--last", "1"))["entries"]
    assert entries[0]["action"] == "set"


def test_ramp_pause_resume_rollback_stop(traffic, endpoint):
    said = traffic("ramp", "1,5,25,50%", "--hold-s", "5", "-m", "evening")
    assert "baseline 99%  carryover 1%; ramp of carryover over 1%, 5%, 25%, 50%" in said
    endpoint.see(baseline=60, carryover=30)
    shown = traffic("show")
    assert "ramp of carryover: 1% [5%] 25% 50%" in shown
    assert "baseline 100%  carryover 0%" in traffic("pause")
    assert "paused: resume brings back baseline 95%  carryover 5%" in traffic("show")
    assert "baseline 95%  carryover 5%; ramp of carryover" in traffic("resume")
    assert "rollback: split 6: baseline 100%  carryover 0%" in traffic("rollback")
    assert "experiment may has ended" in traffic("stop", "-m", "done")
    assert "may  ended" in traffic("show")
    error = traffic("set", "carryover=100", code=2)
    assert "error: experiment 'may' has ended" in error and "--experiment NAME" in error
    assert "carryover 50%" in traffic("set", "baseline=50", "carryover=50", "--experiment", "june")
    assert traffic("show").startswith("june  running")


def test_shadow(traffic):
    traffic("set", "--shadow", "carryover=12.5%")
    shown = traffic("show")
    assert "shadow: 12.5% copied to carryover" in shown
    traffic("set", "--no-shadow")
    assert "shadow:" not in traffic("show")


def test_revoke(traffic, endpoint):
    traffic("revoke", "team-a", "-m", "leaked")
    assert endpoint.replica.traffic.revoked == ("team-a",)
    assert "revoked already" in traffic("revoke", "team-a", code=2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["set", "baseline=50", "carryovr=50"], "no arm 'carryovr'; did you mean 'carryover'?"),
        (["set", "baseline=50", "carryover=40"], "for example baseline=60 carryover=40"),
        (["set", "baseline"], "expected ARM=NUMBER, as in carryover=10, got 'baseline'"),
        (["set", "baseline=x"], "expected ARM=NUMBER"),
        (["set", "baseline=nan"], "expected ARM=NUMBER"),
        (["set", "=5"], "expected ARM=NUMBER"),
        (["set", "baseline=50", "baseline=50"], "an arm is named twice"),
        (["set"], "say what to set"),
        (["set", "--shadow", "carryover=0"], "--shadow takes a percentage above 0"),
        (["set", "--shadow", "carryover=5", "--no-shadow"], "contradict each other"),
        (["ramp", "5,1"], "must increase, got 1 after 5"),
        (["ramp", "1;5"], "percentages with commas between"),
        (["ramp", "1,x"], "percentages with commas between"),
        (["ramp", "1", "--arm", "baseline"], "is the control arm"),
        (["resume"], "not paused"),
        (["show", "--url", "localhost:8000"], "--url takes http://HOST:PORT"),
        (["show", "--key-file", "absent"], "cannot read the admin key in absent"),
        (["shwo"], "No such command"),
    ],
)
def test_mistakes_are_2_with_the_fix(traffic, words, said):
    error = traffic(*words, code=2)
    assert said in " ".join(error.split())
    assert "Traceback" not in error


def test_no_endpoint_is_said_with_how_to_start_one(traffic):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    error = traffic("show", "--url", f"http://127.0.0.1:{port}", code=2)
    assert f"no endpoint answers at http://127.0.0.1:{port}" in error
    assert "platform serve -c" in error


def test_a_wrong_key_is_said_with_where_the_right_one_is(traffic, monkeypatch):
    monkeypatch.setenv("CARRYOVER_ADMIN_KEY", "wrong")
    error = traffic("show", code=2)
    assert "does not accept this admin key" in error and "--key-file" in error


def test_an_endpoint_without_a_split_is_said(traffic, endpoint):
    for url in (f"{endpoint.url}/other", f"{endpoint.url}/broken"):
        assert "has no split to control" in traffic("show", "--url", url, code=2)
    # /v1, as clients have it, is understood
    assert "may  running" in traffic("show", "--url", f"{endpoint.url}/v1")


def test_an_unconfirmed_change_is_a_warning_and_1(traffic, endpoint):
    endpoint.owner._timing = Timing(lead_s=0.0, confirm_timeout_s=0.3)
    endpoint.do(endpoint.owner.exchange("stuck", 1, [], 0))
    error = traffic("set", "baseline=50", "carryover=50", code=1)
    assert "have not confirmed it yet: stuck" in error
    assert "the change is made and logged" in error


def test_the_key_comes_from_file_environment_or_state_folder(tmp_path, monkeypatch, platform):
    from carryover.errors import ConfigError

    with pytest.raises(ConfigError, match="no admin key"):
        read_key()
    file = tmp_path / "runs/serve/shop/admin.key"
    file.parent.mkdir(parents=True)
    file.write_text("from-state\n")
    assert read_key() == "from-state"
    monkeypatch.setenv("CARRYOVER_ADMIN_KEY", "from-environment")
    assert read_key() == "from-environment"
    assert read_key(file) == "from-state"
    monkeypatch.delenv("CARRYOVER_ADMIN_KEY")
    other = tmp_path / "runs/serve/lab/admin.key"
    other.parent.mkdir()
    other.write_text("x")
    with pytest.raises(ConfigError, match=r"choose one: --key-file runs/serve/lab/admin\.key, "):
        read_key()
    for text in ("", "two words", "ä", "\x00"):
        other.write_text(text)
        with pytest.raises(ConfigError, match="holds no key"):
            read_key(other)


def test_the_report_is_a_page(traffic, endpoint, tmp_path):
    traffic("set", "baseline=50", "carryover=50")
    for _ in range(3):
        endpoint.see(baseline=40, carryover=40)
    assert traffic("report", "--out", "deep/page.html") == "deep/page.html\n"
    page = (tmp_path / "deep/page.html").read_text()
    assert "carryover" in page and page.lstrip().lower().startswith("<!doctype html")
    (tmp_path / "file").write_text("")
    assert "cannot write" in traffic("report", "--out", "file/page.html", code=2)


def test_the_command_loads_neither_ray_nor_the_model_libraries(endpoint):
    heavy = {"ray", "torch", "vllm", "mlflow", "transformers", "numpy", "scipy"}
    code = (
        "import sys; sys.argv = ['platform', 'traffic', 'show']\n"
        "from carryover.cli import main\n"
        "try: main()\n"
        f"finally: print('loaded', sorted({heavy!r} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
        env={"CARRYOVER_ADMIN_KEY": KEY, "CARRYOVER_URL": endpoint.url, "COLUMNS": "140"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "compared with baseline" in done.stdout
    assert done.stdout.endswith("loaded []\n")
