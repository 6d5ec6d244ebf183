"""model.py: what R³ needs of a Hugging Face causal LM: load it, write its prompts, and score given responses.

    model, tokenizer = load("data/tiny/model", device="cpu", dtype=torch.float32)
    prompt_ids = chat_prompt(tokenizer, "Compute 3+4.")
    logprob, entropy = token_logprobs(model, [(prompt_ids, response_ids)], temperature=1.0)

Sequences are packed: all tokens of a micro-batch lie one after another in one row of T tokens, positions restart at
each sequence, and attention stays within it. So no padding enters any matrix product but the attention's own, and on
CUDA (flash attention over cumulative lengths) not even that. Legend: B sequences, T tokens in all, H heads, D head
size.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from jinja2 import TemplateError
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from entropy import linear_token_stats
from runtime.errors import UserError

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None
try:
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None

Row = tuple[Sequence[int], Sequence[int]]  # (prompt ids, response ids)


# ----------------------------------------------------------------------------------------------------- loading


def load(name: str, device: str | torch.device, dtype: torch.dtype, trust_remote_code: bool = False):
    """A causal LM in eval mode (dropout off, SPEC 8.10) and its tokenizer, from a folder or a hub name.

    Raises UserError where the folder or the hub name is missing or damaged, the model is no causal LM, tokenizer and
    embedding do not fit, there is no end-of-sequence id, or the logits are not `hidden @ head.T` (SPEC 9).
    """
    folder = Path(name)
    if not folder.exists() and (name.count("/") != 1 or name.startswith((".", "/", "~")) or folder.parent.is_dir()):
        siblings = [str(p) for p in folder.parent.glob("*")] if folder.parent.is_dir() else []
        close = difflib.get_close_matches(name, siblings, n=1)
        raise UserError(f"model {name!r}: no such folder" + (f" (did you mean {close[0]!r}?)" if close else ""))
    if folder.exists() and not (folder / "config.json").is_file():
        raise UserError(f"model {name!r}: the folder has no config.json, so it is no Hugging Face model")
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        model, report = AutoModelForCausalLM.from_pretrained(
            name,
            config=config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported, and refused below
        )
    except Exception as error:  # transformers and safetensors raise many kinds; each of them is about this folder
        what = str(error).strip().split("\n")[0][:300]
        if "trust_remote_code" in str(error):
            what = "it brings code of its own, which runs only with trust_remote_code = true"
        raise UserError(f"model {name!r}: it cannot be loaded: {type(error).__name__}: {what}") from error
    wrong = sorted(report["missing_keys"]) + sorted(key for key, *_ in report["mismatched_keys"])
    if wrong:
        raise UserError(f"model {name!r}: {len(wrong)} tensors missing or of another shape, {wrong[0]} among them")
    if not tokenizer.encode("1+1=2", add_special_tokens=False):
        raise UserError(f"model {name!r}: its tokenizer knows no text; is tokenizer.json missing?")
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise UserError(f"model {name!r}: the tokenizer has {len(tokenizer)} tokens, the embedding only {rows}")
    if not eos_ids(model, tokenizer):
        raise UserError(f"model {name!r}: neither generation_config.json nor the tokenizer names an EOS token")
    model = model.to(device).eval()
    if model.device.type == "cpu":
        for p in model.parameters():
            p.data = p.data.clone()  # out of the mapped file: aligned alike for any file, so a resume has the same bits
    check_head(model, name)
    return model, tokenizer


def positions(model: PreTrainedModel) -> int:
    """How many tokens the model sees at once, prompt and response together; a sliding window ends them, too."""
    config, limits = model.config, ["max_position_embeddings"]
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        limits.append("sliding_window")
    return min(getattr(config, name, None) or sys.maxsize for name in limits)


def eos_ids(model: PreTrainedModel, tokenizer) -> set[int]:
    """Every id that ends a response: those of generation_config (a list at times), config and tokenizer (SPEC 8.3)."""
    found = [getattr(model.generation_config, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)]
    flat = [i for ids in found for i in (ids if isinstance(ids, (list, tuple)) else [ids])]
    return {int(i) for i in flat if i is not None}


@torch.no_grad()
def check_head(model: PreTrainedModel, name: str) -> None:
    """Refuses a model whose logits are more than hidden @ head.T (scaled or soft-capped logits, a bias)."""
    ids = torch.arange(3, 7, device=model.device)[None]
    hidden = model.base_model(input_ids=ids).last_hidden_state
    ours = hidden @ model.get_output_embeddings().weight.T
    theirs = model(input_ids=ids).logits
    if not theirs.isfinite().all():
        raise UserError(f"model {name!r}: its logits are not finite, so its weights are damaged")
    if not torch.allclose(ours.float(), theirs.float(), rtol=1e-2, atol=1e-2 * theirs.abs().max().item()):
        raise UserError(
            f"model {name!r}: {type(model).__name__} changes its logits after the head (scale, soft cap, bias); "
            "allowed: models whose logits are hidden @ head.T, such as Qwen2, Qwen3, Llama, Mistral"
        )


def chat_prompt(tokenizer, user: str, system: str = "") -> list[int]:
    """The ids of one user turn in the model's own chat template, up to where the assistant begins.

    Raises UserError where the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise UserError(f"model {tokenizer.name_or_path!r}: its tokenizer has no chat template; add one to the folder")
    turns = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": user}]
    try:
        return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))
    except TemplateError as error:  # bad syntax, or a turn that the template refuses, such as a system prompt
        raise UserError(f"model {tokenizer.name_or_path!r}: its chat template fails: {error}") from error


