"""Config: defaults, then the file, then the command line; mistakes are in test_bad_input.py."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

import attnrl
import eval as evaluation
from r3 import Config
from runtime.config import bounded, limits, one_of, parse, path, read_comments
from runtime.errors import UserError

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Small:
    """What a run is made of."""

    # names
    name: str = "x"  # what it is called
    size: int = bounded(3, low=1, high=2**70)  # S, rows;
                                               # at most 2**70
    rate: float = bounded(0.5, above=0)  # per step # and no more
    # limits
    limit: int | None = bounded(None, low=1)  # only the first
    mode: str = one_of("plain", "fancy")  # how it is done
    on: bool = True  # whether it is done
    resume: bool = False  # go on
    heat: float = bounded(0.5, low=0.1, also=0)  # 0: none
    folder: str = path("")  # where it goes

    def area(self):  # no field
        return self.size  # nor this

    # nor a heading


@dataclass(frozen=True)
class Extended(Small):
    """As an algorithm of its own extends the Config of another."""

    rate: float = bounded(0.25, above=0, below=1)
    mode: str = one_of("fancy", "plain")  # done otherwise

    # of its own
    template: str = (  # a text with # in it
        "{a}  # {b}"
    )
    counts: list[int] | None = bounded(None, low=1)  # several numbers


def from_file(tmp_path, text: str, *arguments: str) -> Small:
    (tmp_path / "c.yaml").write_text(text, encoding="utf-8")
    return parse(Small, ["--config", str(tmp_path / "c.yaml"), *arguments])


def test_command_line_beats_file_beats_defaults(tmp_path):
    made = from_file(tmp_path, "size: 4\nrate: 0.25\n", "--rate=0.125")
    assert (made.name, made.size, made.rate) == ("x", 4, 0.125)
    last = parse(Small, ["--size=1", "--size=2"])
    assert last.size == 2


def test_arguments_may_stand_anywhere_and_in_either_form(tmp_path):
    (tmp_path / "c.yaml").write_text("size: 4")
    made = parse(Small, ["--rate", "1e-3", f"--config={tmp_path / 'c.yaml'}", "--resume", "--name=a=b --c"])
    assert made == Small(name="a=b --c", size=4, rate=1e-3, resume=True)


@pytest.mark.parametrize("word", ["--resume", "--resume=true", "--resume=True", "--resume=1", "--resume=yes"])
def test_bare_flag_is_true(word):
    assert parse(Small, [word]).resume is True


def test_flag_does_not_swallow_the_next_word():
    with pytest.raises(UserError, match="found 'false'"):
        parse(Small, ["--resume", "false"])
    assert parse(Small, ["--on=false", "--resume"]) == Small(on=False, resume=True)


def test_dashes_in_a_key_are_underscores():
    assert parse(Config, ["--override-config"]).override_config


@pytest.mark.parametrize("written", ["1e-6", "1.0e-6", "0.000001", "'1e-6'", "1E-06"])
def test_small_numbers_are_numbers_though_yaml_takes_some_for_text(tmp_path, written):
    assert from_file(tmp_path, f"rate: {written}").rate == 1e-6


def test_integers_are_exact_and_may_be_written_as_powers(tmp_path):
    assert from_file(tmp_path, f"size: {2**60 + 1}").size == 2**60 + 1
    assert parse(Small, [f"--size={2**60 + 1}"]).size == 2**60 + 1
    made = parse(Small, ["--size=1e3"])
    assert made.size == 1000 and isinstance(made.size, int)
    assert isinstance(parse(Small, ["--rate=1"]).rate, float)


@pytest.mark.parametrize("word", ["none", "null", ""])
def test_optional_number_may_be_none(tmp_path, word):
    assert from_file(tmp_path, "limit: 5", f"--limit={word}").limit is None
    assert from_file(tmp_path, "limit: 5").limit == 5


def test_bounds_themselves_are_inside_unless_they_are_open():
    assert parse(Small, ["--size=1"]).size == 1
    with pytest.raises(UserError, match="rate = '0', allowed: above 0"):
        parse(Small, ["--rate=0"])


def test_empty_file_is_all_defaults(tmp_path):
    assert from_file(tmp_path, "# nothing\n") == Small()


def shown_by_help(cls, capsys) -> list[str]:
    with pytest.raises(SystemExit) as end:
        parse(cls, ["--on=false", "--help"] if cls is Small else ["--help"])
    assert end.value.code == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("cls", [Config, evaluation.Options, Small, Extended], ids=lambda cls: cls.__name__)
def test_help_says_the_default_and_the_meaning_of_every_key(cls, capsys):
    shown = shown_by_help(cls, capsys)
    for field in dataclasses.fields(cls):
        (line,) = [line for line in shown if line.startswith(f"  --{field.name}=")]
        default, meaning, limits = line.removeprefix(f"  --{field.name}=").rsplit("   ", 2)
        assert default == repr(field.default)
        assert len(meaning) > 2, f"{field.name} has no comment that says what it means"
        assert limits.startswith("[") and limits.endswith("]")


def test_help_is_made_of_comments_and_bounds_of_the_class_and_those_it_extends(capsys):
    assert shown_by_help(Extended, capsys) == [
        "python test_config.py [--config FILE] [--key=value ...]",
        "",
        "names",
        "  --name='x'   what it is called   [str]",
        f"  --size=3   S, rows; at most 2**70   [int, at least 1 and at most {2**70}]",
        "  --rate=0.25   per step # and no more   [float, above 0 and below 1]",
        "",
        "limits",
        "  --limit=None   only the first   [int or none, at least 1]",
        "  --mode='fancy'   done otherwise   [fancy, plain]",
        "  --on=True   whether it is done   [bool]",
        "  --resume=False   go on   [bool]",
        "  --heat=0.5   0: none   [float, 0, or at least 0.1]",
        "  --folder=''   where it goes   [str]",
        "",
        "of its own",
        "  --template='{a}  # {b}'   a text with # in it   [str]",
        "  --counts=None   several numbers   [list[int] or none, at least 1]",
    ]


def test_a_class_without_comments_has_empty_meanings():
    @dataclass(frozen=True)
    class Bare:
        size: int = 3

    assert read_comments(Bare) == {"size": ("", "")}


@pytest.mark.parametrize("argv", [["--counts", "1", "16", "--on"], ["--counts=1,16"], ["--counts", "1e0, 16"]])
def test_a_list_takes_every_word_up_to_the_next_key(argv):
    assert parse(Extended, argv).counts == [1, 16]


def test_a_list_may_stand_in_a_file(tmp_path):
    (tmp_path / "c.yaml").write_text("counts: [1, 16]")
    assert parse(Extended, [f"--config={tmp_path / 'c.yaml'}"]).counts == [1, 16]


def test_a_single_value_may_be_allowed_beside_the_bounds():
    assert (parse(Small, ["--heat=0"]).heat, parse(Small, ["--heat=0.1"]).heat) == (0, 0.1)
    with pytest.raises(UserError, match="--heat: heat = '0.05', allowed: 0, or at least 0.1$"):
        parse(Small, ["--heat=0.05"])


@pytest.mark.parametrize("written", ["~/x", "$HOME/x", "${HOME}/x", "$PART/x"])
def test_home_and_variables_in_a_path_are_expanded_in_file_and_command_line(tmp_path, monkeypatch, written):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PART", "~")
    expected = str(tmp_path / "x")
    assert parse(Small, [f"--folder={written}"]).folder == expected
    assert from_file(tmp_path, f"folder: {written}").folder == expected
    assert parse(Small, [f"--name={written}"]).name == written, "only paths are"
    (tmp_path / "x").write_text("size: 4")
    assert parse(Small, [f"--config={written}"]).size == 4


def test_only_what_a_shell_expands_is_expanded():
    for written in ("a/~/x", "./~/x", "a~", "x$", "owner/name"):
        assert parse(Small, [f"--folder={written}"]).folder == written


@pytest.mark.parametrize("written", ["$NOWHERE/x", "a/${NOWHERE}", "$EMPTY/x", "~nobody-of-this-name/x"])
def test_a_home_or_variable_that_is_not_there_is_refused_unless_a_file_has_that_name(tmp_path, monkeypatch, written):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EMPTY", "")
    with pytest.raises(UserError, match=f"--folder: folder = '{re.escape(written)}': (the variable|there is no)"):
        parse(Small, [f"--folder={written}"])
    Path(written).parent.mkdir(parents=True, exist_ok=True)
    Path(written).touch()
    assert parse(Small, [f"--folder={written}"]).folder == written


def test_config_marks_its_paths():
    marked = {field.name for field in dataclasses.fields(Config) if field.metadata.get("path")}
    assert marked == {"model", "data", "eval_data", "run_dir"}


def test_run_directory_is_named_after_the_config_file(tmp_path):
    (tmp_path / "first.yaml").write_text("lr: 1")
    assert parse(Config, [f"--config={tmp_path / 'first.yaml'}"]).run_dir == "runs/first"
    assert parse(Config, [f"--config={tmp_path / 'first.yaml'}", "--run_dir=here"]).run_dir == "here"


def test_config_that_a_run_wrote_is_read_back_the_same(tmp_path):
    """Resuming compares them."""
    template = 'Problem:\n\t{problem}\n"{attempt}"\n# no comment: ½ \\boxed{} \u2028 end '
    made = Config(lr=1e-30, seed=2**60 + 1, data_limit=None, reflection_template=template, run_dir="7", uid_field="no")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(dataclasses.asdict(made), sort_keys=False), encoding="utf-8")
    assert parse(Config, [f"--config={tmp_path / 'config.yaml'}"]) == made


def test_config_is_frozen_and_every_field_says_what_it_may_be():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().lr = 1.0
    for field in dataclasses.fields(Config):
        assert field.type in ("str", "bool", "int", "float", "int | None"), field.name
        if field.type not in ("str", "bool"):
            assert limits(field) or field.name in ("top_p", "top_k"), f"{field.name} has no bounds"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_configs_parse(path):
    kind = attnrl.Config if path.stem.startswith("attnrl") else Config
    assert parse(kind, [f"--config={path}"]) != kind()
