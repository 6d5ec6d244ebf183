"""Config: defaults, then the file, then the command line; mistakes are in test_bad_input.py."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from r3 import Config
from runtime.config import bounded, one_of, parse
from runtime.errors import UserError

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Small:
    name: str = "x"
    size: int = bounded(3, low=1, high=2**70)
    rate: float = bounded(0.5, above=0)
    limit: int | None = None
    mode: str = one_of("plain", "fancy")
    on: bool = True
    resume: bool = False


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


def test_help_prints_every_key_with_its_default(capsys):
    with pytest.raises(SystemExit) as end:
        parse(Config, ["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"--{field.name}={field.default!r}" in shown for field in dataclasses.fields(Config))


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
            assert field.metadata or field.name in ("top_p", "top_k"), f"{field.name} has no bounds"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_configs_parse(path):
    assert parse(Config, [f"--config={path}"]) != Config()