# ----------------------------------------------------------------------------------------- packed attention


def packed_attention(module, query, key, value, attention_mask=None, scaling=None, *, packing, **_):
    """Causal attention within each packed sequence: query [1, H, T, D], key and value [1, H_kv, T, D] -> [1, T, H, D].

    Flash attention over cumulative lengths on CUDA in half precision; elsewhere the sequences are laid out as padded
    rows, where the causal mask alone keeps real tokens away from the padding behind them.
    """
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))  # (T, H, D); rotation may give fp32
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and (flash := flash_attention()):
        ends, longest = packing["ends"], packing["longest"]
        return flash(q, k, v, ends, ends, longest, longest, scaling)[None], None
    row, column, B, L = packing["row"], packing["column"], packing["rows"], packing["longest"]
    q, k, v = (x.new_zeros(B, L, *x.shape[1:]).index_put((row, column), x).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)[row, column][None], None


@functools.cache
def flash_attention():
    """Causal attention(q, k, v, ends, ends, longest, longest, scale) by torch or flash-attn; None without either."""
    if varlen_attn and {"window_size", "enable_gqa", "scale"} <= set(inspect.signature(varlen_attn).parameters):
        return lambda *args: varlen_attn(*args[:7], scale=args[7], window_size=(-1, 0), enable_gqa=True)
    if flash_attn_varlen_func:
        return lambda *args: flash_attn_varlen_func(*args[:7], softmax_scale=args[7], causal=True)
    return None


AttentionInterface.register("packed", packed_attention)
transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()  # what its warnings are about, `load` checks


@contextlib.contextmanager
def attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Within the block the model attends by the registered function `name`; the module may be shared with a sampler."""
    before = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before


# --------------------------------------------------------------------------------- scoring given responses


def pack(rows: Sequence[Row], device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, dict]:
    """Packs (prompt, response) pairs: ids [1, T], positions [1, T], index [N], targets [N], packing.

    The last response token predicts nothing and is left out of the input. `index` are the positions whose hidden states
    predict the N response tokens `targets`, EOS included: here alone the mask is made, and from lengths (SPEC 8.3).
    """
    ids, row, column, index, targets, ends = [], [], [], [], [], [0]
    for i, (prompt, response) in enumerate(rows):
        assert len(prompt) and len(response), f"empty prompt or response: {len(prompt)}, {len(response)} tokens"
        length = len(prompt) + len(response) - 1
        index.extend(range(len(ids) + len(prompt) - 1, len(ids) + length))
        ids.extend(prompt)
        ids.extend(response[:-1])
        row.extend([i] * length)
        column.extend(range(length))
        ends.append(len(ids))
        targets.extend(response)

    def moved(values: list[int], dtype=torch.long) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)  # the host does not wait for the device

    positions = moved(column)
    packing = {"row": moved(row), "column": positions, "ends": moved(ends, torch.int32)}
    packing |= {"rows": len(rows), "longest": max(end - start for start, end in itertools.pairwise(ends))}
    return moved(ids)[None], positions[None], moved(index), moved(targets), packing


def token_logprobs(model: PreTrainedModel, rows: Sequence[Row], temperature: float) -> tuple[Tensor, Tensor]:
    """log pi(token) and entropy in nats of each response token, at the sampling temperature (SPEC 8.2).

    rows: (prompt ids, response ids) pairs; returns two fp32 tensors [N], response after response. Differentiable.
    Without rows N is 0, and the pass takes place all the same: ranks of a sharded model must not part.
    """
    device = model.get_input_embeddings().weight.device
    packed = pack(rows or [((0,), (0,))], device)
    with attention(model, "packed"):
        stats = getattr(model, "score", functools.partial(score, model))(*packed, temperature)
    return stats if rows else tuple(x[:0] for x in stats)


def score(model: PreTrainedModel, ids, positions, index, targets, packing, temperature) -> tuple[Tensor, Tensor]:
    """The forward pass of `token_logprobs` on packed rows; a sharded model gathers its weights around it."""
    hidden = model.base_model(input_ids=ids, position_ids=positions, use_cache=False, packing=packing).last_hidden_state
    hidden = hidden[0].index_select(0, index)  # (N, d)
    return linear_token_stats(hidden, model.get_output_embeddings().weight, targets, temperature)


def micro_batches(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Indices of sequences, alike in length, in batches of at most `token_budget` tokens (a longer one goes alone).

    The budget counts padded tokens, so it also bounds the attention's own padding.
    """
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[batches[-1][0]] if batches else 0
        if batches and longest * (len(batches[-1]) + 1) <= token_budget:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches
