"""Mistakes that users make, and the one line that each of them gets.

Each is made by the command line: exit code 2, one line on stderr that begins with `error:` and names place and remedy,
and nothing written. A row is a name, the mistake, and what the line has to say.
"""
# ruff: noqa: F401, F811  the fixture short_model is imported

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_run import short_model
from transformers import BertConfig, BertModel, GraniteConfig, GraniteForCausalLM, Qwen2Config, Qwen2ForCausalLM

import eval as evaluation
import plot
import r3
from runtime.errors import exit_cleanly

ROOT = Path(r3.__file__).parent
GOOD = [{"uid": f"q{i}", "problem": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]


def lines(rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def with_row(row, at: int = 2) -> bytes:
    """A good file whose third line is `row`: an object, or bytes as they are."""
    good = lines(GOOD).split(b"\n")[:-1]
    good[at] = row if isinstance(row, bytes) else json.dumps(row).encode()
    return b"\n".join(good) + b"\n"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty working directory with good.jsonl in it."""
    monkeypatch.chdir(tmp_path)
    Path("good.jsonl").write_bytes(lines(GOOD))
    return tmp_path


def tree() -> dict[str, int]:
    return {str(p): p.stat().st_size for p in Path(".").rglob("*")}


def refused(capsys, main, argv: list, *phrases: str) -> None:
    before = tree()
    capsys.readouterr()
    with pytest.raises(SystemExit) as end, exit_cleanly():
        main([str(a) for a in argv])
    out, err = capsys.readouterr()
    assert end.value.code == 2
    assert err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n"), err
    for phrase in phrases:
        assert phrase in err, f"{phrase!r} is not in {err!r}"
    assert out == "" and tree() == before, "something was written"


def table(*rows):
    return pytest.mark.parametrize(("mistake", "phrases"), [pytest.param(r[1], r[2:], id=r[0]) for r in rows])


def train_arguments(model: Path | str) -> list[str]:
    options = "--data=good.jsonl --run_dir=run --batch_size=4 --device=cpu --max_new_tokens=8"
    return [f"--model={model}", *options.split()]


# -------------------------------------------------------------------------------------------------------- config files


@table(
    ("unknown key", "lrr: 1", "c.yaml:1: unknown key 'lrr'", "did you mean 'lr'?"),
    ("unknown key, far from any", "seed: 1\nzzz: 1", "c.yaml:2: unknown key 'zzz'", "r3.py --help"),
    ("a key of the command line alone", "config: other.yaml", "c.yaml:1: unknown key 'config'"),
    ("nested keys", "optimizer:\n  lr: 1", "c.yaml:1: unknown key 'optimizer'"),
    ("key twice", "lr: 1\nseed: 2\nlr: 3", "c.yaml:3", "'lr' stands twice", "first at c.yaml:1"),
    ("text for an integer", "batch_size: many", "c.yaml:1: batch_size = 'many'", "an integer"),
    ("fraction for an integer", "steps: 2.5", "steps = 2.5", "an integer"),
    ("boolean for an integer", "steps: yes", "steps = True", "an integer"),
    ("text for a number", "lr: 1e-6x", "lr = '1e-6x'", "a finite number"),
    ("infinite", "lr: .inf", "lr = inf", "a finite number"),
    ("not a number", "temperature: .nan", "temperature = nan", "a finite number"),
    ("nothing for a number", "lr:", "lr = None", "a finite number"),
    ("list for a number", "lr: [1, 2]", "lr = [1, 2]", "a finite number"),
    ("number for a boolean", "replay: 2", "replay = 2", "true or false"),
    ("text for a boolean", "replay: on-off", "replay = 'on-off'", "true or false"),
    ("number for a text", "model: 7", "model = 7", "text"),
    ("not a choice", "loss_agg: sequenc", "sequence, token, constant", "did you mean 'sequence'?"),
    ("negative", "lr: -1", "lr = -1", "above 0"),
    ("too small", "group_size: 1", "group_size = 1", "at least 2"),
    ("too large", "eps_low: 1", "eps_low = 1", "at least 0 and below 1"),
    ("ratio above one", "peak_ratio: 1.5", "peak_ratio = 1.5", "above 0 and at most 1"),
    ("failure as good as a success", "r_max: 1", "r_max = 1", "below 1"),
    ("negative seed", "seed: -1", "seed = -1", "at least 0"),
    ("top_p in training", "top_p: 0.9", "top_p = 0.9", "eval_top_p"),
    ("top_k in training", "top_k: 50", "top_k = 50", "compare two distributions"),
    ("more minibatches than queries", "minibatches: 8", "minibatches = 8", "at most batch_size = 4"),
    ("dynamic sampling with replay", "dynamic_sampling: true\nrank: false", "with replay = true", "replay = false"),
    ("dynamic sampling with ranking", "dynamic_sampling: true\nreplay: false", "with rank = true", "rank = false"),
    ("dual clip inside the clip", "dual_clip: 1", "dual_clip = 1", "above 1"),
    ("penalty longer than the budget", "overlong_tokens: 8", "overlong_tokens = 8", "below max_new_tokens = 8"),
    ("template without problem", "reflection_template: Why? {attempt}", "no {problem}"),
    ("template without attempt", "reflection_template: Again. {problem}", "no {attempt}"),
    ("more replayed than stored", "replay_k: 9", "replay_k = 9", "at most buffer_per_query = 8"),
    ("history that is never reached", "min_history: 33", "min_history = 33", "at most 4 group_size = 32"),
    ("a tiny temperature", "temperature: 1.0e-40", "c.yaml:1: temperature = 1e-40", "at least 1e-06"),
    ("a tiny temperature of evaluations", "eval_temperature: 1e-7", "c.yaml:1", "0, or at least 1e-06"),
    ("a path below no variable", "seed: 1\nrun_dir: $NOWHERE/x", "c.yaml:2: run_dir = '$NOWHERE/x'", "is not set"),
    ("YAML that is none", "lr: 1\nmodel: [a", "c.yaml:2: not valid YAML"),
    ("tabs", "lr: 1\n\tseed: 2", "c.yaml:2: not valid YAML"),
    ("no colon", "lr 1", "error: c.yaml:1: found a scalar", "`key: value`"),
    ("a list", "- lr", "error: c.yaml:1: found a sequence"),
    ("a key that is a list", "[1]: 2", "c.yaml:1: unknown key '[1]'"),
    ("a date that no calendar has", "seed: 1\nmodel: 2024-13-45", "error: c.yaml:2: not valid YAML: month"),
    ("a tag that does not fit", "seed: 1\nreplay: !!bool maybe", "error: c.yaml:2: not valid YAML"),
    ("a tag of a time", "seed: 1\nmodel: !!timestamp soon", "error: c.yaml:2: not valid YAML"),
    ("an empty number", "seed: !!int ''", "error: c.yaml:1: not valid YAML"),
    ("a tag of Python", "seed: 1\nmodel: !!python/name:os.system", "error: c.yaml:2: not valid YAML"),
    ("key twice on one line", "{lr: 1, lr: 2}", "c.yaml:1: key 'lr' stands twice"),
    ("two documents", "lr: 1\n---\nlr: 2", "error: c.yaml:2: not valid YAML"),
    ("nested too deeply", "a: " + 5000 * "[", "error: c.yaml", "not valid YAML"),
    ("control characters", "seed: 1\nmodel: \x01", "error: c.yaml:2: not valid YAML"),
    ("Latin-1", b"model: caf\xe9", "c.yaml: not UTF-8 (byte 10)"),
)
def test_config_file(place, short_model, mistake, phrases, capsys):
    Path("c.yaml").write_bytes(mistake if isinstance(mistake, bytes) else mistake.encode())
    refused(capsys, r3.main, [*train_arguments(short_model), "--config", "c.yaml"], *phrases)


# -------------------------------------------------------------------------------------------------------- command line


@table(
    ("missing config", "--config nowhere.yaml", "--config nowhere.yaml: no such file"),
    ("config, almost", "--config goood.yaml", "no such file", "did you mean 'good.yaml'?"),
    ("empty config", "--config=", "command line: --config: found ''", "allowed: one file"),
    ("two configs", "--config good.yaml --config=other.yaml", "found 'good.yaml' and 'other.yaml', allowed"),
    ("the same config twice", "--config good.yaml --config=good.yaml", "allowed: one file"),
    ("config in no home", "--config=$NOWHERE/a.yaml", "--config = '$NOWHERE/a.yaml'", "NOWHERE is not set"),
    ("unknown key and its value", "--batchsize 3", "command line: --batchsize: unknown key", "'batch_size'?"),
    ("tiny temperature", "--temperature=1e-40", "temperature = '1e-40'", "at least 1e-06"),
    ("huge temperature", "--temperature=1e60", "temperature = '1e60'", "at most 1000000"),
    ("huge temperature of evaluations", "--eval_temperature=1e60", "eval_temperature = '1e60'", "at most 1000000"),
    ("tiny top_p of evaluations", "--eval_top_p=1e-46", "eval_top_p = '1e-46'", "at least 1e-06 and at most 1"),
    ("tiny temperature of evaluations", "--eval_temperature=1e-40", "'1e-40', allowed: 0, or at least 1e-06"),
    ("config without a name", "--config", "--config needs a value"),
    ("unknown key", "--batchsize=3", "command line: --batchsize", "did you mean 'batch_size'?"),
    ("no dashes", "lr=1", "command line: found 'lr=1'", "--key=value"),
    ("one dash", "-lr=1", "command line: found '-lr=1'"),
    ("no value", "--steps", "--steps needs a value"),
    ("no value before the next", "--steps --lr=1", "--steps needs a value"),
    ("empty value", "--lr=", "command line: --lr: lr = ''", "a finite number"),
    ("text for a boolean", "--replay=maybe", "command line: --replay", "true or false"),
    ("unknown device", "--device=gpu", "device = 'gpu'", "auto, cpu"),
    ("more cards than there are", "--device=cuda:99", "device = 'cuda:99'", "allowed on this machine"),
    ("unknown dtype", "--dtype=float16", "dtype = 'float16'", "auto, float32, bfloat16"),
    ("no run directory", "--run_dir=", "run_dir is empty", "--run_dir=runs/NAME"),
    ("run directory below a file", "--run_dir=good.jsonl/run", "good.jsonl/run: cannot be written", "Not a directory"),
    ("logger that is not installed", "--wandb", "wandb = true needs the package wandb", "pip install wandb"),
    ("longer than the model's positions", "--max_new_tokens=600", "allowed: at most", "the model has 512 positions"),
)
def test_command_line(place, short_model, mistake, phrases, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    Path("good.yaml").write_text("lr: 1")
    refused(capsys, r3.main, [*train_arguments(short_model), *mistake.split()], *phrases)


# ---------------------------------------------------------------------------------------------------------------- data


@table(
    ("bad JSON", with_row(b'{"uid": "x", '), "d.jsonl:3: bad JSON at column"),
    ("no object", with_row([1]), "d.jsonl:3: found an array", "an object"),
    ("misspelt field", with_row({"uid": "x", "problm": "1+1", "answer": "2"}), "d.jsonl:3", "did you mean 'problm'?"),
    ("no answer", with_row({"uid": "x", "problem": "1+1"}), "d.jsonl:3: no field 'answer'"),
    ("empty answer", with_row({"uid": "x", "problem": "1+1", "answer": " "}), "d.jsonl:3: answer is an empty string"),
    ("empty problem", with_row({"uid": "x", "problem": "", "answer": "2"}), "d.jsonl:3: problem is empty"),
    ("boolean answer", with_row({"uid": "x", "problem": "1+1", "answer": True}), "d.jsonl:3: answer is a boolean"),
    ("no answers", with_row({"uid": "x", "problem": "1+1", "answer": []}), "d.jsonl:3: answer is an empty list"),
    ("number as problem", with_row({"uid": "x", "problem": 3, "answer": "2"}), "d.jsonl:3: problem is a number"),
    ("duplicate uid", with_row({"uid": "q0", "problem": "1", "answer": "1"}), "d.jsonl:3: duplicate uid", "d.jsonl:1"),
    ("uid that is a list", with_row({"uid": [], "problem": "1+1", "answer": "2"}), "d.jsonl:3: uid is an array"),
    ("empty file", b"", "d.jsonl: the file is empty"),
    ("blank lines", b"\n\n", "d.jsonl: found no problem"),
    ("Latin-1", with_row('{"problem": "é"}'.encode("latin-1")), "d.jsonl:3: found 0xe9", "UTF-8"),
    ("UTF-16", lines(GOOD).decode().encode("utf-16"), "d.jsonl:1: found a file in UTF-16"),
    ("NUL", with_row(b"\0"), "d.jsonl:3: found a NUL character"),
    ("10 MB line", with_row(b" " * 10_000_000), "d.jsonl:3: a line of more than 1,000,000 bytes"),
    ("one array", json.dumps(GOOD).encode(), "d.jsonl:1", "an array", ".json"),
    ("half a surrogate pair", with_row(b'{"problem": "\\ud800", "answer": "2"}'), "d.jsonl:3: found half a surrogate"),
    ("few problems", lines(GOOD[:3]), "3 usable problems", "at least batch_size = 4"),
    (
        "long problems",
        lines({**row, "problem": row["problem"] * 400} for row in GOOD),
        "0 usable problems",
        "left out 8 over max_prompt_tokens = 1024",
    ),
    (
        "answers that cannot be graded",
        lines({**row, "answer": "\\frac{"} for row in GOOD),
        "0 usable problems",
        "8 for their answer, the first is d.jsonl:1",
        "does not grade itself as correct",
    ),
)
def test_data(place, short_model, mistake, phrases, capsys):
    Path("d.jsonl").write_bytes(mistake)
    refused(capsys, r3.main, [*train_arguments(short_model), "--data=d.jsonl"], *phrases)


@table(
    ("missing", "--data=god.jsonl", "god.jsonl: no such file", "did you mean 'good.jsonl'?"),
    ("missing folder", "--data=there/good.jsonl", "its folder 'there' does not exist"),
    ("directory", "--data=.", "found a directory", "it holds bad.jsonl, good.jsonl"),
    ("extension", "--data=good.csv", "unknown extension '.csv'", ".jsonl, .json, .parquet"),
    ("parquet that is none", "--data=good.parquet", "good.parquet: corrupt parquet file"),
    ("field", "--answer_field=solution", "good.jsonl:1: no field 'solution'", "has 'uid', 'problem', 'answer'"),
    ("missing evaluation data", "--eval_data=test.jsonl", "test.jsonl: no such file"),
    ("long evaluation prompt", "--eval_data=long.jsonl", "long.jsonl:1: a prompt of", "1024 = max_prompt_tokens"),
    ("bad answer, refused", "--data=bad.jsonl --check_answers=refuse", "bad.jsonl:3", "check_answers = drop"),
)
def test_data_source(place, short_model, mistake, phrases, capsys):
    Path("good.csv").write_bytes(lines(GOOD))
    Path("good.parquet").write_bytes(lines(GOOD))
    Path("bad.jsonl").write_bytes(with_row({"uid": "x", "problem": "1+1", "answer": "\\frac{"}))
    Path("long.jsonl").write_bytes(lines([{"problem": "1+" * 900 + "1", "answer": "901"}]))
    refused(capsys, r3.main, [*train_arguments(short_model), *mistake.split()], *phrases)


@pytest.mark.parametrize(("steps", "said"), [(3, True), (2, False)])
def test_steps_that_the_epochs_do_not_reach_are_said_at_the_start(place, short_model, capsys, steps, said):
    options = f"--steps={steps} --epochs=1 --group_size=2 --max_new_tokens=2 --slots=4 --check_answers=off"
    r3.main([*train_arguments(short_model), *options.split()])
    assert ("steps = 3: epochs = 1 of 2 steps end after 2\n" in capsys.readouterr().err) == said


def test_a_run_needs_a_directory_that_the_user_named(place, capsys):
    """Without any argument the defaults, a model of 1.5 billion parameters, would be fetched and trained."""
    refused(capsys, r3.main, [], "run_dir is empty", "--run_dir=runs/NAME")


def test_byte_order_mark_and_windows_line_ends_are_no_mistake(place, short_model, capsys):
    """They are read; what is refused is the next thing."""
    Path("d.jsonl").write_bytes(b"\xef\xbb\xbf" + lines(GOOD).replace(b"\n", b"\r\n"))
    Path("c.yaml").write_bytes(b"\xef\xbb\xbflr: 1\r\nbatch_size: 9\r\n")
    arguments = [f"--model={short_model}", "--data=d.jsonl", "--config=c.yaml", "--max_new_tokens=8", "--device=cpu"]
    refused(capsys, r3.main, arguments, "8 usable problems", "at least batch_size = 9")


# -------------------------------------------------------------------------------------------------------------- models


def change_json(name: str, **changes):
    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({k: v for k, v in (content | changes).items() if v is not None}))

    return change


def change_weights(change):
    def changed(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return changed


def replace_model(make):
    def replaced(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        make().save_pretrained(folder)

    return replaced


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES["vocab_size"] = 272


def granite():
    return GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8))


def sliding():
    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, **windows, num_key_value_heads=2))


def no_end(folder: Path) -> None:
    change_json("config.json", model_type="llama")(folder)  # transformers gives one to each Qwen2 tokenizer
    change_json("generation_config.json", eos_token_id=None)(folder)
    change_json("tokenizer_config.json", eos_token=None)(folder)


def own_code(folder: Path) -> None:
    change_json("config.json", model_type="own", auto_map={"AutoConfig": "own.OwnConfig"})(folder)
    (folder / "own.py").write_text("open('executed', 'w')")


def remove(*names: str):
    return lambda folder: [(folder / name).unlink() for name in names]


def cut(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 1000)


def large_id(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    last = content["added_tokens"][-1]
    content["added_tokens"] += [last | {"id": 300 + i, "content": f"<|{i}|>"} for i in range(40)]
    (folder / "tokenizer.json").write_text(json.dumps(content))


def infinite(tensors) -> None:
    tensors["model.norm.weight"][:] = torch.inf


def other_shape(tensors) -> None:
    tensors["model.norm.weight"] = torch.ones(7)


@table(
    ("no folder", shutil.rmtree, "model 'm/model': no such folder", "did you mean 'm/modell'?"),
    ("no config", remove("config.json"), "the folder has no config.json"),
    ("config that is no JSON", lambda folder: (folder / "config.json").write_text("{"), "it cannot be loaded"),
    ("unknown architecture", change_json("config.json", model_type="qwen99"), "it cannot be loaded", "qwen99"),
    ("no causal LM", replace_model(lambda: BertModel(BertConfig(**SIZES))), "model 'm/model'"),
    ("scaled logits", replace_model(granite), "changes its logits after the head"),
    ("sliding windows", replace_model(sliding), "the model has 4 positions"),
    ("own code", own_code, "it cannot be loaded", "trust_remote_code"),
    ("no tokenizer", remove("tokenizer.json", "tokenizer_config.json"), "is tokenizer.json missing?"),
    ("no chat template", remove("chat_template.jinja"), "no chat template"),
    ("chat template that is none", lambda f: (f / "chat_template.jinja").write_text("{% if"), "chat template"),
    ("no end of sequence", no_end, "found no EOS token"),
    ("no weights", remove("model.safetensors"), "it cannot be loaded"),
    ("weights cut short", cut, "it cannot be loaded"),
    ("a tensor is missing", change_weights(lambda t: t.pop("model.norm.weight")), "1 tensors missing"),
    ("a tensor of another shape", change_weights(other_shape), "model.norm.weight"),
    ("weights that are infinite", change_weights(infinite), "not finite"),
    ("more tokens than embeddings", large_id, "the tokenizer has", "the embedding only 272"),
)
def test_model(place, short_model, mistake, phrases, capsys):
    shutil.copytree(short_model, "m/model")
    Path("m/modell").mkdir()
    mistake(Path("m/model"))
    refused(capsys, r3.main, [*train_arguments("m/model"), "--reflect=false"], *phrases)


# ------------------------------------------------------------------------------------------------------ eval and plots


@table(
    ("no model", "--data good.jsonl", "command line: --model is missing"),
    ("no data", "--model m", "command line: --data is missing"),
    ("empty model", "--model= --data good.jsonl", "command line: --model is missing or empty"),
    ("unknown option", "--model m --data good.jsonl --samples 3", "unknown key 'samples'", "python eval.py --help"),
    ("misspelt option", "--model m --data good.jsonl --temprature=1", "did you mean 'temperature'?"),
    ("zero samples", "--model m --data good.jsonl --n 0", "--n: n = '0'", "at least 1"),
    ("samples as text", "--model m --data good.jsonl --n x", "--n: n = 'x'", "an integer"),
    ("samples in part", "--model m --data good.jsonl --n 2.5", "--n: n = '2.5'", "an integer"),
    ("samples without end", "--model m --data good.jsonl --n inf", "--n: n = 'inf'", "an integer"),
    ("k as text", "--model m --data good.jsonl --n 2 --k 1 x", "--k: k = 'x'", "an integer"),
    ("k of nothing", "--model m --data good.jsonl --k", "--k needs a value"),
    ("k that is no number", "--model m --data good.jsonl --k nan", "--k: k = 'nan'", "an integer"),
    ("k of zero", "--model m --data good.jsonl --k 0", "--k: k = '0'", "at least 1"),
    ("k above n", "--model m --data good.jsonl --n 2 --k 4", "--k 4", "--n 2"),
    ("seed as text", "--model m --data good.jsonl --seed first", "--seed: seed = 'first'", "an integer"),
    ("seed that is no number", "--model m --data good.jsonl --seed nan", "--seed: seed = 'nan'", "an integer"),
    ("limit of none", "--model m --data good.jsonl --limit 0", "--limit: limit = '0'", "at least 1"),
    ("slots without end", "--model m --data good.jsonl --slots inf", "--slots: slots = 'inf'", "an integer"),
    ("superscript", "--model m --data good.jsonl --slots ²", "--slots: slots = '²'", "an integer"),
    ("budget as text", "--model m --data good.jsonl --max-new-tokens 8k", "max_new_tokens = '8k'", "an integer"),
    ("negative temperature", "--model m --data good.jsonl --temperature -1", "temperature = '-1'", "0, or at least"),
    ("temperature as text", "--model m --data good.jsonl --temperature hot", "temperature = 'hot'", "a finite number"),
    ("temperature nan", "--model m --data good.jsonl --temperature nan", "temperature = 'nan'", "a finite number"),
    ("temperature inf", "--model m --data good.jsonl --temperature inf", "temperature = 'inf'", "a finite number"),
    ("tiny temperature", "--model m --data good.jsonl --temperature 1e-40", "allowed: 0, or at least 1e-06"),
    ("huge temperature", "--model m --data good.jsonl --temperature 1e60", "temperature = '1e60'", "at most 1000000"),
    ("tiny top_p", "--model m --data good.jsonl --top-p 1e-46", "top_p = '1e-46'", "at least 1e-06 and at most 1"),
    ("small temperature", "--model m --data good.jsonl --temperature 9e-7", "allowed: 0, or at least 1e-06"),
    ("top_p above one", "--model m --data good.jsonl --top-p 2", "top_p = '2'", "at least 1e-06 and at most 1"),
    ("top_p of nothing", "--model m --data good.jsonl --top-p 0", "top_p = '0'", "at least 1e-06 and at most 1"),
    ("top_p that is no number", "--model m --data good.jsonl --top-p nan", "top_p = 'nan'", "a finite number"),
    ("result in a missing folder", "--model m --data good.jsonl --out no/a.jsonl", "--out no/a.jsonl", "folder"),
    ("result in no home", "--model m --data good.jsonl --out $NOWHERE/a", "--out: out = '$NOWHERE/a'", "is not set"),
    ("result without a name", "--model m --data good.jsonl --out=", "--out : it cannot be written", "a file"),
    ("result in place of a folder", "--model m --data good.jsonl --out f.jsonl", "--out f.jsonl", "cannot be written"),
    ("missing data", "--model m --data nowhere.jsonl", "nowhere.jsonl: no such file"),
    ("no such model", "--model ./nowhere --data good.jsonl", "model './nowhere': no such folder"),
    ("no such field", "--model m --data good.jsonl --answer-field=gold", "good.jsonl:1: no field 'gold'"),
    ("device", "--model m --data good.jsonl --device cuda:99", "device = 'cuda:99'"),
    ("dtype", "--model m --data good.jsonl --dtype float16", "dtype = 'float16'", "auto, float32, bfloat16"),
    ("longer than the model's positions", "--model m --data good.jsonl --max-new-tokens 600", "allowed: up to 5"),
)
def test_eval(place, short_model, mistake, phrases, capsys):
    Path("m").symlink_to(short_model)
    Path("f.jsonl").mkdir()
    refused(capsys, evaluation.main, mistake.split(), *phrases)


@pytest.mark.parametrize("written", ["~", "$HOME", "${HOME}"])
def test_home_is_expanded_by_every_program(place, short_model, monkeypatch, written):
    home = place / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    (home / "m").symlink_to(short_model)
    (home / "good.jsonl").write_bytes(lines(GOOD))
    before = {p.name for p in place.iterdir()}
    paths = {"model": "m", "data": "good.jsonl", "eval_data": "good.jsonl", "run_dir": "run"}
    options = "--batch_size=4 --group_size=2 --device=cpu --max_new_tokens=4 --steps=1 --eval_n=1 --slots=4"
    r3.main([*(f"--{key}={written}/{path}" for key, path in paths.items()), *options.split(), "--check_answers=off"])
    assert f"run_dir: {home}/run" in (home / "run" / "config.yaml").read_text()
    options = f"--model={written}/m --data {written}/good.jsonl --out={written}/a.jsonl --n=1 --max-new-tokens=4"
    evaluation.main(options.split())
    plot.main(f"{written}/run --answers {written}/a.jsonl --out={written}/a.png".split())
    prepare = [sys.executable, ROOT / "data" / "prepare.py", f"--from={written}/good.jsonl", f"--out={written}/run"]
    subprocess.run(prepare, check=True)
    made = {"m", "good.jsonl", "run", "a.jsonl", "a.png"}
    assert {p.name for p in home.iterdir()} == made and (home / "run" / "good.jsonl").is_file()
    assert {p.name for p in place.iterdir()} == before, "a folder named ~ or $HOME"


@table(
    ("no run", "--out a.png", "no run named"),
    ("run in no home", "$NOWHERE/first --out a.png", "run = '$NOWHERE/first'", "NOWHERE is not set"),
    ("picture in no home", "runs/first --out ~nobody-of-this-name/a.png", "--out = '~nobody", "no such home"),
    ("no such run", "runs/frist --out a.png", "no such run directory", "did you mean 'first'?"),
    ("not a run", "runs --out a.png", "metrics.jsonl is missing"),
    ("bad row", "runs/first --out a.png", "metrics.jsonl:2: bad JSON"),
    ("picture format", "runs/first --out a.txt", "'.txt'", ".png, .pdf, .svg"),
    ("no picture", "runs/first", "--out"),
)
def test_plot(place, mistake, phrases, capsys):
    Path("runs/first").mkdir(parents=True)
    Path("runs/first/metrics.jsonl").write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    refused(capsys, plot.main, mistake.split(), *phrases)


# --------------------------------------------------------------------------------------- by processes, as a user would


def test_program():
    """Of r3.py as a process see test_signals.py."""
    command = "eval.py --model data/modle --data data/tiny/test.jsonl"
    done = subprocess.run([sys.executable, *command.split()], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: model 'data/modle': no such folder") and done.stderr.count("\n") == 1


def test_ctrl_c_is_no_traceback():
    """eval.py, plot.py and verify.py; of r3.py, which saves first, see test_signals.py."""
    code = "from runtime import errors\nwith errors.exit_cleanly():\n    raise KeyboardInterrupt"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_reader_that_stops_is_no_traceback():
    command = f"{sys.executable} r3.py --help | head -n 1"
    shell = ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"]
    done = subprocess.run(shell, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.count("\n") == 1 and done.stderr == "" and done.returncode in (0, 141)
