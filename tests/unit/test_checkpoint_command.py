"""`platform checkpoint show`: the table, and a serve command that vLLM understands."""

import json
import shlex

import pytest
from training_cases import carryover_drafter, make_drafter
from typer.testing import CliRunner

from carryover.cli import app
from carryover.drafters import checkpoint


@pytest.mark.parametrize(
    ("make", "regime", "method"),
    [(make_drafter, "dflash", "dflash"), (carryover_drafter, "markov", "dspark")],
)
def test_show_ends_with_the_command_that_serves_the_drafter(
    tiny_llama, tmp_path, make, regime, method
):
    folder = tmp_path / "a plain name"
    checkpoint.save(make(tiny_llama, regime), folder, {"run": "r1"})
    shown = CliRunner().invoke(app, ["checkpoint", "show", str(folder)])
    assert shown.exit_code == 0, shown.output
    assert shown.output.count("tokenizer sha256") == 1
    words = shlex.split(shown.output.strip().splitlines()[-1])
    assert words[:4] == ["vllm", "serve", str(tiny_llama), "--speculative-config"]
    assert json.loads(words[4]) == {
        "model": str(folder),
        "method": method,
        "num_speculative_tokens": 7,
    }
