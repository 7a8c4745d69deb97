"""The data configurations that ship can be used, and say what the paper says."""

import pytest
from typer.testing import CliRunner

from carryover.cli import app
from carryover.data.regeneration import RegenerateConfig


@pytest.mark.parametrize("name", ["data_qwen3_4b", "data_gemma4_12b"])
def test_configurations_for_gpus(repository, name):
    path = repository / "jobs" / "configs" / f"{name}.yaml"
    config = RegenerateConfig.load(path)
    assert [source.path.split("/")[1] for source in config.prompts] == [
        "ultrachat_200k", "Magpie-Llama-3.1-Pro-300K-Filtered",
    ]  # fmt: skip
    assert all(source.split for source in config.prompts)
    assert config.max_prompt_tokens == 2048
    done = CliRunner().invoke(app, ["data", "regenerate", "--config", str(path), "--dry-run"])
    assert done.exit_code == 0 and f"target: {config.target}" in done.output


def test_every_data_configuration_is_tested_here(repository):
    found = sorted(path.stem for path in (repository / "jobs" / "configs").glob("data*.yaml"))
    assert found == ["data_gemma4_12b", "data_qwen3_4b"]
