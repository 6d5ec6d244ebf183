"""One whole step of a run at its true sizes, without a card and without weights: sampling, update, save.

    python bench/rehearse.py --config configs/r3_7b.yaml --gpus 8        # as rank 0 of eight

Tensors are fake (FakeTensorMode): they have a shape, a dtype and a device, but no numbers. The product code runs
with the sizes of the real run, and shapes that do not fit fail here. The device is called `card`; `is_cuda` is true for
its tensors, so that the code takes the paths of a CUDA card. FSDP2 runs on torch's fake process group. Two kinds of
calls are refused:

    the host needs a number from the device     by FakeTensorMode: .item(), nonzero, boolean indices
    the host waits for a copy                   by Memory, here: .cpu(), .to(device) without non_blocking

The decode step may copy nothing at all, for a CUDA graph has to hold it. bench/memory.py reads the peaks that Memory
counts. Left out: what a kernel computes, and whether it compiles (Triton's launches do nothing, attention returns
memory of the shape of its output).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import json
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # gives collectives a fake implementation
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config
from transformers.initialization import no_init_weights

sys.path.insert(0, str(Path(__file__).parent.parent))

import entropy
import r3
import rollout
import runtime.memory
import runtime.sharding
from runtime import checkpoint
from runtime import config as settings
from runtime import model as lm
from runtime.errors import UserError, exit_cleanly
from runtime.memory import most_slots
from runtime.optimizer import adamw
from runtime.ranks import Ranks
from runtime.run import Run
from runtime.sharding import recompute_activations, shard
from sampling import gumbel, kvcache

QWEN2 = {"max_position_embeddings": 131072, "rope_theta": 10000.0, "tie_word_embeddings": False}
SHAPES = {  # of the models that the configs name, for no hub can be reached from every machine
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": Qwen2Config(
        vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
        num_attention_heads=12, num_key_value_heads=2, **QWEN2,
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": Qwen2Config(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
        num_attention_heads=28, num_key_value_heads=4, **QWEN2,
    ),
}  # fmt: skip
TEMPLATE_TOKENS = 128  # of the reflection prompt beside problem and attempt, at most


def shape_of(model: str):
    """The Hugging Face config of a model that has no weights here: a known name, or a folder with its config.json."""
    if (Path(model) / "config.json").is_file():
        return AutoConfig.from_pretrained(model)
    if model not in SHAPES:
        raise UserError(f"model = {model!r}, allowed: a folder with a config.json, {', '.join(SHAPES)}")
    return SHAPES[model]


# ---------------------------------------------------------------- a card that has shapes only


class Stream:
    """Streams and events of the card: nothing to wait for."""

    def __init__(self, *_, **__):
        pass

    def record(self, *_):
        return self

    wait_stream = wait_event = record_event = synchronize = record


class Card(backend_registration._DummyBackendModule):
    """torch.card: what FSDP2 and checkpointing ask of a device's module."""

    Stream = Event = Stream
    _initialized = True

    def current_stream(self, *_):
        return Stream()

    def stream(self, _):
        return contextlib.nullcontext()

    def set_device(self, _):
        pass

    def get_amp_supported_dtype(self):
        return [torch.bfloat16]


class Attention(torch.autograd.Function):
    """scaled_dot_product_attention as a fused kernel keeps memory: inputs, output, a number per query and head."""

    @staticmethod
    def forward(ctx, q, k, v):
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx, _):
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


class CardCache(kvcache.SlotCache):
    """The cache as it is on CUDA: in the order that the kernel reads, attention by torch's varlen_attn."""

    def __init__(self, shape, slots, max_len, dtype, device):
        (layers, heads, size), self.max_len = shape, max_len
        self.kv = torch.zeros(2, layers, slots, max_len, heads, size, dtype=dtype, device=device).transpose(3, 4)
        self.over_slots = kvcache.SlotCache._varlen if kvcache.varlen_attn else kvcache.SlotCache._sdpa


COPIES = "aten::copy_", "aten::_to_copy", "aten::to"  # the last one in inference mode


class Waits(RuntimeError):
    """The host would wait for the device."""


