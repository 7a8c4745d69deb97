"""Why an engine did not start: its own error out of its log, and what to do about it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_TAIL_BYTES = 200_000

_PREFIX = re.compile(r"^(\x1b\[[\d;]*m)?\([^)]*pid=\d+[^)]*\)(\x1b\[[\d;]*m)? ?")
_LOG_HEAD = re.compile(r"^(ERROR|WARNING|INFO|DEBUG) [\d-]+ [\d:]+ \[[^\]]*\] ?")
_ERROR = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*([A-Z]\w*(?:Error|Exception|Exit|Interrupt))\b(?:: ?(.*))?$"
)
# Errors that only pass on that another process failed.
_SECONDHAND = (
    "engine core initialization failed", "workerproc initialization failed", "see root cause",
    "see stack trace for root cause", "worker failed with error", "engine core proc", "cancelled",
    "failed to create vllm engine config",
)  # fmt: skip

# (pattern in the engine's error, what to do); the first that matches is given.
_FIXES = (
    (
        r"max seq len|maximum model length|estimated maximum|memory for the cache blocks",
        "raise engine.kv_cache_gib or lower engine.max_model_len",
    ),
    (
        r"max_model_len.*(greater|exceed)|derived max_model_len",
        "lower engine.max_model_len to what the target's configuration allows",
    ),
    (
        r"kv cache\s+allocation is less|out of memory|cannot allocate memory|OutOfMemory|bad_alloc",
        "free memory, lower engine.kv_cache_gib or engine.max_num_seqs, or serve fewer arms",
    ),
    (
        r"died unexpectedly|exit code: -9|SIGKILL|failed core proc",
        "the system ended the process, most often for want of memory: free some, lower "
        "engine.kv_cache_gib, or serve fewer arms",
    ),
    (
        r"architectures? .*(not supported|unsupported)|not supported for now",
        "this vLLM cannot run the model; `platform checkpoint verify` names what it can",
    ),
    (
        r"size mismatch|shape mismatch|shapes cannot|does not match|no module or parameter named",
        "the drafter's weights do not fit; check it with `platform checkpoint verify`",
    ),
    (
        r"max_num_batched_tokens",
        "raise engine.extra.max_num_batched_tokens, or lower engine.max_num_seqs",
    ),
    (r"safetensor|No such file|not a local folder", "check the target's and the drafter's folder"),
)


@dataclass(frozen=True)
class Cause:
    """An engine's own error.

    Attributes:
        error: type and message, one line.
        fix: what to do; None where no rule is known.
    """

    error: str
    fix: str | None


def read_tail(path: str | Path) -> str:
    """The end of a log; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def find_cause(log: str) -> Cause | None:
    """Find the first error in an engine's log that is not just passed on from another process.

    Args:
        log: text of the replica's log, in which the engine's processes write too.
    """
    passed_on = None
    lines = [_strip(line) for line in log.splitlines()]
    for number, line in enumerate(lines):
        match = _ERROR.match(line)
        if match is None or match.group(1) in ("SystemExit", "KeyboardInterrupt"):
            continue
        text = line.strip()
        # pydantic puts what is wrong on the lines after the first.
        if match.group(1) == "ValidationError":
            text = " ".join([text, *(part.strip() for part in lines[number + 1 : number + 4])])
        if any(phrase in text.lower() for phrase in _SECONDHAND):
            passed_on = passed_on or text
            continue
        return Cause(text[:600], _fix_for(text))
    for line in lines:
        if re.search(r"died unexpectedly|exit code: -9", line):
            return Cause(line.strip()[:600], _fix_for(line))
    return None if passed_on is None else Cause(passed_on[:600], _fix_for(passed_on))


def _fix_for(error: str) -> str | None:
    for pattern, fix in _FIXES:
        if re.search(pattern, error, re.IGNORECASE):
            return fix
    return None


def _strip(line: str) -> str:
    return _LOG_HEAD.sub("", _PREFIX.sub("", line))
