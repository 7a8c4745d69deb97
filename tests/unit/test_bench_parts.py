"""The table of this repository's own benchmarks."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from carryover.bench import parts
from carryover.bench.parts import PARTS, RATIOS, Measured, Ratio, rows


def test_a_mapping_gives_a_row_for_each_key_and_a_missing_value_says_so():
    report = {"draft_step_ratio": {"1": 1.02, "8": 1.2}, "end_to_end_ratio": 0.98}
    found = rows([Measured("plugin", 1.0, report), Measured("train_step", 1.0, None, "boom")])
    by_text = {text: (value, met) for _, text, value, _, met in found}
    step = "draft step with carried rows over without, batch"
    assert by_text[f"{step} 1"] == (1.02, True) and by_text[f"{step} 8"] == (1.2, False)
    assert by_text["engine tokens/s, carrying over not"] == (0.98, True)
    assert by_text["training speed over speculators'"] == (None, None)
    assert by_text["stock engine, plugin registered over absent"] == (None, None)


@pytest.mark.parametrize(
    ("bound", "value", "met"),
    [("least", 1.0, True), ("least", 0.99, False), ("most", 1.0, True), ("most", 1.01, False),
     ("near", 1.029, True), ("near", 0.96, False)],
)  # fmt: skip
def test_goals(bound, value, met):
    assert Ratio("x", "y", "z", 1.0, bound).met(value) is met
    assert Ratio("x", "y", "z").met(value) is None


def test_every_part_is_a_module_that_reports_in_json():
    assert set(PARTS) == {ratio.part for ratio in RATIOS}
    for part in PARTS:
        spec = importlib.util.find_spec(f"carryover.bench.{part}")
        text = Path(spec.origin).read_text()
        assert '"--json"' in text and "def main(" in text
        for ratio in RATIOS:
            if ratio.part == part:
                assert f'"{ratio.key}"' in text, (part, ratio.key)


def test_a_part_that_fails_is_told_and_fails_the_command(monkeypatch, capsys):
    def fail(command, **_):
        return subprocess.CompletedProcess(command, 1, stdout="", stderr="Traceback: boom")

    monkeypatch.setattr(parts.subprocess, "run", fail)
    assert parts.main(["--only", "train_step"]) == 1
    out = capsys.readouterr()
    assert "not measured" in out.out and "boom" in out.err


def test_a_part_is_run_in_a_process_of_its_own(monkeypatch):
    seen = []

    def run(command, **_):
        seen.append(command)
        return subprocess.CompletedProcess(command, 0, stdout='noise\n{"a": 1}\n', stderr="")

    monkeypatch.setattr(parts.subprocess, "run", run)
    assert parts.measure("ingress").report == {"a": 1}
    assert seen[0][0] == sys.executable and "carryover.bench.ingress" in seen[0]
