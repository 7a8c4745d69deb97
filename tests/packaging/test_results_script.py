"""`infra/results.sh` against a `platform` that only writes down what it is asked."""

import json
import os
import socket
import subprocess
import sys

import pytest
from command_lines import check_command_line

PLATFORM = """#!{python}
import json, os, signal, sys, time
words = sys.argv[1:]
with open(os.environ["ASKED"], "a") as file:
    file.write(json.dumps(words) + "\\n")
if os.environ.get("FAIL_AT") in words:
    sys.exit(1)
if words[:2] == ["bench", "online"] and not os.path.exists(os.environ["ASKED"] + ".ready"):
    sys.exit("the arms are not ready")
if words[:1] == ["bench"] and "--out" in words:
    out = words[words.index("--out") + 1]
    os.makedirs(out)
    open(os.path.join(out, "bench.yaml"), "w").close()
    if os.environ.get("CUT") == words[1]:
        sys.exit(130)
if words[0] == "serve":
    import http.server
    port = int(next(word for word in words if word.startswith("http.port=")).partition("=")[2])
    class Models(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200); self.end_headers()
        def log_message(self, *words): pass
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    server = http.server.HTTPServer(("127.0.0.1", port), Models)
    time.sleep(0.5)
    open(os.environ["ASKED"] + ".ready", "w").close()
    print("ready", flush=True)
    server.serve_forever()
"""


@pytest.fixture
def script(tmp_path, repository):
    """Runs a copy of the script; returns its process and what `platform` was asked."""
    (tmp_path / "infra").mkdir()
    copy = tmp_path / "infra" / "results.sh"
    copy.write_text((repository / "infra" / "results.sh").read_text())
    copy.chmod(0o755)
    stub = tmp_path / "venv" / "bin" / "platform"
    stub.parent.mkdir(parents=True)
    stub.write_text(PLATFORM.format(python=sys.executable))
    stub.chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def run(*words, **environment):
        asked = tmp_path / "asked"
        asked.unlink(missing_ok=True)
        (tmp_path / "asked.ready").unlink(missing_ok=True)
        told = {"CARRYOVER_VENV": str(tmp_path / "venv"), "ASKED": str(asked), "PORT": str(port)}
        done = subprocess.run(
            [copy, *words], env={**os.environ, **told, **environment}, text=True, timeout=60,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        lines = asked.read_text().splitlines() if asked.exists() else []
        return done, [json.loads(line) for line in lines]

    return run


def test_every_command_line_is_one_that_platform_takes(script, repository):
    for subject in ("laboratory", "embedded"):
        for words in (["train"], ["measure", "prompts.jsonl"]):
            done, asked = script(subject, *words)
            assert done.returncode == 0, done.stdout
            for line in asked:
                check_command_line(["platform", *line], repository)


def test_all_arms_of_all_seeds_are_trained_from_one_baseline(script):
    _, asked = script("laboratory", "train", REGIMES="markov", SEEDS="4 5")
    assert [line[:2] for line in asked[:4]] == [
        ["data", "synthesize"], ["data", "regenerate"], ["train", "target"], ["data", "regenerate"],
    ]  # fmt: skip
    trained = [line for line in asked if line[0] == "train"][1:]
    names = [line[line.index("--name") + 1] for line in trained]
    assert names == [
        "laboratory-markov", "laboratory-markov-carryover-4", "laboratory-markov-control-4",
        "laboratory-markov-carryover-5", "laboratory-markov-control-5",
        "laboratory-markov-hidden-states-none", "laboratory-markov-hidden-states-projector",
        "laboratory-markov-target-tokens-embedding", "laboratory-markov-draft-tokens-embedding",
    ]  # fmt: skip
    assert "regime=markov" in trained[0]
    for line in trained[1:]:
        assert line[line.index("--from") + 1] == "runs/train/laboratory-markov/best"
    assert {"carried.carried=target_tokens", "carried.mark=embedding", "seed=4"} < set(trained[-2])
    _, asked = script("laboratory", "train", REGIMES="markov", SEEDS="4", ABLATION="")
    assert len([line for line in asked if line[0] == "train"]) == 4


def test_variants_are_replayed_beside_the_method(script):
    _, asked = script("laboratory", "measure", "p.jsonl", SEEDS="4", ABLATION="draft_tokens/none")
    replayed = [line[line.index("--name") + 1] for line in asked if "replay" in line]
    assert replayed == [
        "laboratory-dflash-carryover-4-replay", "laboratory-markov-carryover-4-replay",
        "laboratory-markov-draft-tokens-none-replay",
    ]  # fmt: skip


def test_measuring_goes_on_where_it_was_and_leaves_no_server(script):
    words = ("embedded", "measure", "prompts.jsonl")
    done, asked = script(*words, REGIMES="dflash", SEEDS="1", CUT="online")
    assert done.returncode != 0
    assert [line[:2] for line in asked if line[0] == "bench"] == [
        ["bench", "offline"], ["bench", "online"],
    ]  # fmt: skip
    done, asked = script(*words, REGIMES="dflash", SEEDS="1")
    assert done.returncode == 0, done.stdout
    (again,) = [line for line in asked if line[0] == "bench"]
    assert again == ["bench", "online", "--resume", "runs/results/embedded/online-dflash"]
    assert "offline-dflash is finished" in done.stdout
    assert [line[:2] for line in asked if line[0] in ("data", "checkpoint")] == [
        ["data", "regenerate"], ["checkpoint", "headroom"], ["checkpoint", "replay"],
    ]  # fmt: skip
    done, asked = script(*words, REGIMES="dflash", SEEDS="1")
    assert done.returncode == 0 and asked == []


def test_a_failure_and_a_mistake_end_it(script):
    done, asked = script("embedded", "train", FAIL_AT="regenerate")
    assert done.returncode == 1
    asked = [line[:2] for line in asked]
    assert asked == [["data", "synthesize"], ["data", "synthesize"], ["data", "regenerate"]]
    for words in ([], ["other", "train"], ["embedded"], ["embedded", "measure"]):
        done, asked = script(*words)
        assert done.returncode != 0 and asked == []
