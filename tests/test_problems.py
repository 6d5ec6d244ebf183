"""What problems.load accepts, and the line it says about each mistake."""

import json
import sys
import types
from collections import Counter
from pathlib import Path
from random import Random

import pytest

import runtime.problems as problems_module
from runtime.errors import UserError
from runtime.problems import MAX_LINE_BYTES, Problem, conflicts, hub_rows, load

SHARED = Path(__file__).parent.parent.parent / "shared" / "data"
GOOD = b'{"uid": "a", "problem": "1+1?", "answer": "2"}\n'


def write(folder: Path, name: str, data: bytes | str | list[dict]) -> str:
    if isinstance(data, list):
        data = "".join(json.dumps(row) + "\n" for row in data)
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return str(path)


def write_parquet(folder: Path, name: str, rows: list[dict]) -> str:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / name)
    return str(folder / name)


# --- What is accepted ----------------------------------------------------------------------------


def test_jsonl_gives_problems_in_order_with_the_place_of_each(tmp_path):
    path = write(tmp_path, "train.jsonl", GOOD + b'\n{"uid": "b", "problem": "x?", "answer": ["1", "one"]}')
    assert load(path) == [
        Problem("a", "1+1?", "2", "train.jsonl:1"),
        Problem("b", "x?", ["1", "one"], "train.jsonl:3"),
    ]


def test_byte_order_mark_and_windows_line_ends_are_read_over(tmp_path):
    plain = load(write(tmp_path, "t.jsonl", GOOD + GOOD.replace(b'"a"', b'"b"')))
    windows = b"\xef\xbb\xbf" + (GOOD + GOOD.replace(b'"a"', b'"b"')).replace(b"\n", b"\r\n")
    assert load(write(tmp_path, "t.jsonl", windows)) == plain


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (27, "27"),
        (27.0, "27"),
        (-3, "-3"),
        (0.5, "0.5"),
        (1e-7, "0.0000001"),
        (1e22, "1" + 22 * "0"),
        (" 9.6\n", "9.6"),
        ([1, "x", 2.5], ["1", "x", "2.5"]),
    ],
)
def test_numbers_become_strings(tmp_path, answer, expected):
    path = write(tmp_path, "t.jsonl", [{"problem": "?", "answer": answer}])
    assert load(path)[0].answer == expected


def test_a_row_without_uid_gets_file_and_row_whatever_the_limit(tmp_path):
    rows = [{"problem": f"{i}?", "answer": "0"} for i in range(5)]
    path = write(tmp_path, "set.jsonl", rows)
    assert [p.uid for p in load(path)] == ["set-0", "set-1", "set-2", "set-3", "set-4"]
    assert load(path, limit=2) == load(path)[:2]


def test_fields_may_have_other_names_and_dots(tmp_path):
    path = write(tmp_path, "t.jsonl", [{"q": "?", "meta": {"id": 7, "gold": 1}, "a.b": "flat"}])
    problem = load(path, problem_field="q", answer_field="meta.gold", uid_field="meta.id")[0]
    assert (problem.uid, problem.problem, problem.answer) == ("7", "?", "1")
    assert load(path, problem_field="q", answer_field="a.b")[0].answer == "flat"


def test_json_array_names_the_line_on_which_a_row_starts(tmp_path):
    rows = [{"uid": u, "problem": "a, [b] \n {c}", "answer": ["1"]} for u in "abc"]
    path = write(tmp_path, "t.json", "\n" + json.dumps(rows, indent=1))
    lines = Path(path).read_text().split("\n")
    for problem in load(path):
        line = int(problem.where.removeprefix("t.json:"))
        assert lines[line - 1].strip() == "{" and f'"uid": "{problem.uid}"' in lines[line]


def test_parquet_in_plain_columns_equals_jsonl(tmp_path):
    rows = [{"uid": f"u{i}", "problem": f"{i}+1?", "answer": i + 1} for i in range(3)]
    from_parquet = load(write_parquet(tmp_path, "t.parquet", rows))
    from_jsonl = load(write(tmp_path, "t.jsonl", rows))
    assert [p.where for p in from_parquet] == ["t.parquet:1", "t.parquet:2", "t.parquet:3"]
    assert [(p.uid, p.problem, p.answer) for p in from_parquet] == [(p.uid, p.problem, p.answer) for p in from_jsonl]


