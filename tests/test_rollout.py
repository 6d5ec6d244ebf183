"""What rollout.py claims: slots change when a response is computed, and nothing about the response."""

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    GemmaConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    OlmoConfig,
    Qwen2Config,
    Qwen3Config,
)

import rollout
from entropy import token_stats
from rollout import CachedPrompt, Request, Sampler, Slots, reference_generate
from runtime.errors import UserError
from sampling import decoder, gumbel, kvcache
from sampling.gumbel import derive_seed

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
FAMILIES = {
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "llama": (LlamaConfig, {}),
    "mistral": (MistralConfig, {"sliding_window": 4096}),
    "olmo2": (Olmo2Config, {}),
    "gpt_neox": (GPTNeoXConfig, {}),
    "gemma": (GemmaConfig, {"head_dim": 8}),
    "olmo": (OlmoConfig, {}),
}
PROMPTS = [[5, 9, 11, 3, 8, 20, 31], [7], [1, 2, 3, 4], [30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41]]
EOS = {4, 17}


def build(config=Qwen2Config, seed=0, **changes):
    """A model with random weights whose distributions are far from uniform, so that a wrong cache shows."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config(**{**SMALL, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


@pytest.fixture(scope="module")
def model():
    return build()


def flat(groups):
    return [sample for group in groups for sample in group]


def assert_same(got, want):
    for x, y in zip(flat(got), flat(want), strict=True):
        assert (x.prompt_ids, x.response_ids, x.finished) == (y.prompt_ids, y.response_ids, y.finished)
        np.testing.assert_allclose(x.logprobs, y.logprobs, atol=1e-4)
        np.testing.assert_allclose(x.entropies, y.entropies, atol=1e-4)


# ---- the same responses


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_cached_equals_the_reference(family, temperature):
    """Mixed prompt lengths (one of a single token), fewer slots than requests, several EOS ids, n > 1."""
    config, changes = FAMILIES[family]
    model = build(config, **changes)
    options = {"n": 3, "max_new_tokens": 24, "temperature": temperature, "seed": 3}
    got = Sampler(model, EOS, slots=5, max_len=40).generate(PROMPTS, **options)
    assert_same(got, reference_generate(model, PROMPTS, EOS, **options))
    ends = {sample.response_ids[-1] for sample in flat(got)}
    assert temperature == 0.0 or ends & EOS, "no response ended: the case tests too little"


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
def test_packed_weights_equal_naive_before_and_after_a_change_of_the_weights(family, monkeypatch):
    """Every matrix is packed here, those with a bias too; between two calls nothing is."""
    monkeypatch.setattr(decoder, "PACKED_FROM", 1)
    config, changes = FAMILIES[family]
    model = build(config, **changes)
    sampler, packed = Sampler(model, EOS, slots=5, max_len=40), set()
    for seed in (3, 4):
        options = {"n": 3, "max_new_tokens": 24, "seed": seed}
        got = sampler.generate(PROMPTS, **options, on_finished=lambda *_: packed.add(len(sampler.forward.layers)))
        assert_same(got, reference_generate(model, PROMPTS, EOS, **options))
        assert packed == {SMALL["num_hidden_layers"]} and not sampler.forward.layers
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)


def test_logprobs_and_entropies_equal_a_fresh_forward(model):
    for sample in flat(Sampler(model, EOS, slots=4, max_len=60).generate(PROMPTS, n=2, temperature=0.7, seed=1)):
        ids = torch.tensor([sample.prompt_ids + sample.response_ids])
        start = len(sample.prompt_ids)
        with torch.no_grad():
            logits = model(ids).logits[0, start - 1 : -1]
        logprob, entropy = token_stats(logits, ids[0, start:], 0.7)
        np.testing.assert_allclose(sample.logprobs, logprob, atol=1e-4)
        np.testing.assert_allclose(sample.entropies, entropy, atol=1e-4)
        assert sample.logprobs.dtype == sample.entropies.dtype == np.float32


def test_top_p_draws_from_the_smallest_set_that_holds_the_mass(model):
    options = {"n": 4, "max_new_tokens": 12, "top_p": 0.6, "seed": 5}
    got = Sampler(model, EOS, slots=6, max_len=40).generate(PROMPTS, **options)
    assert_same(got, reference_generate(model, PROMPTS, EOS, **options))
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])  # probabilities 0.09, 0.64, 0.24, 0.03
    seeds, zero = torch.arange(200), torch.zeros(200, dtype=torch.long)
    for top_p, allowed in ((0.6, {1}), (0.7, {1, 2}), (0.9, {0, 1, 2}), (1.0, {0, 1, 2, 3})):
        tokens, logprobs, _ = gumbel.sample(logits.expand(200, 4), 1.0, seeds, zero, top_p)
        assert set(tokens.tolist()) == allowed
        mass = sum(logits.softmax(-1)[0, token].item() for token in allowed)
        np.testing.assert_allclose(logprobs.exp(), logits.softmax(-1)[0][tokens] / mass, rtol=1e-5)


def test_the_fixed_shape_loop_returns_the_same_and_cuts_the_overshoot(model):
    """The loop that CUDA runs: slots and span rounded up, EOS looked at every few steps."""
    options = {"n": 3, "max_new_tokens": 21, "seed": 2}
    want = Sampler(model, EOS, slots=7, max_len=33).generate(PROMPTS, **options)
    for every in (1, 4, 50):
        got = Sampler(model, EOS, slots=7, max_len=33, fixed_shapes=True, eos_every=every).generate(PROMPTS, **options)
        assert_same(got, want)
    for sample in flat(want):
        assert not EOS & set(sample.response_ids[:-1])


def test_many_slots_in_sorted_segments_equal_few(model):
    prompts = [[1 + i % 50] * (1 + i % 9) for i in range(20)]
    options = {"n": 4, "max_new_tokens": 50, "seed": 8}
    assert_same(*(Sampler(model, EOS, slots=slots, max_len=64).generate(prompts, **options) for slots in (48, 3)))


# ---- how a response ends


def force(model, *tokens):
    """The model, made to answer with `tokens` and then the last of them for ever, whatever it was asked."""

    def hook(module, args, kwargs, output):
        seen = kwargs["position_ids"][0] - 2  # of a prompt of three tokens: response tokens already there
        head = model.get_output_embeddings().weight[torch.tensor(tokens)[seen.clamp(0, len(tokens) - 1)]]
        output.last_hidden_state = 1e4 * (head / head.norm(dim=-1, keepdim=True))[None]  # its own row is the likeliest
        return output

    return model.base_model.register_forward_hook(hook, with_kwargs=True)


@pytest.mark.parametrize(
    ("answers", "budget", "want", "finished"),
    [
        ((4,), 6, (4,), True),
        ((9, 17, 9), 6, (9, 17), True),
        ((9, 9, 4), 3, (9, 9, 4), True),
        ((9, 9, 9, 4), 3, (9, 9, 9), False),
    ],
    ids=["eos_at_the_first_token", "any_of_several_eos_ids", "eos_as_the_last_allowed_token", "budget_reached"],
)
def test_a_response_is_finished_by_an_eos_alone(model, answers, budget, want, finished):
    hook = force(model, *answers)
    for every in (1, 4):
        sampler = Sampler(model, EOS, slots=2, max_len=20, eos_every=every)
        for sample in flat(sampler.generate([[1, 2, 3]] * 3, max_new_tokens=budget)):
            assert (sample.response_ids, sample.finished) == (want, finished)
            assert len(sample.logprobs) == len(sample.entropies) == len(want)
    hook.remove()


def test_max_len_bounds_prompt_and_response_together(model):
    hook = force(model, 9)
    (sample,) = flat(Sampler(model, EOS, slots=2, max_len=10).generate([[1, 2, 3]], max_new_tokens=50))
    assert (sample.response_ids, sample.finished) == ((9,) * 7, False)
    hook.remove()


def test_slots_stop_alone_and_nothing_is_computed_for_them_afterwards(model):
    sampler = Sampler(model, EOS, slots=6, max_len=60)
    samples = flat(sampler.generate(PROMPTS, n=5, max_new_tokens=40, seed=4))
    lengths = {len(sample.response_ids) for sample in samples}
    assert len(lengths) > 3
    assert sampler.slot_steps == sampler.tokens == sum(len(sample.response_ids) for sample in samples)


# ---- random streams


def test_same_seed_same_tokens_and_another_seed_others(model):
    sampler = Sampler(model, EOS, slots=4, max_len=40)
    one, again, other = (sampler.generate(PROMPTS, n=2, max_new_tokens=20, seed=seed) for seed in (1, 1, 2))
    assert_same(one, again)
    assert [x.response_ids for x in flat(one)] != [x.response_ids for x in flat(other)]
    assert one[0][0].response_ids != one[0][1].response_ids


def test_other_slots_do_not_change_a_slot(model):
    sampler = Sampler(model, EOS, slots=5, max_len=40)
    options, seeds = {"n": 2, "max_new_tokens": 20}, [10, 11, 12, 13]
    together = sampler.generate(PROMPTS, seed=seeds, **options)
    alone = [sampler.generate([ids], seed=[seed], **options)[0] for ids, seed in zip(PROMPTS, seeds, strict=True)]
    assert_same(together, alone)


def test_a_stream_is_a_63_bit_number_that_depends_on_every_key():
    keys = [(), (0,), (1,), (0, 1), (1, 0), (-1,), (2**80, 3)]
    assert len({derive_seed(*key) for key in keys}) == len(keys)
    assert all(0 <= derive_seed(*key) < 2**63 for key in keys)
    assert derive_seed(1, 2) == derive_seed(1, 2)


# ---- what is handed out, and when


def test_on_finished_hears_of_every_response_once_as_it_ends(model):
    heard, slots = [], 3
    results = Sampler(model, EOS, slots=slots, max_len=60).generate(
        PROMPTS, n=4, max_new_tokens=30, seed=6, on_finished=lambda *event: heard.append(event)
    )
    assert sorted(event[:2] for event in heard) == [(i, j) for i in range(4) for j in range(4)]
    assert all(results[i][j] is sample for i, j, sample in heard)
    assert {event[:2] for event in heard[:slots]} != {(0, 0), (0, 1), (0, 2)} or len(heard[0][2].response_ids) < 30


def test_a_sample_cannot_be_changed(model):
    (sample,) = flat(Sampler(model, EOS, slots=1, max_len=20).generate([[1, 2]], max_new_tokens=3))
    with pytest.raises(AttributeError):
        sample.finished = True


def test_no_prompts_give_no_samples(model):
    assert Sampler(model, EOS, slots=1, max_len=20).generate([]) == []


# ---- the model under it


def test_the_shared_module_trains_as_before_after_sampling():
    model = build(attention_dropout=0.0)
    model.train()
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    before, setting = model(ids).logits, model.config._attn_implementation
    Sampler(model, EOS, slots=2, max_len=30).generate([[1, 2, 3]], max_new_tokens=5)
    after = model(ids).logits
    assert torch.equal(before, after) and after.requires_grad
    assert model.training and model.config._attn_implementation == setting
    after.sum().backward()


def test_dropout_is_off_while_sampling():
    model = build(GPTNeoXConfig, attention_dropout=0.5, hidden_dropout=0.5)
    model.train()
    options = {"max_new_tokens": 10, "temperature": 0.0}
    got = Sampler(model, EOS, slots=2, max_len=30).generate(PROMPTS[:2], **options)
    assert_same(got, reference_generate(model.eval(), PROMPTS[:2], EOS, **options))


def test_an_exception_while_sampling_gives_the_module_back(model):
    setting = model.config._attn_implementation

    def stop(*event):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Sampler(model, EOS, slots=2, max_len=30).generate([[1, 2]], max_new_tokens=3, on_finished=stop)
    assert model.config._attn_implementation == setting


def test_load_carries_the_weights_in_the_sampler_s_dtype(model):
    own, policy = build(seed=1).bfloat16(), build(seed=2)
    sampler = Sampler(own, EOS, slots=2, max_len=30)
    storage = own.model.embed_tokens.weight.data_ptr()
    assert sampler.load(policy) > 0.0
    assert own.model.embed_tokens.weight.data_ptr() == storage
    for (name, x), (_, y) in zip(own.state_dict().items(), policy.state_dict().items(), strict=True):
        assert x.dtype == torch.bfloat16 and torch.equal(x, y.bfloat16()), name


def test_load_is_a_no_op_on_the_shared_module(model):
    weight = model.model.embed_tokens.weight.clone()
    Sampler(model, EOS, slots=2, max_len=30).load(model)
    assert torch.equal(weight, model.model.embed_tokens.weight)


def test_weights_changed_in_place_count_at_the_next_call():
    model = build()
    sampler = Sampler(model, EOS, slots=2, max_len=40)
    options = {"max_new_tokens": 12, "temperature": 0.0}
    sampler.generate(PROMPTS, **options)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-1.5)
    assert_same(sampler.generate(PROMPTS, **options), reference_generate(model, PROMPTS, EOS, **options))


def test_the_cache_comes_back_after_release(model):
    sampler = Sampler(model, EOS, slots=3, max_len=40)
    first = sampler.generate(PROMPTS, max_new_tokens=10)
    sampler.release()
    assert sampler.cache is None
    assert_same(sampler.generate(PROMPTS, max_new_tokens=10), first)


# ---- refusals


@pytest.mark.parametrize("wrong", [60, 10**6, -1])
def test_an_eos_id_outside_of_the_vocabulary_is_refused_in_one_line(model, wrong):
    with pytest.raises(UserError, match=f"EOS ids: found {wrong}, allowed: 0 to 59"):
        Sampler(model, {4, wrong}, slots=2, max_len=20)
    assert Sampler(model, (), slots=2, max_len=20).is_eos.sum() == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompts": [[1, 2], [1] * 20]}, ["prompt 1", "20 tokens", "1 to 19"]),
        ({"prompts": [[1], []]}, ["prompt 1", "0 tokens"]),
        ({"max_new_tokens": 0}, ["max_new_tokens", "found 0"]),
        ({"seed": [1, 2, 3]}, ["3 seeds", "1 prompts"]),
    ],
)
def test_what_cannot_be_sampled_is_refused_by_name(model, options, words):
    with pytest.raises(UserError) as error:
        Sampler(model, EOS, slots=2, max_len=20).generate(**{"prompts": [[1, 2]], **options})
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("config", "changes", "word"),
    [
        (MistralConfig, {"sliding_window": 8}, "sliding window of 8"),
        (Gemma2Config, {"head_dim": 8}, "softcap"),
        (DeepseekV3Config, {"n_routed_experts": 2, "num_experts_per_tok": 1, "first_k_dense_replace": 2}, "plain"),
        (LlamaConfig, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
    ],
    ids=["sliding_window", "soft_cap", "latent_attention", "dynamic_rope"],
)
def test_other_attention_is_refused_by_name(config, changes, word):
    with pytest.raises(UserError, match=word):
        Sampler(build(config, **changes), EOS, slots=2, max_len=30)


def test_a_cache_that_does_not_fit_is_refused_with_the_largest_that_does(model, monkeypatch):
    each = kvcache.slot_bytes((2, 2, 8), 100, torch.float32)
    assert each == 2 * 2 * 2 * 8 * 100 * 4  # keys and values, layers, heads, head size, positions, bytes
    monkeypatch.setattr(rollout, "free_bytes", lambda device: 10 * each)
    with pytest.raises(UserError, match="found 16 .* 1 to 9 in"):
        Sampler(model, EOS, slots=16, max_len=100)
    assert Sampler(model, EOS, slots=9, max_len=100).slots == 9
    assert Sampler(model, EOS, slots=None, max_len=100).slots == 9
    with pytest.raises(UserError, match="found 0"):
        Sampler(model, EOS, slots=0, max_len=100)


def test_the_cache_takes_what_was_estimated(model):
    sampler = Sampler(model, EOS, slots=3, max_len=50)
    sampler.generate([[1]], max_new_tokens=1)
    assert sampler.cache.kv.nbytes == 3 * kvcache.slot_bytes(sampler.shape, 50, torch.float32)
    assert sampler.memory().startswith("3 slots x 50 positions: ")


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_stop_with_the_request_s_name(poison):
    model = build()
    with torch.no_grad():
        model.lm_head.weight[3] = poison
    with pytest.raises(RuntimeError, match="prompt 0, sample 0: .*not finite"):
        Sampler(model, EOS, slots=2, max_len=30).generate(PROMPTS, max_new_tokens=5)


# ---- the slots' book-keeping


def test_round_up_takes_few_sizes_and_stays_below_the_largest():
    assert [kvcache.round_up(x, 1, 48) for x in (1, 2, 3, 5, 32, 33, 48)] == [1, 2, 4, 8, 32, 48, 48]
    assert kvcache.round_up(1000, 256, 700) == 700


def test_moving_the_misplaced_slots_sorts_the_segments_and_no_slot_gets_lost():
    rng = np.random.default_rng(0)
    for B in (1, 5, 16, 17, 40, 64):
        lengths = rng.integers(1, 300, size=B)
        places, sources = kvcache.misplaced(lengths)
        moved = lengths.copy()
        moved[places] = lengths[sources]
        assert sorted(moved) == sorted(lengths)
        starts = [0, *kvcache.segment_ends(B)]
        parts = [moved[a:b] for a, b in zip(starts, starts[1:], strict=False)]
        assert all(a.min() >= b.max() for a, b in zip(parts, parts[1:], strict=False))
        assert len(kvcache.misplaced(moved)[0]) == 0


def test_gaps_are_closed_from_the_end_and_records_stay_with_their_slots():
    slots = Slots(count=6, max_new_tokens=4, is_eos=np.zeros(10, dtype=bool))
    for slot in range(6):
        slots.admit(slot, Request(CachedPrompt(slot, (1,) * (slot + 1)), sample=0, seed=slot, budget=4))
    chunk = np.ones((1, 3, 6))
    slots.draw(chunk)
    for slot in (1, 2):
        slots.release(slot)
    slots.move(*slots.gaps())
    assert slots.in_use.tolist() == [True] * 4 + [False] * 2
    assert sorted(slots.seed[:4]) == [0, 3, 4, 5]
    assert [slots.requests[record].seed for record in slots.record[:4]] == slots.seed[:4].tolist()
    assert sorted(slots.record) == list(range(6))


def test_a_chunk_is_recorded_up_to_the_end_of_each_response():
    is_eos = np.zeros(10, dtype=bool)
    is_eos[7] = True
    slots = Slots(count=3, max_new_tokens=3, is_eos=is_eos)
    for slot in range(2):
        slots.admit(slot, Request(CachedPrompt(slot, (1, 2)), sample=0, seed=0, budget=3))
    chunk = np.zeros((4, 3, 3))
    chunk[:, 0] = [[5, 5, 9], [5, 7, 9], [6, 8, 9], [6, 8, 9]]
    chunk[:, 1] = -np.arange(12).reshape(4, 3)
    assert slots.draw(chunk).tolist() == [0, 1]
    (_, first), (_, second) = slots.release(0), slots.release(1)
    assert (first.response_ids, first.finished, first.logprobs.tolist()) == ((5, 5, 6), False, [0, -3, -6])
    assert (second.response_ids, second.finished, second.logprobs.tolist()) == ((5, 7), True, [-1, -4])


# ---- on a card


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_cuda_graphs_equal_the_reference_in_fp32(temperature):
    model = build().cuda()
    options = {"n": 3, "max_new_tokens": 24, "temperature": temperature, "seed": 3}
    got = Sampler(model, EOS, slots=5, max_len=40).generate(PROMPTS, **options)
    assert_same(got, reference_generate(model, PROMPTS, EOS, **options))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_flash_over_the_slots_equals_a_fresh_forward_in_bf16():
    model = build(hidden_size=256).cuda().bfloat16()
    graphs, eager = (
        Sampler(model, EOS, slots=5, max_len=600, graphs=graphs).generate(PROMPTS, n=3, max_new_tokens=300, seed=3)
        for graphs in (True, False)
    )
    assert_same(graphs, eager)
    for sample in flat(graphs):
        ids = torch.tensor([sample.prompt_ids + sample.response_ids], device="cuda")
        start = len(sample.prompt_ids)
        with torch.no_grad():
            logprob, entropy = token_stats(model(ids).logits[0, start - 1 : -1], ids[0, start:])
        np.testing.assert_allclose(sample.logprobs, logprob.cpu(), atol=0.15)
        np.testing.assert_allclose(sample.entropies, entropy.cpu(), atol=0.15)
