"""base.py: what the makers of the embedded models share: files of problems, tokenizer, model, training, a check.

A base learns from demonstrations (data/tiny/make.py, data/words/make.py), made one by one as training needs them.
What this file leaves out: no downloads, no GPU, no resuming.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

# ---------------------------------------------------------------------------------------------------------------------
# 1. Problems and verdicts. A problem is anything with a `text` and an `answer`.


def to_jsonl(name: str, split: str, problems: Iterable) -> str:
    """One line per problem, with uids NAME-SPLIT-0001 and so on."""
    lines = []
    for number, problem in enumerate(problems, 1):
        row = {"uid": f"{name}-{split}-{number:04d}", "problem": problem.text, "answer": str(problem.answer)}
        lines.append(json.dumps(row) + "\n")
    return "".join(lines)


def is_correct(response: str, ends: bool, answer: int) -> bool:
    return ends and response.endswith(f"\\boxed{{{answer}}}")


# ---------------------------------------------------------------------------------------------------------------------
# 2. Tokenizer and model

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role not in ("user", "assistant") -%}
{{ raise_exception("this model knows the roles user and assistant, found " + message.role) }}
{%- endif -%}
{{ "<|" + message.role + "|>" + message.content + "<|end|>" }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<|assistant|>" }}{%- endif -%}
"""
POSITIONS = 1024