def verl_row(text: str, answer: str, index: int | None) -> dict:
    system = {"role": "system", "content": "You solve problems."}
    return {
        "data_source": "dapo_math",
        "prompt": [system, {"role": "user", "content": text}],
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {"index": index},
    }


def test_verl_rows_give_the_bare_problem_and_a_uid_of_source_and_index(tmp_path):
    boxed = "What is $2^5$? Let's think step by step and output the final answer within \\boxed{}."
    lines = (
        "Solve the following math problem step by step. The last line of your response should be of the form "
        "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is $2^5$?\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    )
    rows = [verl_row(boxed, "32", 3), verl_row(lines, "32", None)]
    for path in (write_parquet(tmp_path, "v.parquet", rows), write(tmp_path, "v.jsonl", rows)):
        problems = load(path)
        assert [p.uid for p in problems] == ["dapo_math-3", "v-1"]
        assert [(p.problem, p.answer) for p in problems] == 2 * [("What is $2^5$?", "32")]


def test_a_box_inside_a_problem_stays(tmp_path):
    path = write(tmp_path, "v.jsonl", [verl_row("Find $\\boxed{}$ in 1+$\\boxed{}$=3.", "2", 0)])
    assert load(path)[0].problem == "Find $\\boxed{}$ in 1+$\\boxed{}$=3."


def test_rows_of_a_parquet_without_answer_are_left_out_and_counted(tmp_path, capsys):
    rows = [verl_row("a?", "1", 0), verl_row("b?", "", 1), verl_row("c?", "3", 2)]
    path = write_parquet(tmp_path, "v.parquet", rows)
    assert [p.uid for p in load(path)] == ["dapo_math-0", "dapo_math-2"]
    assert capsys.readouterr().err == "warning: v.parquet: left out 1 without problem or answer: v.parquet:2\n"


NOTHING = [  # (what stands for no problem or answer, the row that has it)
    ("null answer", {"answer": None}),
    ("null problem", {"problem": None}),
    ("empty problem", {"problem": ""}),
    ("NaN answer", {"answer": float("nan")}),
    ("null among answers", {"answers": ["4", None]}),
    ("NaN among answers", {"numbers": [4.0, float("nan")]}),
    ("no answers", {"answers": []}),
    ("null nested answer", {"meta": {"gold": None}}),
    ("null parent of the answer", {"meta": None}),
    ("null chat", {"chat": None}),
    ("empty chat", {"chat": []}),
    ("null text in a chat", {"chat": [{"role": "user", "content": None}]}),
]


def write_with_nothing(folder: Path, nothing: dict) -> tuple[str, dict[str, str]]:
    """A parquet file of three rows, the second with `nothing` in one field, and the field names to read it with."""
    (key, value), = nothing.items()
    good = {"problem": "1+1?", "answer": "2", "answers": ["2"], "numbers": [2.0], "meta": {"gold": "2"}}
    good["chat"] = [{"role": "user", "content": "1+1?"}]
    good |= {"answer": 2.0} if isinstance(value, float) else {}
    names = {"problem": "problem", "chat": "problem"}
    fields = {f"{names.get(key, 'answer')}_field": "meta.gold" if key == "meta" else key}
    rows = [good | {"uid": "a"}, good | nothing | {"uid": "b"}, good | {"uid": "c"}]
    return write_parquet(folder, "t.parquet", rows), fields


@pytest.mark.parametrize("nothing", [n[1] for n in NOTHING], ids=[n[0] for n in NOTHING])
def test_a_row_of_parquet_or_hub_that_has_nothing_to_train_on_is_left_out_and_counted(
    tmp_path, monkeypatch, capsys, nothing
):
    path, fields = write_with_nothing(tmp_path, nothing)
    assert [p.uid for p in load(path, **fields)] == ["a", "c"]
    assert capsys.readouterr().err == "warning: t.parquet: left out 1 without problem or answer: t.parquet:2\n"
    rows = pytest.importorskip("pyarrow.parquet").read_table(path).to_pylist()
    monkeypatch.setattr(problems_module, "hub_rows", lambda *_: enumerate(rows, 1))
    assert [p.uid for p in load("owner/set", **fields)] == ["a", "c"]
    assert capsys.readouterr().err == "warning: owner/set: left out 1 without problem or answer: owner/set:2\n"


@pytest.mark.parametrize("column", ["prompt", "reward_model", "ground_truth"])
def test_a_row_in_the_form_of_verl_with_a_null_is_left_out_and_counted(tmp_path, capsys, column):
    rows = [verl_row(f"{i}+1?", str(i + 1), i) for i in range(3)]
    if column == "ground_truth":
        rows[1]["reward_model"]["ground_truth"] = None
    else:
        rows[1][column] = None
    assert [p.uid for p in load(write_parquet(tmp_path, "v.parquet", rows))] == ["dapo_math-0", "dapo_math-2"]
    assert "left out 1 without problem or answer: v.parquet:2" in capsys.readouterr().err


def test_rows_of_both_forms_in_one_table_are_read(tmp_path):
    """A table has all columns in each row, with null in those that the row did not have."""
    verl, plain = verl_row("1+1?", "2", 0), {"uid": "b", "problem": "2+2?", "answer": "4"}
    rows = [dict.fromkeys(plain) | verl, dict.fromkeys(verl) | plain]
    found = load(write_parquet(tmp_path, "t.parquet", rows))
    assert [(p.uid, p.problem, p.answer) for p in found] == [("dapo_math-0", "1+1?", "2"), ("b", "2+2?", "4")]


def test_a_parquet_with_nothing_but_nulls_is_refused_with_their_number(tmp_path):
    path = write_parquet(tmp_path, "t.parquet", 2 * [{"problem": "?", "answer": None}])
    with pytest.raises(UserError, match="found no problem in it, allowed: at least one; left out 2 without"):
        load(path)


def test_a_null_uid_is_no_uid(tmp_path):
    rows = [{"problem": "1+1?", "answer": "2", "id": uid} for uid in (None, float("nan"), 7)]
    path = write(tmp_path, "t.jsonl", rows)
    assert [p.uid for p in load(path, uid_field="id")] == ["t-0", "t-1", "7"]


def test_a_named_uid_field_counts_in_the_form_of_verl_too(tmp_path):
    path = write(tmp_path, "v.jsonl", [verl_row("1+1?", "2", 5)])
    assert load(path, uid_field="extra_info.index")[0].uid == "5"


@pytest.mark.skipif(not SHARED.is_dir(), reason="no shared data beside this checkout")
def test_shared_sets_load_whole(capsys):
    counts = {"aime24": 30, "aime25": 30, "amc23": 40, "math500": 500, "minerva": 272, "olympiadbench": 674}
    for name, count in counts.items():
        problems = load(SHARED / "benchmarks" / f"{name}.jsonl")
        assert len(problems) == count and problems[-1].uid == f"{name}-{count - 1}"
    pytest.importorskip("pyarrow")
    problems = load(SHARED / "train" / "dapo_math_train.parquet")
    assert len(problems) == 24_896 and "left out 2 " in capsys.readouterr().err
    assert not any("within \\boxed{}." in p.problem for p in problems)


def test_a_folder_copy_of_a_hub_set_is_read_by_the_datasets_package(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "copy").mkdir()
    for split in ("train", "test"):
        write(tmp_path / "copy", f"{split}.jsonl", 2 * [{"question": f"{split}?", "answer": "4"}])
    row = {"question": "test?", "answer": "4"}
    assert list(hub_rows(str(tmp_path / "copy"), "test")) == [(1, row), (2, row)]
    with pytest.raises(UserError, match=r"split 'tset': .*'train', 'test'"):
        list(hub_rows(str(tmp_path / "copy"), "tset"))


@pytest.fixture
def fake_hub(monkeypatch):
    """A `datasets` package that knows one set."""
    hub = types.ModuleType("datasets")
    hub.exceptions = types.SimpleNamespace(DatasetsError=type("DatasetsError", (Exception,), {}))

    def load_dataset(repo, subset, split, revision):
        if repo != "owner/set.v2":
            raise hub.exceptions.DatasetsError(f"{repo} is not on the hub\nlong explanation")
        return [{"question": f"{subset} {split}{revision or ''}?", "meta": {"gold": 4}}]

    hub.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", hub)


def test_hub_set_takes_subset_split_and_field_names(fake_hub):
    fields = {"problem_field": "question", "answer_field": "meta.gold"}
    assert load("owner/set.v2:hard", split="test", **fields) == [Problem("set-0", "hard test?", "4", "owner/set.v2:1")]
    assert [row["question"] for _, row in hub_rows("owner/set.v2", "test", "hard", "@1f")] == ["hard test@1f?"]
    with pytest.raises(UserError, match="^hub data set owner/sets, split 'train': owner/sets is not on the hub$"):
        load("owner/sets")


def test_conflicts_are_equal_texts_with_other_answers():
    def problem(uid, text, answer):
        return Problem(uid, text, answer, f"t.jsonl:{uid}")

    a, b = problem("1", "What is  x?", "1"), problem("2", "What is\nx?", "2")
    same = [problem("3", "y?", ["1", "2"]), problem("4", "y?", ["2", "1"])]
    assert conflicts([a, *same, b]) == [[a, b]]


# --- Mistakes ------------------------------------------------------------------------------------


def row(**fields) -> bytes:
    return json.dumps({"uid": "b", "problem": "2+2?", "answer": "4"} | fields).encode() + b"\n"


MISTAKES = [  # (what is wrong, file name, bytes, what the message says)
    ("empty file", "t.jsonl", b"", "t.jsonl: the file is empty"),
    ("blank lines only", "t.jsonl", b"\n \n", "t.jsonl: found no problem in it"),
    ("comma missing", "t.jsonl", GOOD + b'{"problem": "x" "answer": 1}', "t.jsonl:2: bad JSON at column 17: Expect"),
    ("line cut off", "t.jsonl", GOOD + b'{"problem": "x", "ans', "t.jsonl:2: bad JSON at column 18: Untermin"),
    ("single quotes", "t.jsonl", b"{'problem': 'x'}", "t.jsonl:1: bad JSON at column 2"),
    ("two objects a line", "t.jsonl", GOOD.strip() + GOOD, "t.jsonl:1: bad JSON at column 47: Extra data"),
    ("array as jsonl", "t.jsonl", b"[\n" + GOOD + b"]", "one array has the extension .json"),
    ("a list row", "t.jsonl", b'["x", "1"]', "t.jsonl:1: found an array, allowed: an object"),
    ("a string row", "t.jsonl", GOOD + b'"x"', "t.jsonl:2: found a string, allowed: an object"),
    ("nested too deeply", "t.jsonl", 200_000 * b"[", "t.jsonl:1: bad JSON: maximum recursion depth"),
    ("huge integer", "t.jsonl", row(answer=0).replace(b"0", 5000 * b"9"), "t.jsonl:1: bad JSON: Exceeds the limit"),
    ("latin-1", "t.jsonl", GOOD + '{"problem": "né"}'.encode("latin-1"), "t.jsonl:2: found 0xe9 at byte 15"),
    ("utf-16", "t.jsonl", GOOD.decode().encode("utf-16"), "t.jsonl:1: found a file in UTF-16 at byte 1"),
    ("NUL byte", "t.jsonl", GOOD + b'{"problem": "\0"}', "t.jsonl:2: found a NUL character"),
    ("half a surrogate", "t.jsonl", row(problem="a \ud800"), "t.jsonl:1: found half a surrogate pair in 'a \\ud800'"),
    ("10 MB line", "t.jsonl", GOOD + 10_000_000 * b"x", f"t.jsonl:2: a line of more than {MAX_LINE_BYTES:,} bytes"),
    ("no problem field", "t.jsonl", b'{"problme": "x", "answer": 1}', "no field 'problem' (did you mean 'problme'?)"),
    ("no answer field", "t.jsonl", b'{"problem": "x", "gold": 1}', "no field 'answer'; this row has 'problem', 'gold'"),
    ("no field at all", "t.jsonl", GOOD + b"{}", "t.jsonl:2: no field 'problem'; this row has none"),
    ("null answer", "t.jsonl", row(answer=None), "t.jsonl:1: answer is null, allowed: a filled string"),
    ("null problem", "t.jsonl", GOOD + row(problem=None), "t.jsonl:2: problem is null, allowed: a text"),
    ("verl, null answer", "t.jsonl", json.dumps(verl_row("1+1?", None, 0)), "reward_model.ground_truth is null"),
    ("verl, null prompt", "t.jsonl", b'{"prompt": null, "reward_model": null}', "t.jsonl:1: prompt is null"),
    ("verl, no answer", "t.jsonl", b'{"prompt": [], "reward_model": {}}', "no field 'reward_model.ground_truth'"),
    ("null in a chat", "t.jsonl", row(problem=[{"role": "user", "content": None}]), "t.jsonl:1: problem is null"),
    ("chat of nothing", "t.jsonl", row(problem=[None]), "t.jsonl:1: problem is null"),
    ("NaN as problem", "t.jsonl", row(problem=float("nan")), "t.jsonl:1: problem is a number (nan)"),
    ("json null answer", "t.json", b"[\n" + row(answer=None) + b"]", "t.json:2: answer is null"),
    ("problem a number", "t.jsonl", row(problem=3), "t.jsonl:1: problem is a number (3), allowed: a string"),
    ("problem an object", "t.jsonl", row(problem={}), "t.jsonl:1: problem is an object, allowed: a string"),
    ("problem a list", "t.jsonl", row(problem=["x"]), "t.jsonl:1: problem is an array without user turn"),
    ("problem empty", "t.jsonl", GOOD + row(problem=""), "t.jsonl:2: problem is empty"),
    ("problem blank", "t.jsonl", row(problem=" \n"), "t.jsonl:1: problem is empty"),
    ("answer empty", "t.jsonl", row(answer=""), "t.jsonl:1: answer is an empty string, allowed: a filled string"),
    ("answer blank", "t.jsonl", row(answer="  "), "t.jsonl:1: answer is an empty string"),
    ("answer no choice", "t.jsonl", row(answer=[]), "t.jsonl:1: answer is an empty list"),
    ("empty in list", "t.jsonl", row(answer=["4", ""]), "t.jsonl:1: answer is an empty string"),
    ("null in list", "t.jsonl", row(answer=["4", None]), "t.jsonl:1: answer is null"),
    ("NaN in list", "t.jsonl", row(answer=["4", float("nan")]), "t.jsonl:1: answer is a number (nan)"),
    ("answer a boolean", "t.jsonl", row(answer=True), "t.jsonl:1: answer is a boolean (true)"),
    ("answer not finite", "t.jsonl", row(answer=float("nan")), "t.jsonl:1: answer is a number (nan)"),
    ("answer an object", "t.jsonl", row(answer={"value": 4}), "t.jsonl:1: answer is an object"),
    ("duplicate uid", "t.jsonl", GOOD + row() + row(), "t.jsonl:3: duplicate uid 'b', first at t.jsonl:2; rename one"),
    ("empty uid", "t.jsonl", row(uid=""), "t.jsonl:1: uid is an empty string"),
    ("uid a list", "t.jsonl", row(uid=["b"]), "t.jsonl:1: uid is an array, allowed: an integer, or a string"),
    ("uid a boolean", "t.jsonl", row(uid=False), "t.jsonl:1: uid is a boolean (false)"),
    ("uid a fraction", "t.jsonl", row(uid=0.5), "t.jsonl:1: uid is a number (0.5)"),
    ("jsonl as json", "t.json", GOOD + row(), "t.json:2: bad JSON at column 1: Extra data; a file of one"),
    ("json one object", "t.json", GOOD, "t.json: found an object, allowed: one array of objects"),
    ("json empty array", "t.json", b"[]", "t.json: found no problem in it"),
    ("json comma", "t.json", b"[\n" + GOOD + GOOD + b"]", "t.json:3: bad JSON at column 1"),
    ("json wrong row", "t.json", b"[\n" + GOOD + b",\n3]", "t.json:4: found a number (3), allowed: an object"),
    ("json latin-1", "t.json", b'[\n{"problem": "n\xe9"}]', "t.json:2: found 0xe9 at byte 15"),
    ("corrupt parquet", "t.parquet", 40 * b"PAR1", "t.parquet: corrupt parquet file"),
    ("unknown extension", "t.csv", b"problem,answer", "unknown extension '.csv', allowed: .jsonl, .json, .parquet"),
    ("no extension", "train", GOOD, "unknown extension '', allowed: .jsonl"),
    ("compressed", "t.jsonl.gz", b"\x1f\x8b", "unknown extension '.gz'"),
]


@pytest.mark.parametrize(("name", "data", "expected"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_mistake_in_a_file_is_one_line_with_the_place(tmp_path, name, data, expected):
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    path = write(tmp_path, name, data)
    with pytest.raises(UserError) as error:
        load(path)
    assert expected in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


def test_missing_file_names_the_nearest(tmp_path):
    write(tmp_path, "train.jsonl", GOOD)
    with pytest.raises(UserError, match=r"trian.jsonl: no such file \(did you mean 'train.jsonl'\?\)"):
        load(tmp_path / "trian.jsonl")
    with pytest.raises(UserError, match="no such file, its folder '.*/nowhere' does not exist"):
        load(tmp_path / "nowhere" / "train.jsonl")
    with pytest.raises(UserError, match="found an empty name"):
        load("")


def test_a_mistyped_path_is_not_taken_for_a_hub_set(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    write(tmp_path / "data", "train.jsonl", GOOD)
    for path in ("data/train", "data/train.jsnl", "date/train.jsonl"):
        with pytest.raises(UserError, match=f"^{path}: no such file"):
            load(path)


def test_directory_names_the_data_files_in_it(tmp_path):
    for name in ("b.jsonl", "a.parquet", "readme.md"):
        write(tmp_path, name, GOOD)
    with pytest.raises(UserError, match="found a directory, allowed: a file; it holds a.parquet, b.jsonl$"):
        load(tmp_path)


def test_unreadable_file_says_why(tmp_path, monkeypatch):
    path = write(tmp_path, "t.jsonl", GOOD)

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match="t.jsonl: cannot be read: Permission denied"):
        load(path)


def test_truncated_parquet_is_named(tmp_path):
    rows = [{"uid": f"u{i}", "problem": f"{i}?", "answer": "1"} for i in range(2000)]
    path = Path(write_parquet(tmp_path, "t.parquet", rows))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="^t.parquet: corrupt parquet file after row 0: "):
        load(path)


@pytest.mark.parametrize(
    ("package", "source"), [("pyarrow", "t.parquet"), ("datasets", "agentica-org/DeepScaleR-Preview-Dataset")]
)
def test_absent_package_gives_the_line_that_installs_it(tmp_path, monkeypatch, package, source):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "t.parquet", b"PAR1")
    monkeypatch.setitem(sys.modules, package, None)  # import raises ImportError
    with pytest.raises(UserError, match=f"pip install {package}$"):
        load(source)


def test_absent_named_uid_field_is_a_mistake(tmp_path):
    path = write(tmp_path, "t.jsonl", [{"idx": 1, "problem": "?", "answer": "1"}])
    with pytest.raises(UserError, match=r"no field 'id' \(did you mean 'idx'\?\)"):
        load(path, uid_field="id")


def test_limit_below_one_is_a_mistake(tmp_path):
    with pytest.raises(UserError, match="found 0, allowed: 1 or more"):
        load(write(tmp_path, "t.jsonl", GOOD), limit=0)


def test_a_damaged_file_gives_problems_or_one_line(tmp_path):
    """Bytes cut, doubled and replaced at random, mostly by what means something in JSON."""
    random = Random(0)
    rows = [row(uid="a"), row(uid="b", answer=["4", 5]), json.dumps(verl_row("3+3?", "6", 1)).encode() + b"\n"]
    marks = [bytes([mark]) for mark in b'{}[],:"\\\n0\xff\x00']
    outcomes = Counter()
    for _ in range(500):
        data = bytearray(b"".join(rows))
        for _ in range(random.randint(1, 4)):
            start = random.randrange(len(data))
            stop = start + random.choice([0, 1, 1, 5])
            data[start:stop] = random.choice([b"", b"null", 2 * data[start:stop], *marks])
        try:
            problems = load(write(tmp_path, "t.jsonl", bytes(data)))
        except UserError as error:
            assert "\n" not in str(error)
            outcomes["refused"] += 1
        else:
            assert all(p.problem.strip() and p.uid and p.answer for p in problems)
            outcomes["read"] += 1
    assert outcomes["refused"] and outcomes["read"]
