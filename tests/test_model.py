"""Loading, prompts and scoring: packed = padded = alone; a model that cannot be scored so is refused by name."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from conftest import byte_tokenizer, random_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import r3
from rollout import Sampler
from runtime import model as lm
from runtime.attention import attention_shape
from runtime.errors import UserError

TINY = Path(r3.__file__).parent / "data" / "tiny" / "model"
PAIRS = [([5, 6, 7], [8, 9, 1]), ([5], [4]), ([9, 8, 7, 6, 5], [3] * 9), ([2, 2], [7, 1])]


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
@pytest.mark.parametrize(
    "make",
    [
        lambda: random_model(64),
        lambda: small(LlamaForCausalLM, LlamaConfig),
        lambda: small(Qwen3ForCausalLM, Qwen3Config),
    ],
    ids=["qwen2", "llama", "qwen3"],
)
def test_packed_rows_score_as_they_do_alone(make, temperature):
    model = make()
    with torch.no_grad():
        logp, entropy = lm.token_logprobs(model, PAIRS, temperature)
        expected = [fresh_forward(model, row, temperature) for row in PAIRS]
    torch.testing.assert_close(logp, torch.cat([x for x, _ in expected]).float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropy, torch.cat([x for _, x in expected]).float(), rtol=1e-4, atol=1e-4)


def test_scoring_leaves_the_models_own_forward_alone():
    model, ids = random_model(64), torch.tensor([[5, 6, 7]])
    before = model(input_ids=ids).logits
    lm.token_logprobs(model, PAIRS, 1.0)
    assert torch.equal(model(input_ids=ids).logits, before)


def test_the_gradient_of_a_pack_is_the_sum_of_its_rows():
    together, alone = random_model(64), random_model(64)
    lm.token_logprobs(together, PAIRS, 1.0)[0].sum().backward()
    for row in PAIRS:
        lm.token_logprobs(alone, [row], 1.0)[0].sum().backward()
    for p, q in zip(together.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5)


def test_dropout_is_off_while_scoring_a_model_in_training():
    model = random_model(64)
    expected = lm.token_logprobs(model, PAIRS, 1.0)[0]
    model.config.attention_dropout = 0.5
    for module in model.modules():
        module.attention_dropout = 0.5
    assert torch.equal(lm.token_logprobs(model.train(), PAIRS, 1.0)[0], expected) and model.training


def test_micro_batches_hold_every_row_once_within_the_budget():
    lengths = [5, 90, 7, 30, 31, 2, 200, 6]
    batches = lm.micro_batches(lengths, 64)
    assert sorted(i for b in batches for i in b) == list(range(8))
    assert all(len(b) == 1 or max(lengths[i] for i in b) * len(b) <= 64 for b in batches)
    assert lm.micro_batches([], 64) == []


def test_every_eos_id_counts():
    model, tokenizer = random_model(), byte_tokenizer()
    model.generation_config.eos_token_id = [7, 8]
    model.config.eos_token_id = 9
    assert lm.eos_ids(model, tokenizer) == {7, 8, 9, tokenizer.eos_token_id}
    model.config.eos_token_id = [9, 10]
    assert lm.eos_ids(model, tokenizer) == {7, 8, 9, 10, tokenizer.eos_token_id}


def test_the_eos_id_of_a_class_of_models_does_not_count_only_that_of_the_folder(tmp_path):
    model = small(LlamaForCausalLM, lambda **shape: LlamaConfig(**{**shape, "vocab_size": 272}))
    save(model, tmp_path)
    given = json.loads((tmp_path / "config.json").read_text())
    for config, expected in ((given, {2, 256}), ({k: v for k, v in given.items() if k != "eos_token_id"}, {256})):
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "generation_config.json").write_text("{}")
        assert lm.eos_ids(*lm.load(str(tmp_path), "cpu", torch.float32)) == expected


@pytest.mark.parametrize("wrong", [272, 99999, -1])
@pytest.mark.parametrize("file", ["generation_config", "config"])
def test_an_eos_id_outside_of_the_vocabulary_is_refused_in_one_line(tmp_path, wrong, file):
    model = random_model()
    getattr(model, file).eos_token_id = wrong if file == "config" else [5, wrong]
    save(model, tmp_path)
    with pytest.raises(UserError, match=f"EOS.*{wrong}.*allowed: 0 to 271"):
        lm.load(str(tmp_path), "cpu", torch.float32)
    with pytest.raises(UserError, match=f"EOS.*{wrong}.*allowed: 0 to 271"):
        Sampler(random_model(), {5, wrong}, slots=2, max_len=20)


def test_a_prompt_is_the_chat_template_up_to_the_assistants_turn():
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(lm.chat_prompt(tokenizer, "Hi")) == "<|user|>Hi<|assistant|>"
    assert tokenizer.decode(lm.chat_prompt(tokenizer, "Hi", "Be brief")) == "<|system|>Be brief<|user|>Hi<|assistant|>"
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        lm.chat_prompt(tokenizer, "Hi")


MARKERS = ["<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>"]


@pytest.mark.parametrize(
    "text", [*MARKERS, "a<|end|>b", "<|assistant|>I won.<|end|><|user|>", "<|end|><|end|>", "<|en<|end|>d|>"]
)
def test_a_special_token_in_a_problem_or_a_failure_stays_text(text):
    """The only special tokens of the prompt are those of the template; the text is there, byte for byte."""
    tokenizer = byte_tokenizer()
    special, turns = (
        set(tokenizer.all_special_ids),
        tokenizer.convert_tokens_to_ids(["<|system|>", "<|user|>", "<|assistant|>"]),
    )
    ids = lm.chat_prompt(tokenizer, text, text)
    assert [i for i in ids if i in special] == turns
    assert tokenizer.decode(ids) == f"<|system|>{text}<|user|>{text}<|assistant|>"


def test_a_failure_with_role_markers_is_quoted_as_text_in_its_reflection():
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("<|assistant|>", split_special_tokens=True) + [65, tokenizer.eos_token_id]
    shown = r3.failure_excerpt(ids, tokenizer, 100)
    assert shown == "<|assistant|>b"
    prompt = lm.chat_prompt(tokenizer, r3.reflection_prompt("1+1=", shown, "{problem} {attempt}"))
    assert [i for i in prompt if i >= 256] == tokenizer.convert_tokens_to_ids(["<|user|>", "<|assistant|>"])


def test_a_prompt_without_special_text_has_the_ids_of_the_chat_template():
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    for text in ("Compute 3+4.", " a\n\nb ", "<", "|>", "\u00e9\u2028", ""):
        turns = [{"role": "user", "content": text}]
        assert lm.chat_prompt(tokenizer, text) == tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_dict=False
        )


def test_decoding_leaves_out_special_tokens_but_not_the_tags_of_thinking():
    text = "<think>\\boxed{1}</think>\\boxed{2}"
    for special in (True, False):
        tokenizer = byte_tokenizer()
        tokenizer.add_tokens(["<think>", "</think>"], special_tokens=special)
        ids = tokenizer.encode(f"<|assistant|>{text}<|end|>")
        assert len(ids) < len(text), "the tags are tokens"
        assert lm.decode(tokenizer, ids) == text
        assert r3.failure_excerpt(ids, tokenizer, 100) == "\\boxed{2}"


def test_decoding_without_such_tags_is_the_tokenizer_s_own():
    tokenizer, rng = byte_tokenizer(), torch.Generator().manual_seed(0)
    for _ in range(50):
        ids = torch.randint(len(tokenizer), (20,), generator=rng).tolist()
        assert lm.decode(tokenizer, ids) == tokenizer.decode(ids, skip_special_tokens=True)


def test_a_folder_loads_in_eval_mode(model_folder):
    model, tokenizer = lm.load(str(model_folder), "cpu", torch.float32)
    assert not model.training and tokenizer.decode(tokenizer.encode("5+5=10")) == "5+5=10"


# ---- models that are refused


def save(model, folder):
    """As a folder that `load` could take, with the byte tokenizer."""
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def build(kind: str, **changes):
    """A small random model of this architecture; its weights are large enough to show what they do."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {} if kind in ("Falcon", "Bloom") else {"num_key_value_heads": 2}
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    old = {"n_embd": 32, "n_layer": 2, "n_head": 4, "d_model": 32, "n_layers": 2, "n_heads": 4, "rotary_dim": 4}
    names = {**(old if kind in ("Mpt", "GPTJ", "CodeGen", "GPT2") else shape), "vocab_size": 272, **none, **changes}
    config = getattr(transformers, f"{kind}Config")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(**names))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model.eval()


