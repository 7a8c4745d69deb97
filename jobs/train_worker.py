"""What each worker of a training job runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch

from carryover.errors import UserError
from carryover.training.checkpointed import CheckpointedLoop
from carryover.training.session import Assignment, Stopped, build_loop
from carryover.training.target_session import TargetAssignment, build_target_loop
from carryover.training.workers import Parallelism, Workers
from jobs.board import BoardReporter


def train_worker(told: dict[str, Any]) -> None:
    """Train a drafter until the end or until asked to stop; everything is reported to the board.

    Args:
        told: `assignment` and `board`.
    """
    assignment: Assignment = told["assignment"]
    _train(told["board"], assignment.config.parallelism, partial(build_loop, assignment))


def train_target_worker(told: dict[str, Any]) -> None:
    """The same for a target.

    Args:
        told: `assignment` and `board`.
    """
    assignment: TargetAssignment = told["assignment"]
    _train(told["board"], "ddp", partial(build_target_loop, assignment))


def _train(
    board: ray.actor.ActorHandle,
    parallelism: Parallelism,
    build: Callable[..., CheckpointedLoop],
) -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    reporter = BoardReporter(board)
    context = ray.train.get_context()
    workers = Workers(
        rank=context.get_world_rank(),
        size=context.get_world_size(),
        device=ray.train.torch.get_device(),
        parallelism=parallelism,
    )
    if workers.device.type == "cuda":
        torch.cuda.set_device(workers.device)
    try:
        if workers.is_first:
            reporter.report({"kind": "stage", "name": "loading"})
        loop = build(workers=workers, reporter=reporter)
        if workers.is_first:
            reporter.report({"kind": "stage", "name": "training", "step": loop.progress.step})
        loop.run()
    except Stopped:
        return
    except UserError as error:
        # The driver shows it as it is; Ray would wrap it in tracebacks.
        reporter.report({"kind": "error", "type": type(error).__name__, "message": str(error)})
        raise
    # A barrier, and what Ray Tune reads.
    ray.train.report({**loop.progress.evaluation, "step": loop.progress.step})
