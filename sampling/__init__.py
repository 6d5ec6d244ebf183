"""sampling/: the parts of the sampling loop in rollout.py. Skip it unless you want to make sampling faster.

    gumbel.py    logits -> a token, its log-prob and the entropy; seeds: every response has a random stream of its own
    kvcache.py   keys and values by slot, and attention over them, under any Hugging Face causal LM
    decoder.py   a leaner forward for Llama-like models in fp32 on a CPU; the model's own forward gives the same numbers
"""