KINDS_WITHOUT = ["StableLm", "Nemotron", "Falcon", "Mpt", "Bloom", "Helium", "Rwkv", "Bert", "Doge"]


@pytest.mark.parametrize("kind", KINDS_WITHOUT)
def test_a_model_that_does_not_take_our_attention_is_refused_in_one_line(kind, tmp_path):
    """Sampling and loading: no traceback of a module that got a word it does not know, and no other numbers."""
    model = build(kind)
    with pytest.raises(UserError) as sampling:
        Sampler(model, {5}, slots=2, max_len=20)
    save(model, tmp_path)
    with pytest.raises(UserError) as loading:
        lm.load(str(tmp_path), "cpu", torch.float32)
    for error in (sampling, loading):
        said = str(error.value)
        assert (
            model.config.model_type in said
            and "found" in said
            and "allowed: a causal model" in said
            and "\n" not in said
        )


@pytest.mark.parametrize("kind", ["Gemma", "Olmo", "Olmo2", "GPT2", "GPTNeoX", "Phi3", "SmolLM3", "OPT"])
def test_a_model_that_takes_our_attention_loads_and_scores_as_it_does_alone(kind, tmp_path):
    model = build(kind)
    save(model, tmp_path)
    model, _ = lm.load(str(tmp_path), "cpu", torch.float32)
    logp, entropy = lm.token_logprobs(model, PAIRS, 0.7)
    expected = [fresh_forward(model, pair, 0.7) for pair in PAIRS]
    torch.testing.assert_close(logp, torch.cat([x for x, _ in expected]).float(), rtol=1e-4, atol=2e-4)


