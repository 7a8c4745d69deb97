"""The drafting method comes from the checkpoint, whatever its folder is called."""

import json

import pytest

from carryover.engine import drafter_config
from carryover.errors import CheckpointError


@pytest.mark.parametrize("name", ["best", "eagle3-style", "my-dspark-run", "dflash"])
@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_the_method_is_the_checkpoints_own(tmp_path, name, method):
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"speculators_model_type": method}))
    assert drafter_config(folder, num_speculative_tokens=5) == {
        "model": str(folder),
        "method": method,
        "num_speculative_tokens": 5,
    }


@pytest.mark.parametrize("content", [None, "{", "[]", '{"model_type": "llama"}'])
def test_a_folder_that_is_no_drafter_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match="no drafter checkpoint"):
        drafter_config(tmp_path, num_speculative_tokens=5)
