"""Loads a drafter into stock vLLM in a process of its own, whose memory is free afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from carryover.errors import CheckpointError, UserError
from carryover.targets import Target

_USER_ERROR_STATUS = 2


def verify_in_vllm(folder: Path, target: Target) -> str:
    """Serve the drafter with its target for a few tokens, and return one line about it.

    Raises:
        CheckpointError: vLLM refuses the drafter, or fails with it.
    """
    command = [
        sys.executable,
        "-P",
        "-m",
        "jobs.verification",
        str(folder),
        target.name,
        target.path,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return done.stdout.strip().splitlines()[-1]
    if done.returncode == _USER_ERROR_STATUS:
        raise CheckpointError(done.stdout.strip())
    tail = "\n".join(done.stderr.strip().splitlines()[-30:])
    raise CheckpointError(
        f"vLLM failed with the untrained drafter {folder} (status {done.returncode}):\n{tail}\n"
        "look at it with `platform doctor`, or train without this check by --skip-verify"
    )


def _main(folder: str, name: str, path: str) -> int:
    from carryover.drafters.verify import verify

    try:
        print(verify(Path(folder), Target(name=name, path=path)))
    except UserError as error:
        print(error)
        return _USER_ERROR_STATUS
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
