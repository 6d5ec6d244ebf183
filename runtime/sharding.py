"""sharding.py: one path from one card to many nodes: FSDP2, mixed precision and activation checkpointing.

    shard(policy, ranks, torch.bfloat16)        # its weights, gradients and moments are spread over the ranks
    recompute_activations(policy)               # gradient_checkpointing: a block's activations are computed again

Master weights are fp32; each rank holds 1/size of them. A forward pass gathers one transformer block at a time, rounded
to the run's dtype, and computes as a model that was loaded in this dtype: trainer, sampler and reference have the same
numerics. Gradients are added up over the ranks in fp32; the loss has the global denominator, so nothing is averaged.
In fp32 on one rank there is nothing to shard and nothing to round, and the model stays as it is.
"""

from __future__ import annotations

import functools
import types
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from runtime.attention import attention
from runtime.model import score
from runtime.ranks import Ranks


def blocks(model) -> list[torch.nn.Module]:
    """The transformer blocks of a Hugging Face model, in their order."""
    names = model._no_split_modules or ()
    return [module for module in model.modules() if type(module).__name__ in names]


def shard(model, ranks: Ranks, dtype: torch.dtype, stored: torch.dtype = torch.float32) -> None:
    """Spreads the parameters over the ranks, in `stored`; they compute in `dtype`. Block by block, so that no rank
    holds a full copy on its device. Nothing to do on one rank where both are the same."""
    if ranks.size == 1 and dtype == stored:
        return
    if not dist.is_initialized():  # one process without torchrun
        backend = "nccl" if ranks.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    rounding = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (*blocks(model), model):
        for parameter in module.parameters():
            if not isinstance(parameter, DTensor):
                parameter.data = parameter.data.to(stored)
        fully_shard(module, mesh=mesh, mp_policy=rounding, reshard_after_forward=True)  # the root, too
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum
    model.score = types.MethodType(score, model)
    register_fsdp_forward_method(model, "score")


def recompute_activations(model) -> None:
    """Activation checkpointing: of each block only the input is kept, and backward computes the rest again."""

    def again():  # the contexts of the two computations: backward needs the attention of forward
        return nullcontext(), attention(model)

    for block in blocks(model):
        forward = block.forward

        @functools.wraps(forward)
        def wrapped(*args, forward=forward, **kwargs):
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            return checkpoint(forward, *args, use_reentrant=False, context_fn=again, preserve_rng_state=False, **kwargs)

        block.forward = wrapped


def is_sharded(model) -> bool:
    return isinstance(model, FSDPModule)


def full(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A parameter or gradient as one tensor on every rank, in `dtype`; all ranks call it together."""
    tensor = tensor.detach().to(dtype or tensor.dtype)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter or gradient."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
