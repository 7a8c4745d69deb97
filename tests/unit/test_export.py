"""Drafters to give away: the same drafter, smaller, with a card and nothing of this machine."""

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file
from training_cases import carryover_drafter, make_drafter
from typer.testing import CliRunner

from carryover import provenance
from carryover.cli import app
from carryover.drafters import checkpoint
from carryover.drafters.export import export
from carryover.errors import CheckpointError, ConfigError
from carryover.training.config import TrainConfig

RECORD = {
    "training": "carryover", "run": "try", "step": 40, "num_steps": 60,
    "evaluation": {"acceptance_length": 2.125, "rounds": 812.0, "step": 40},
    "config": {"regime": "markov", "epochs": 3.0},
}  # fmt: skip


def card(folder):
    _, head, body = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(head), body


@pytest.mark.parametrize(("regime", "carries"), [("dflash", False), ("markov", True)])
def test_the_export_is_the_same_drafter_rounded(tmp_path, tiny_llama, regime, carries):
    make = carryover_drafter if carries else make_drafter
    drafter = make(tiny_llama, regime)
    record = {**RECORD, **provenance.collect()}
    checkpoint.save(drafter, tmp_path / "whole", record)
    folder = export(tmp_path / "whole", tmp_path / "given")
    described = checkpoint.describe(folder)
    assert described["kind"] == ("carryover" if carries else "baseline")
    assert described["dtypes"] == ["BF16"]
    before = checkpoint.describe(tmp_path / "whole")
    assert described["weights_bytes"] < 0.6 * before["weights_bytes"]
    whole, given = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "given"))
    assert whole.keys() == given.keys()
    for name, tensor in whole.items():
        expected = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert torch.equal(given[name], expected), name
    checkpoint.load(folder)
    head, body = card(folder)
    assert head["tags"][0] == "speculative-decoding" and regime in head["tags"]
    assert ("carryover" in head["tags"]) == carries
    assert "acceptance length 2.125 over 812 rounds" in body
    assert yaml.safe_load(body.split("```yaml")[1].split("```")[0]) == RECORD["config"]


def test_nothing_of_the_machine_is_given_away(tmp_path, tiny_llama):
    drafter = make_drafter(tiny_llama)
    drafter.target_identity = {**drafter.target_identity, "name": "some/target"}
    # what a run's record holds: every setting, absolute folders among them
    config = TrainConfig(
        data=str(tmp_path / "responses"), runs_folder=str(tmp_path / "runs"),
        hidden_states={"cache_folder": str(tmp_path / "states")},
    ).model_dump(mode="json")  # fmt: skip
    record = {**RECORD, "config": config, **provenance.collect()}
    checkpoint.save(drafter, tmp_path / "whole", record)
    # the real target has another name here, which is what a hub name is to a local folder
    values = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert str(tiny_llama) in values["speculators_config"]["verifier"]["name_or_path"]
    folder = export(tmp_path / "whole", tmp_path / "given")
    text = "".join(path.read_text() for path in folder.iterdir() if path.suffix != ".safetensors")
    found = provenance.collect()
    for word in (str(tmp_path), str(tiny_llama), "argv", "hardware", '"user"'):
        assert word not in text, word
    assert found["hardware"]["system"] not in text
    assert "base_model: some/target" in text and "lr: 0.0006" in text


def test_what_is_given_is_said_and_kept(tmp_path, tiny_llama):
    checkpoint.save(make_drafter(tiny_llama), tmp_path / "whole", {})
    words = ["checkpoint", "export", str(tmp_path / "whole"), "-o", str(tmp_path / "given")]
    words += ["--dtype", "float16", "--data", "Own prompts.", "--limits", "English only."]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0 and "MB; its card is" in done.stdout
    _, body = card(tmp_path / "given")
    assert "## Data\n\nOwn prompts." in body and "## Limits\n\nEnglish only." in body
    assert checkpoint.describe(tmp_path / "given")["dtypes"] == ["F16"]
    # again: an export is replaced, anything else is not
    assert CliRunner().invoke(app, words).exit_code == 0
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="no exported drafter"):
        export(tmp_path / "whole", tmp_path / "other")
    assert (tmp_path / "other" / "notes.txt").read_text() == "mine"


def test_weights_beyond_float16_are_refused(tmp_path, tiny_llama):
    drafter = make_drafter(tiny_llama)
    with torch.no_grad():
        drafter.fc.weight[0, 0] = 1e6
    checkpoint.save(drafter, tmp_path / "whole", {})
    with pytest.raises(CheckpointError, match="does not fit into float16; export it in bfloat16"):
        export(tmp_path / "whole", tmp_path / "given", dtype="float16")
    export(tmp_path / "whole", tmp_path / "given")
