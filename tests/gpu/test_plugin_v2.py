"""Runs the prepared script where there is a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from carryover.runtime import has_gpu


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="needs an NVIDIA GPU")
def test_v2_is_as_v1_and_cheap() -> None:
    script = Path(__file__).parent / "plugin_v2.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
