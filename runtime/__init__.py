"""runtime/: what any run needs and no paper mentions. Skip it unless you change what a run reads, writes or survives.

    run.py          what a run is made of, its logs, its evaluations
    checkpoint.py   the state of a run on the disk          signals.py   SIGTERM, Ctrl-C and crashes
    config.py       a dataclass from YAML and command line  problems.py  queries and reference answers
    model.py        a Hugging Face model: load it, write its prompts, score responses
    attention.py    our attention in the layers of such a model
    ranks.py        devices, the processes of torchrun       memory.py    does the run fit its cards
    sharding.py     FSDP2, mixed precision, checkpointed activations    optimizer.py   one optimiser step
    bufferfile.py   the sample buffer in a checkpoint
    files.py        atomic writes                           errors.py    a user's mistake in one line

Modules import only what stands below them: r3.py, run.py, eval.py, then the rest (tests/test_layout.py).
"""