def train_tokenizer(corpus: list[str]):
    """Qwen2's byte-level BPE with a vocabulary of our own: one token for each digit and every common word.

    AutoTokenizer gives every Qwen2 model Qwen2's splitting rules (and Unicode NFC), so this one is trained with them.
    """
    from tokenizers import pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    marks = ["<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=marks, initial_alphabet=alphabet, show_progress=False)
    backend = Qwen2Tokenizer().backend_tokenizer
    backend.train_from_iterator(corpus, trainer)
    bpe = json.loads(backend.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=bpe["vocab"],
        merges=[tuple(pair) for pair in bpe["merges"]],
        eos_token="<|end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=marks[2:],
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer, width: int, inner: int, layers: int, seed: int):
    """An untrained Qwen2, float32. width: of the residual stream; inner: of the MLPs."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, top_k=0
    )
    return model


# ---------------------------------------------------------------------------------------------------------------------
# 3. Training

BATCH_TOKENS = 2048  # small batches: the models are small, and steps count for more than tokens
WARMUP = 100  # steps


class Example(NamedTuple):
    """Token ids of a chat and where its response begins."""

    ids: list[int]
    start: int


def prompt_ids(tokenizer, user: str) -> list[int]:
    chat = [{"role": "user", "content": user}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False).input_ids


def as_example(tokenizer, user: str, response: str, ends: bool, budget: int) -> Example:
    """The chat of one demonstration; the response is cut off after `budget` tokens, its EOS included."""
    prompt, ids = prompt_ids(tokenizer, user), tokenizer(response, add_special_tokens=False).input_ids
    return Example(prompt + (ids + [tokenizer.eos_token_id] * ends)[:budget], len(prompt))


def batches(rng: random.Random, examples: Iterator[Example], pool: int = 4096) -> Iterator[list[Example]]:
    """Batches of about BATCH_TOKENS padded tokens, each of examples of like length, in random order."""
    while True:
        ready, batch = [], []
        for example in sorted((next(examples) for _ in range(pool)), key=lambda example: len(example.ids)):
            if batch and (len(batch) + 1) * len(example.ids) > BATCH_TOKENS:
                ready.append(batch)
                batch = []
            batch.append(example)
        rng.shuffle(ready)  # the longest few, which fill no batch, are left out
        yield from ready


def response_loss(model, batch: list[Example]):
    """Mean cross-entropy (nats) of the response tokens. Padding is on the right, where no token looks."""
    import torch

    width = max(len(example.ids) for example in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    targets = torch.full((len(batch), width - 1), -100)
    for row, example in enumerate(batch):
        tokens = torch.tensor(example.ids)
        ids[row, : len(tokens)] = tokens
        targets[row, example.start - 1 : len(tokens) - 1] = tokens[example.start :]
    wanted = targets != -100
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1][wanted]
    return torch.nn.functional.cross_entropy(model.lm_head(hidden), targets[wanted])


def train(model, rng: random.Random, demonstration: Callable[[], Example], tokens: int, peak_lr: float) -> None:
    """One phase of `tokens` tokens, padding included: warm-up, then a cosine from `peak_lr` to 0.

    Muon for the matrices: it needs half the tokens that AdamW does here.
    """
    import torch

    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name]
    others = [weight for name, weight in model.named_parameters() if weight.ndim != 2 or "embed" in name]
    optimizers = [
        torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.01),
    ]
    seen, began = 0, time.time()
    for step, batch in enumerate(batches(rng, iter(demonstration, None))):
        loss = response_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                cosine = 0.5 * (1 + math.cos(math.pi * seen / tokens))
                group["lr"] = peak_lr * min((step + 1) / WARMUP, cosine)
            optimizer.step()
            optimizer.zero_grad()
        if step % 50 == 0:
            print(f"{time.time() - began:6.0f} s  step {step}  tokens {seen:,}  loss {loss.item():.4f}", flush=True)
        seen += len(batch) * len(batch[-1].ids)
        if seen >= tokens:
            return


# ---------------------------------------------------------------------------------------------------------------------
# 4. What the base does


class Sampled(NamedTuple):
    text: str
    tokens: int  # EOS included
    finished: bool


def respond(model, tokenizer, users: list[str], samples: int, budget: int) -> list[list[Sampled]]:
    """`samples` responses at temperature 1 to each user turn."""
    import torch

    prompts = [prompt_ids(tokenizer, user) for user in users]
    by_length = sorted(range(len(users)), key=lambda i: len(prompts[i]))
    responses: list[list[Sampled]] = [[] for _ in users]
    for first in range(0, len(users), 32):
        some = by_length[first : first + 32]
        inputs = tokenizer.pad({"input_ids": [prompts[i] for i in some]}, padding_side="left", return_tensors="pt")
        with torch.no_grad():
            ids = model.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=budget, num_return_sequences=samples)
        for row, tokens in enumerate(ids[:, inputs["input_ids"].shape[1] :].tolist()):
            finished = tokenizer.eos_token_id in tokens
            length = tokens.index(tokenizer.eos_token_id) if finished else len(tokens)
            text = tokenizer.decode(tokens[:length])
            responses[some[row // samples]].append(Sampled(text, length + finished, finished))
    return responses


def check(folder: Path, parts: dict[str, list], budget: int, seed: int, samples: int = 16) -> None:
    """Print what the base in `folder` does on problems, by part and in all. Hard: correct at most once."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    problems = [problem for part in parts.values() for problem in part]
    groups = respond(model, tokenizer, [problem.text for problem in problems], samples, budget)
    print(f"part   pass@1  pass@{samples}  truncated  hard  tokens")
    for name, part in {**parts, "all": problems}.items():
        some = [pair for pair in zip(problems, groups, strict=True) if pair[0] in part]
        correct = [sum(is_correct(r.text, r.finished, problem.answer) for r in group) for problem, group in some]
        flat = [response for _, group in some for response in group]
        pass_1, truncated = sum(correct) / len(flat), sum(not r.finished for r in flat) / len(flat)
        pass_n, hard = sum(n > 0 for n in correct) / len(some), sum(n <= 1 for n in correct) / len(some)
        tokens = sum(r.tokens for r in flat) / len(flat)
        print(f"{name:<5}  {pass_1:6.1%}  {pass_n:7.1%}  {truncated:9.1%}  {hard:4.0%}  {tokens:6.1f}", flush=True)
