"""config.py: a flat frozen dataclass from its defaults, a YAML file and the command line, the later ones stronger.

    config = parse(Config, ["--config", "configs/tiny.yaml", "--lr=1e-4", "--resume"])

A field is `int`, `float`, `bool`, `str` or one of these `| None`, its module begins with `from __future__ import
annotations`; `bounded` and `one_of` say what it may be. Every mistake is a UserError that names file and line, or
the argument. Left out: nested keys, includes, interpolation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from runtime.errors import UserError, nearest


def bounded(default, low=None, high=None, above=None, below=None):
    """A numeric config field with its bounds: low <= value <= high, above < value < below."""
    return dataclasses.field(default=default, metadata={"low": low, "high": high, "above": above, "below": below})


def one_of(*allowed: str):
    """A config field that takes one of `allowed`; the first is the default."""
    return dataclasses.field(default=allowed[0], metadata={"allowed": allowed})


def parse(cls, argv: Sequence[str]):
    """The frozen dataclass `cls` from its defaults, then the file of `--config FILE`, then `--key=value` arguments.

    Raises UserError for an unknown key, a value of the wrong type or out of bounds, and an unreadable file, naming the
    file and line or the argument. A bare `--flag` is true for a boolean key. `--help` prints the fields.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}
    arguments, file = [], None
    words = list(argv)
    while words:
        word = words.pop(0)
        if word in ("-h", "--help"):
            print_help(cls)
        if not word.startswith("--"):
            raise UserError(f"command line: found {word!r}, allowed: --config FILE and --key=value")
        key, equals, value = word[2:].partition("=")
        key = key.replace("-", "_")
        if not equals:
            takes_value = key == "config" or (key in fields and fields[key].type != "bool")
            if takes_value and (not words or words[0].startswith("--")):
                raise UserError(f"command line: --{key} needs a value: --{key}=...")
            value = words.pop(0) if takes_value else "true"
        if key == "config":
            file = value
        else:
            arguments.append((key, value, f"command line: --{key}"))
    entries = (read_yaml(file) if file else []) + arguments
    values = {}
    for key, value, where in entries:
        if key not in fields:
            raise UserError(f"{where}: unknown key {key!r}{nearest(key, fields)}; all keys: python r3.py --help")
        values[key] = checked(fields[key], value, where)
    if file and "run_dir" in fields and not values.get("run_dir"):
        values["run_dir"] = f"runs/{Path(file).stem}"
    return cls(**values)


def read_yaml(file: str) -> list[tuple[str, object, str]]:
    """(key, value, "file:line") of each entry of a flat YAML mapping."""
    path = Path(file)
    if not path.is_file():
        near = nearest(str(path), map(str, path.parent.glob("*.yaml"))) if path.parent.is_dir() else ""
        raise UserError(f"--config {file}: no such file{near}")
    loader = None
    try:
        loader = yaml.SafeLoader(path.read_bytes().decode("utf-8-sig"))
        node = loader.get_single_node()
        if node is None:
            return []
        if not isinstance(node, yaml.MappingNode):
            raise UserError(f"{file}:{node.start_mark.line + 1}: found a {node.id}, allowed: lines of `key: value`")
        pairs = []
        for k, v in node.value:
            where = f"{file}:{k.start_mark.line + 1}"
            pairs.append((str(loader.construct_object(k, deep=True)), loader.construct_object(v, deep=True), where))
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 (byte {error.start})") from error
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that no calendar has, for example
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise UserError(f"{file}{line}: not valid YAML: {getattr(error, 'problem', None) or error}") from error
    finally:
        if loader:
            loader.dispose()
    seen: dict[str, str] = {}
    for key, _, where in pairs:
        if key in seen:
            raise UserError(f"{where}: key {key!r} stands twice, first at {seen[key]}")
        seen[key] = where
    return pairs


def checked(field: dataclasses.Field, value, where: str):
    """`value` (from YAML or a command line string) as the field's type and within its bounds, or UserError."""
    kind, *optional = field.type.split(" | ")
    refuse = f"{where}: {field.name} = {value!r}"
    if optional and value in (None, "none", "None", "null", ""):
        return None
    convert, meaning = KINDS[kind]
    out = convert(value)
    if out is None:
        raise UserError(f"{refuse}, allowed: {meaning}")
    choices = field.metadata.get("allowed", (out,))
    if out not in choices:
        raise UserError(f"{refuse}, allowed: {', '.join(choices)}{nearest(out, choices)}")
    bounds = [(words, field.metadata[b], holds) for b, words, holds in BOUNDS if field.metadata.get(b) is not None]
    if not all(holds(out, bound) for _, bound, holds in bounds):
        raise UserError(f"{refuse}, allowed: {' and '.join(f'{words} {bound}' for words, bound, _ in bounds)}")
    return out


BOUNDS = (
    ("low", "at least", operator.ge),
    ("above", "above", operator.gt),
    ("high", "at most", operator.le),
    ("below", "below", operator.lt),
)


def text(value) -> str | None:
    return value if isinstance(value, str) else None


def boolean(value) -> bool | None:
    return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}.get(str(value).lower())


def number(value) -> float | None:
    """Finite; a string counts if it is one (YAML takes 1e-6 for text)."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value) if math.isfinite(float(value)) else None
    except (ValueError, OverflowError):
        return None


def integer(value) -> int | None:
    """Exact at any size; 1e3 counts."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return int(value)
    whole = number(value)
    if whole is None or not whole.is_integer():
        return None
    return value if isinstance(value, int) else int(whole)


KINDS = {
    "str": (text, "text"),
    "bool": (boolean, "true or false"),
    "int": (integer, "an integer"),
    "float": (number, "a finite number"),
}


def print_help(cls) -> None:
    print("python r3.py --config FILE [--key=value ...]\n\nkeys and defaults (their meaning: class Config in r3.py)")
    for f in dataclasses.fields(cls):
        print(f"  --{f.name}={f.default!r}   [{f.type}]")
    sys.exit(0)
