"""What several test files share: a random model of a few thousand weights with a byte tokenizer, and small configs."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import contextlib
import dataclasses
import functools
import json
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

torch.set_num_threads(1)

def pytest_collection_modifyitems(items):
    """Tests marked `gpu` are skipped where there is no card."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA card"))


TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, four special ones, a chat template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"eos_token": "<|end|>", "pad_token": "<|pad|>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|system|>"]})
    fast.chat_template = TEMPLATE
    return fast


def random_model(vocab: int = 272, seed: int = 0) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return Qwen2ForCausalLM(config).eval()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    """A Hugging Face folder with the random model and the byte tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer, model = byte_tokenizer(), random_model()
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(60, 84)]  # about one token in eleven
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def problem_file(tmp_path) -> Path:
    path = tmp_path / "problems.jsonl"
    rows = ({"uid": f"q{i}", "problem": f"{i}+1=", "answer": str(i + 1)} for i in range(8))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def fresh_group(uid: str, correct: list[bool], seed: int = 0, kind: str = "plain"):
    """A sampled group with random responses of 2 to 7 tokens and these verdicts."""
    import r3
    from replay import Response
    from runtime.problems import Problem

    random = np.random.default_rng(seed)
    query = r3.Prompt(Problem(uid, f"problem {uid}", "1", "here"), kind, [3, 4, 5])
    responses, entropies = [], []
    for verdict in correct:
        length = 6 if len(correct) == 1 else int(random.integers(2, 8))
        ids, logp = random.integers(3, 200, length).tolist(), random.normal(-2, 0.5, length).astype(np.float32)
        responses.append(Response(query.ids, ids, logp, verdict, True, float(verdict), 1, kind))
        entropies.append(random.uniform(0, 2, length).astype(np.float32))
    rewards = tuple(a.reward for a in responses)
    return r3.Group(query, tuple(responses), rewards, tuple(entropies), len(responses))


def train_run(policy, **changes):
    """A Run with what an update needs: the policy, its optimiser, one rank; no reference, sampler or verifier."""
    import r3
    from runtime import ranks as machine
    from runtime import run

    config = r3.Config(**{"beta": 0.0, "dtype": "float32", "device": "cpu", "lr": 1e-3, **changes})
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.lr, weight_decay=0.0)
    signals = types.SimpleNamespace(interruptible=lambda collective=False: contextlib.nullcontext())
    required = (f for f in dataclasses.fields(run.Run) if f.default is f.default_factory is dataclasses.MISSING)
    empty = {f.name: None for f in required}
    parts = {"ranks": machine.Ranks(0, 1, torch.device("cpu")), "optimizer": optimizer, "signals": signals}
    return run.Run(**{**empty, **parts, "config": config, "policy": policy})


def step_on(run, groups):
    """One optimiser step on the groups; its metrics, name -> (sum, weight)."""
    import r3
    from runtime.optimizer import optimizer_step

    examples = r3.training_examples(groups, run.ranks, run.config)
    return optimizer_step(run, examples, functools.partial(r3.add_gradient, run))
