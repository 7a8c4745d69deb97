"""Loads a drafter into stock vLLM in a process of its own, whose memory is free afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from carryover import errors
from carryover.errors import CheckpointError, UserError
from carryover.targets import Target


def verify_in_vllm(folder: Path, target: Target) -> str:
    """Serve the drafter with its target for a few tokens, and return one line about it.

    Raises:
        UserError: of `carryover.drafters.verify`: vLLM refuses the drafter, or its text is wrong.
        CheckpointError: the process died.
    """
    command = [sys.executable, "-P", "-m", __name__, str(folder), target.name, target.path]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        tail = "\n".join(done.stderr.strip().splitlines()[-30:])
        raise CheckpointError(
            f"vLLM died with the untrained drafter {folder} (status {done.returncode}):\n{tail}\n"
            "look at the machine with `platform doctor`, or leave the check out by --skip-verify"
        ) from None
    if "error" in answer:
        kind = getattr(errors, answer["error"], UserError)
        raise kind(answer["message"] + "\nto train without this check, give --skip-verify")
    return answer["report"]


def _main(folder: str, name: str, path: str) -> None:
    from carryover.drafters.verify import verify

    try:
        answer = {"report": str(verify(Path(folder), Target(name=name, path=path)))}
    except UserError as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    _main(*sys.argv[1:])