class Memory(TorchDispatchMode):
    """Bytes of all tensors that are alive, by device type: now, and at most since `begin`.

    A storage counts from the operation that first returns it until it is freed, as in torch's MemTracker, which keeps
    a record per module besides and takes minutes where this takes seconds.
    """

    def __init__(self):
        super().__init__()
        self.sizes, self.now, self.peak = WeakIdKeyDictionary(), {}, {}
        self.counting, self.refused = True, ""

    def __enter__(self):
        self.resize = torch.UntypedStorage.resize_

        def resized(storage, size):  # no operation: FSDP2 gives the memory of gathered weights back in this way
            self.resize(storage, size)
            if storage in self.sizes:
                self.count(storage)

        torch.UntypedStorage.resize_ = resized
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self.resize
        return super().__exit__(*error)

    def begin(self) -> None:
        self.peak = dict(self.now)

    def add(self, device: str, size: int) -> None:
        self.now[device] = self.now.get(device, 0) + size
        self.peak[device] = max(self.peak.get(device, 0), self.now[device])

    def count(self, storage, device: str = "") -> None:
        """Adds what the storage has grown by since it was last counted; its device where it is new."""
        if storage not in self.sizes:
            self.sizes[storage] = seen = [device, 0]
            weakref.finalize(storage, lambda: self.add(seen[0], -seen[1]))
        seen, size = self.sizes[storage], storage.nbytes()
        if size != seen[1]:
            self.add(seen[0], size - seen[1])
            seen[1] = size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(t is DTensor for t in types):
            return NotImplemented  # it comes again with the local tensors
        out = func(*args, **(kwargs or {}))
        if self.counting:
            for tensor in (out,) if isinstance(out, torch.Tensor) else tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    self.count(tensor.untyped_storage(), tensor.device.type)
            if func._schema.name in COPIES:
                given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | (kwargs or {})
                moved = given.get("src", given["self"]).device != out.device
                if moved and (self.refused == "copies" or self.refused == "waits" and not given.get("non_blocking")):
                    raise Waits(f"a copy of {list(out.shape)} between host and device; refused here: {self.refused}")
        return out

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within the block nothing new counts."""
        self.counting = False
        try:
            yield
        finally:
            self.counting = True

    @contextlib.contextmanager
    def refusing(self, kind: str) -> Iterator[None]:
        """Within the block a copy between host and device fails: any one ("copies"), or one that the host waits for
        ("waits")."""
        self.refused = kind
        try:
            yield
        finally:
            self.refused = ""


@contextlib.contextmanager
def fake_card(gpus: int, memory: Memory, gb: float) -> Iterator[torch.device]:
    """Within the block tensors are fake and there is a card of `gb` GB, the first of `gpus`. Once per process."""
    backend_registration._setup_privateuseone_for_python_backend("card", Card())
    dist.init_process_group("cpu:fake,card:fake", rank=0, world_size=gpus, store=FakeStore())
    mesh, real = init_device_mesh("card", (gpus,)), torch.tensor
    shapes_of = ShardingPropagator._propagate_tensor_meta_non_cached  # of a whole DTensor, on no real device either

    def tensor(data, device=None, **options):  # the constructor alone goes round the fake mode
        return real(data, **options) if device is None else real(data, **options).to(device)

    def attend(q, k, v, *_, **__):
        return Attention.apply(q, k, v)

    def propagate(*args):
        with memory.paused():
            return shapes_of(*args)

    def room(_):
        return int(gb * 1e9) - memory.now.get("card", 0)

    with contextlib.ExitStack() as stack:
        for place, name, value in (
            (torch.Tensor, "is_cuda", property(lambda x: x.device.type == "card")),
            (torch, "tensor", tensor),
            (F, "scaled_dot_product_attention", attend),
            (FakeTensor, "numpy", lambda x: np.zeros(x.shape, str(x.dtype).removeprefix("torch."))),  # tokens 0: EOS
            (entropy, "launch", lambda *_, **__: None),
            (gumbel, "launch", lambda *_, **__: None),
            (entropy, "triton", entropy.triton or mock.Mock(cdiv=lambda a, b: -(-a // b))),
            (rollout, "SlotCache", CardCache),
            (rollout, "free_bytes", room),
            (runtime.memory, "card_bytes", lambda _: int(gb * 1e9)),
            (runtime.sharding, "init_device_mesh", lambda *_: mesh),
            (ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate),
        ):
            stack.enter_context(mock.patch.object(place, name, value, create=True))
        stack.callback(dist.destroy_process_group)
        stack.enter_context(FakeTensorMode())
        stack.enter_context(memory)
        yield torch.device("card", 0)


# ---------------------------------------------------------------- a step


@dataclasses.dataclass(frozen=True)
class OneOf(Ranks):
    """Rank 0, without asking the others."""

    def sum(self, values):
        return [self.size * value for value in values]

    def max(self, value):
        return value


class Rehearsal:
    """The models, optimiser and sampler of a run, as runtime/run.py builds them, and its phases.

    `held`: bytes on the device by what holds them. memory: counts, or None (then tensors may be real).
    """

    def __init__(self, c: r3.Config, shape, ranks: Ranks, dtype: torch.dtype, memory: Memory):
        self.c, self.ranks, self.memory, self.held = c, ranks, memory, {}
        alone = ranks.size == 1 and dtype == torch.float32
        with self.holding("weights"):
            policy = self.build(shape, torch.float32 if alone else torch.bfloat16)
            if c.gradient_checkpointing:
                recompute_activations(policy)
            shard(policy, ranks, dtype)
            policy.config._attn_implementation = "packed"
        with self.holding("sampler"):
            sampled_from = policy if alone else self.build(shape, dtype).requires_grad_(False)
        reference = None
        with self.holding("reference"):
            if c.beta > 0:
                reference = self.build(shape, dtype).requires_grad_(False)
                shard(reference, ranks, dtype, stored=dtype)
        reflection = c.reflection_tokens + TEMPLATE_TOKENS if c.reflect else 0
        self.longest_prompt = c.max_prompt_tokens + reflection
        with self.holding("moments"):
            optimizer = adamw(policy, c)
        self.longest = min(self.longest_prompt + c.max_new_tokens, lm.positions(policy))
        empty = {f.name: None for f in dataclasses.fields(Run) if f.default is dataclasses.MISSING}
        parts = {"config": c, "ranks": ranks, "policy": policy, "reference": reference, "optimizer": optimizer}
        self.run = Run(**{k: v for k, v in empty.items() if k != "seconds"} | parts)
        self.sampled_from = sampled_from

    def build(self, shape, dtype: torch.dtype):
        with no_init_weights(), torch.device(self.ranks.device):
            return AutoModelForCausalLM.from_config(copy.deepcopy(shape), dtype=dtype).eval()

    @contextlib.contextmanager
    def holding(self, name: str) -> Iterator[None]:
        device = self.ranks.device.type
        before = self.memory.now.get(device, 0)
        yield
        self.held[name] = self.memory.now.get(device, 0) - before

    # -- lines 2 to 4: prefill and decode

    def sample(self) -> rollout.Sampler:
        """Loads the weights into the sampler, computes as many prompts as fit in a prefill, and uses all slots."""
        config, step = self.sampled_from.config, rollout.Sampler._step
        heads = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = config.num_hidden_layers, config.num_key_value_heads, heads

        def guarded(*args):
            with self.memory.refusing("copies"):  # for a CUDA graph holds it
                return step(*args)

        probe = mock.patch.object(rollout, "attention_shape", lambda *_: shape)  # it may compare numbers
        with probe, mock.patch.object(rollout.Sampler, "_step", guarded):
            options = {"fixed_shapes": True, "eos_every": 1, "graphs": False}
            options |= {"most": most_slots(self.c, self.run.policy, self.ranks, self.longest)}
            sampler = rollout.Sampler(self.sampled_from, {0}, self.c.slots, self.longest, **options)
            sampler.load(self.run.policy)
            prompts = [[7] * self.longest_prompt] * max(1, rollout.PREFILL_TOKENS // self.longest_prompt)
            n, last = divmod(sampler.slots, len(prompts))
            sampler.generate(prompts, n=n + bool(last), max_new_tokens=self.c.max_new_tokens)
        some = np.arange(sampler.slots)
        with torch.inference_mode():
            sampler.cache.move(some, some[::-1].copy(), sampler.max_len)  # as many as can change places
        self.held["cache"] = sampler.cache.kv.nbytes
        return sampler

    # -- line 8: gradient and optimiser step

    def micro_batch(self) -> list[r3.Example]:
        """Responses that fill the token budget, or one of the longest if that is longer; the last one is replayed."""
        rows = -(-self.c.token_budget // self.longest)
        length = max(self.c.token_budget // rows, self.longest if rows == 1 else 0)
        prompt, L = [7] * min(64, length // 2), length - min(64, length // 2)
        A, logp = np.ones(L, np.float32), np.zeros(L, np.float32)
        return [
            r3.Example("q", prompt, [7] * L, A, 1 / L, logp, logp if row == rows - 1 else None, row == rows - 1)
            for row in range(rows)
        ]

    def update(self, micro_batches: int = 2) -> None:
        """One optimiser step: gradients of a few micro-batches of full size, clipped; without what the host reads."""
        run, parameters = self.run, [p for p in self.run.policy.parameters() if p.requires_grad]
        with self.memory.refusing("waits"):
            for _ in range(micro_batches):
                r3.add_gradient(run, self.micro_batch())
            self.held["gradients"] = sum(runtime.sharding.local(p.grad).nbytes for p in parameters)
            runtime.sharding.full(torch.nn.utils.clip_grad_norm_(parameters, self.c.grad_clip))
            run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=True)

    # -- a checkpoint

    def save(self) -> None:
        """What checkpoint.save gathers on the first rank, and its part of each file, as tensors and as bytes."""
        policy, dtype = self.run.policy, getattr(torch, self.c.save_dtype)
        weights = checkpoint.gathered(policy.state_dict(keep_vars=True), self.ranks, dtype)
        assert len(weights) == len(policy.state_dict())
        del weights
        tensors = checkpoint.sharded(policy, self.run.optimizer, weights=dtype != torch.float32)
        files = checkpoint.files_of(tensors)
        for number in set(files.values()):
            parts = [runtime.sharding.local(tensors[name]).cpu() for name in files if files[name] == number]
            parts += [torch.empty_like(part) for part in parts]


@dataclasses.dataclass
class Phase:
    """Largest bytes within a phase, and what of them lasts (name -> bytes)."""

    card: int
    host: int
    held: dict[str, int]
    seconds: float


def rehearse(c: r3.Config, gpus: int, gb: float) -> tuple[dict[str, Phase], int]:
    """The phases of a step of this config on a fake card of `gb` 10^9 bytes; and the slots of its sampler."""
    memory, phases = Memory(), {}
    with fake_card(gpus, memory, gb) as card:
        step = Rehearsal(c, shape_of(c.model), OneOf(0, gpus, card), torch.bfloat16, memory)

        def phase(name: str, work, *held: str):
            memory.begin()
            begun = time.perf_counter()
            result = work()
            kept = {key: step.held[key] for key in ("weights", "moments", "sampler", "reference", *held)}
            seconds = time.perf_counter() - begun
            phases[name] = Phase(memory.peak.get("card", 0), memory.peak.get("cpu", 0), kept, seconds)
            return result

        for p in step.run.policy.parameters():
            p.grad = torch.zeros_like(p)  # of the micro-batches before
        phase("update", lambda: step.update(1), "gradients")
        phase("save", step.save)
        sampler = phase("sampling", step.sample, "cache")
    return phases, sampler.slots


def arguments(description: str) -> tuple[argparse.Namespace, r3.Config]:
    """What this script and bench/memory.py take: the cards, a file for JSON, and a config with its overrides."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--gpus", type=int, default=1, help="ranks of one machine, one card each")
    parser.add_argument("--gb", type=float, default=80.0, help="memory of a card, 10^9 bytes")
    parser.add_argument("--json", type=Path)
    args, rest = parser.parse_known_args()
    if args.gpus < 1 or not args.gb > 0:
        raise UserError(f"command line: --gpus {args.gpus} --gb {args.gb:g}, allowed: 1 or more cards of above 0 GB")
    return args, settings.parse(r3.Config, ["--config", args.config, *rest])


def main() -> None:
    args, c = arguments(__doc__)
    phases, slots = rehearse(c, args.gpus, args.gb)
    print(f"{c.model}, rank 0 of {args.gpus}, {slots} slots: every operation fits, and the host waits for none")
    for name, phase in phases.items():
        print(f"{name:10} {phase.card / 1e9:6.1f} GB on the card at most   ({phase.seconds:.0f} s here)")
    if args.json:
        args.json.write_text(json.dumps({k: dataclasses.asdict(v) for k, v in phases.items()}, indent=1) + "\n")


if __name__ == "__main__":
    with exit_cleanly():
        main()
