"""What rollout.py claims: the slot cache changes nothing about a sample but the time it takes."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, Olmo2Config, Qwen2Config, Qwen3Config

import rollout
from errors import UserError
from rollout import Sampler, naive_generate

SMALL = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CONFIGS = {
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=16),
    "llama": LlamaConfig(**SMALL),
    "olmo2": Olmo2Config(**SMALL),
    "gpt_neox": GPTNeoXConfig(**{k: v for k, v in SMALL.items() if k != "num_key_value_heads"}),
}
PROMPTS = [[5, 9, 11, 3, 8, 20, 31], [7], [1, 2, 3, 4], [30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41]]
EOS = {4, 17}


def build(name="qwen2", seed=0, **changes):
    torch.manual_seed(seed)
    config = CONFIGS[name]
    model = AutoModelForCausalLM.from_config(type(config)(**{**config.to_dict(), **changes}))
    with torch.no_grad():
        for parameter in model.parameters():  # far from uniform, so that a wrong cache shows
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        for x, y in zip(a, b, strict=True):
            assert x.prompt_ids == y.prompt_ids and x.response_ids == y.response_ids and x.finished == y.finished
            np.testing.assert_allclose(x.logprobs, y.logprobs, atol=1e-4)
            np.testing.assert_allclose(x.entropies, y.entropies, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_cached_equals_naive(name, temperature):
    model = build(name)
    options = {"n": 3, "max_new_tokens": 20, "temperature": temperature, "seed": 3}
    got = Sampler(model, EOS, slots=5, max_len=40).generate(PROMPTS, **options)
    assert_same(got, naive_generate(model, PROMPTS, EOS, **options))
