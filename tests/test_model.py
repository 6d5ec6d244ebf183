"""Loading, prompts and scoring: packed = padded = alone (SPEC section 8)."""

import pytest
import torch
from conftest import byte_tokenizer, random_model
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from runtime import model as lm
from runtime.errors import UserError

ROWS = [([5, 6, 7], [8, 9, 1]), ([5], [4]), ([9, 8, 7, 6, 5], [3] * 9), ([2, 2], [7, 1])]


def fresh_forward(model, row, temperature):
    """Log-probs and entropies of one response by the model's own forward, alone and unpadded, in float64."""
    prompt, response = row
    logits = model(input_ids=torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    logp = (logits.double() / temperature).log_softmax(-1)
    return logp.gather(1, torch.tensor(response)[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def small(kind, config):
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return kind(config(**shape, **heads, initializer_range=0.3, max_position_embeddings=64)).eval()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("make", [
    lambda: random_model(64),
    lambda: small(LlamaForCausalLM, LlamaConfig),
    lambda: small(Qwen3ForCausalLM, Qwen3Config),
], ids=["qwen2", "llama", "qwen3"])
def test_packed_rows_score_as_they_do_alone(make, temperature):
    model = make()
    with torch.no_grad():
        logp, entropy = lm.token_logprobs(model, ROWS, temperature)
        expected = [fresh_forward(model, row, temperature) for row in ROWS]
    torch.testing.assert_close(logp, torch.cat([x for x, _ in expected]).float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropy, torch.cat([x for _, x in expected]).float(), rtol=1e-4, atol=1e-4)


def test_scoring_leaves_the_models_own_forward_alone():
    model, ids = random_model(64), torch.tensor([[5, 6, 7]])
    before = model(input_ids=ids).logits
    lm.token_logprobs(model, ROWS, 1.0)
    assert torch.equal(model(input_ids=ids).logits, before)


def test_the_gradient_of_a_pack_is_the_sum_of_its_rows():
    together, alone = random_model(64), random_model(64)
    lm.token_logprobs(together, ROWS, 1.0)[0].sum().backward()
    for row in ROWS:
        lm.token_logprobs(alone, [row], 1.0)[0].sum().backward()
    for p, q in zip(together.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5)


def test_micro_batches_hold_every_row_once_within_the_budget():
    lengths = [5, 90, 7, 30, 31, 2, 200, 6]
    batches = lm.micro_batches(lengths, 64)
    assert sorted(i for b in batches for i in b) == list(range(8))
    assert all(len(b) == 1 or max(lengths[i] for i in b) * len(b) <= 64 for b in batches)
    assert lm.micro_batches([], 64) == []


def test_every_eos_id_counts():
    model, tokenizer = random_model(), byte_tokenizer()
    model.generation_config.eos_token_id = [7, 8]
    assert lm.eos_ids(model, tokenizer) == {7, 8, tokenizer.eos_token_id}


def test_a_prompt_is_the_chat_template_up_to_the_assistants_turn():
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(lm.chat_prompt(tokenizer, "Hi")) == "<|user|>Hi<|assistant|>"
    assert tokenizer.decode(lm.chat_prompt(tokenizer, "Hi", "Be brief")) == "<|system|>Be brief<|user|>Hi<|assistant|>"
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        lm.chat_prompt(tokenizer, "Hi")


def test_a_folder_loads_in_eval_mode(model_folder):
    model, tokenizer = lm.load(str(model_folder), "cpu", torch.float32)
    assert not model.training and tokenizer.decode(tokenizer.encode("5+5=10")) == "5+5=10"


def test_logits_that_are_more_than_the_head_are_refused():
    model = small(Gemma2ForCausalLM, Gemma2Config)
    model.config.final_logit_softcapping = 0.5
    with pytest.raises(UserError, match="changes its logits"):
        lm.check_head(model, "gemma")


def test_a_missing_folder_is_named_with_its_neighbour(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match="did you mean"):
        lm.load(str(tmp_path / "modle"), "cpu", torch.float32)
