"""The processes that train together: one, several on CPU (gloo), or several on GPUs (nccl).

The drafter is wrapped so that the gradients of all workers are averaged. DDP keeps whole copies.
FSDP2 shards the trained parameters, and with them the optimizer; it is also what mixed precision
is made of, on a single worker too: float32 weights are kept and updated, and a bfloat16 copy of
them computes, so that the model code sees one type and needs no autocast.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

Parallelism = Literal["ddp", "fsdp"]


@dataclass(frozen=True)
class Workers:
    """This process among those that train together.

    Attributes:
        rank, size: as in torch.distributed, whose process group must exist if `size` > 1.
        device: of this process.
        parallelism: how parameters are kept if `size` > 1.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    parallelism: Parallelism = "ddp"

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def wrap(self, module: nn.Module, *, param_dtype: torch.dtype) -> nn.Module:
        """Make the module average gradients over workers.

        Args:
            module: called by its `forward`. Frozen parameters are not sharded.
            param_dtype: what a sharded module computes in.
        """
        if self.parallelism == "ddp":
            return (
                module
                if self.size == 1
                else DistributedDataParallel(
                    module, broadcast_buffers=False, gradient_as_bucket_view=True
                )
            )
        policy = MixedPrecisionPolicy(
            param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        frozen = {p for p in module.parameters() if not p.requires_grad}
        for parameter in frozen:
            parameter.data = parameter.data.to(param_dtype)
        mesh = dist.init_device_mesh(self.device.type, (self.size,))
        return fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=frozen)

    @contextmanager
    def accumulating(self, module: nn.Module, *, more: bool) -> Iterator[None]:
        """Run a backward pass; gradients are averaged over workers unless `more` passes follow."""
        if isinstance(module, DistributedDataParallel) and more:
            with module.no_sync():
                yield
            return
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(not more)
        yield

    @contextmanager
    def whole(self, module: nn.Module) -> Iterator[None]:
        """Let parts of a sharded module be called directly, without talking to other workers."""
        if not isinstance(module, FSDPModule):
            yield
            return
        module.unshard()
        try:
            yield
        finally:
            module.reshard()

    def whole_weights(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Trained weights by name, on the CPU; empty but on worker 0 if sharded. All must call."""
        options = StateDictOptions(
            full_state_dict=True, cpu_offload=True, ignore_frozen_params=True
        )
        return get_model_state_dict(module, options=options)

    def clip_gradients(self, module: nn.Module, max_norm: float) -> float:
        """Scale gradients down to a global norm of `max_norm`; return the norm they had."""
        trained = [p for p in module.parameters() if p.grad is not None]
        norm = nn.utils.clip_grad_norm_(trained, max_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over workers, in float64 on the CPU."""
        values = values.detach().to(self.device, torch.float64)
        if self.size > 1:
            dist.all_reduce(values)
        return values.cpu()

    def barrier(self) -> None:
        """Wait for all workers."""
        if self.size > 1:
            dist.barrier()