def scaled(before: float = 1.0, after: float = 1.0):
    """A model of a class of its own whose logits differ by what no setting of its config says."""

    class Scaled(type(random_model())):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * after
            return out

    model = random_model()
    model.__class__ = Scaled
    if before != 1:
        model.lm_head.register_forward_pre_hook(lambda module, args: (args[0] * before,))
    return model


def with_head_bias(std: float):
    model = random_model()
    model.lm_head.bias = torch.nn.Parameter(torch.randn(272, generator=torch.Generator().manual_seed(0)) * std)
    return model


HEADS = {
    "bias": (lambda: with_head_bias(0.05), "a bias of the head"),
    "small_bias": (lambda: with_head_bias(1e-4), "a bias of the head"),
    "Phi": (lambda: build("Phi"), "a bias of the head"),
    "GPTJ": (lambda: build("GPTJ"), "a bias of the head"),
    "CodeGen": (lambda: build("CodeGen"), "a bias of the head"),
    "logit_scale": (lambda: build("Cohere", logit_scale=0.99), "logit_scale = 0.99"),
    "logits_scaling": (lambda: build("Granite", logits_scaling=1.01), "logits_scaling = 1.01"),
    "soft_cap": (lambda: build("NanoChat", final_logit_softcapping=1000.0), "final_logit_softcapping = 1000.0"),
    "after": (lambda: scaled(after=0.999), "in its code"),
    "before": (lambda: scaled(before=0.99), "in its code"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", HEADS)
def test_logits_that_are_more_than_the_head_are_refused(case, dtype):
    make, words = HEADS[case]
    place = "before" if case == "before" else "after"
    with pytest.raises(UserError, match=f"changes its logits {place} the head: .*{words}"):
        lm.check_head(make().to(dtype), "it")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [random_model, lambda: build("Gemma"), lambda: build("Cohere", logit_scale=1.0)])
def test_plain_logits_pass_in_either_dtype(make, dtype):
    model = make().to(dtype)
    lm.check_head(model, "it")
    attention_shape(model, 20)


def test_a_missing_folder_is_named_with_its_neighbour(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match="did you mean"):
        lm.load(str(tmp_path / "modle"), "cpu", torch.float32)
