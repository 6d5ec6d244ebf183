"""config.py: a flat frozen dataclass from its defaults, a YAML file and the command line; the later source wins.

    config = parse(Config, ["--config", "configs/tiny.yaml", "--lr=1e-4", "--resume"])

A field is `int`, `float`, `bool`, `str`, `list[int]` or `list[str]`, or one of these `| None`; its module begins with
`from __future__ import annotations`. `bounded`, `one_of` and `path` say what a value may be. `--help` prints the
comments of the class: the one behind a field is its meaning, and goes on in comment lines that are indented deeper than
the fields; one at the indent of the fields is a heading. Every mistake is a UserError that names file and line, or the
argument. Left out: nested keys, includes, interpolation.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import io
import math
import operator
import os
import re
import sys
import textwrap
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from runtime.errors import UserError, nearest

Entry = tuple[str, object, str]  # key, value, and the place that a message names
BOUNDS = {
    "low": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "high": ("at most", operator.le),
    "below": ("below", operator.lt),
}


def bounded(default, also=None, **bounds):
    """A field of numbers with low <= value <= high and above < value < below (any of the four), or value == also."""
    return dataclasses.field(default=default, metadata={"bounds": bounds, "also": also})


def one_of(*allowed: str):
    """A field that takes one of `allowed`; the first is the default."""
    return dataclasses.field(default=allowed[0], metadata={"allowed": allowed})


def path(default: str | None):
    """A field that names a file or a folder; `expand` is applied to it."""
    return dataclasses.field(default=default, metadata={"path": True})


def parse(cls, argv: Sequence[str]):
    """The frozen dataclass `cls` from its defaults, then the file of `--config FILE`, then `--key=value` arguments.

    `--key value` is the same as `--key=value`; a bare `--flag` is true; `--help` prints the fields. UserError for an
    unknown key, a value of the wrong type or out of bounds, an unreadable file, and an empty or a second --config.
    """
    fields, program = {f.name: f for f in dataclasses.fields(cls)}, Path(inspect.getfile(cls)).name
    if any(word in ("-h", "--help") for word in argv):
        print_help(cls, program)
        sys.exit(0)
    arguments = list(read_arguments(argv, {"config": "str"} | {name: f.type for name, f in fields.items()}))
    files = [value for key, value, _ in arguments if key == "config"]
    entries = [entry for entry in arguments if entry[0] != "config"]
    if len(files) > 1 or "" in files:
        raise UserError(f"command line: --config: found {' and '.join(map(repr, files))}, allowed: one file")
    if files:
        entries = read_yaml(expand(files[0], "command line: --config")) + entries
    values = {}
    for key, value, where in entries:
        if key not in fields:
            raise UserError(f"{where}: unknown key {key!r}{nearest(key, fields)}; all keys: python {program} --help")
        values[key] = checked(fields[key], value, where)
    if files and "run_dir" in fields and not values.get("run_dir"):
        values["run_dir"] = f"runs/{Path(files[0]).stem}"
    return cls(**values)


def read_arguments(argv: Sequence[str], types: dict[str, str]) -> Iterator[Entry]:
    """The entries of a command line. types: of each known key."""
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise UserError(f"command line: found {word!r}, allowed: --config FILE and --key=value")
        name, equals, value = word[2:].partition("=")
        key = name.replace("-", "_")
        kind = types.get(key, "list")  # an unknown key takes all words up to the next one
        if not equals:
            following = next((i for i, w in enumerate(words) if w.startswith("--")), len(words))
            count = following if kind.startswith("list") else min(following, kind != "bool")
            if not count and kind != "bool" and key in types:
                raise UserError(f"command line: --{name} needs a value: --{name}=...")
            between = "," if kind.startswith("list[str]") else " "  # a path may have spaces
            value, words = "true" if kind == "bool" else between.join(words[:count]), words[count:]
        yield key, value, f"command line: --{name}"


def read_yaml(file: str) -> list[Entry]:
    """The entries of a flat YAML mapping."""
    source, where, entries = Path(file), file, []
    if not source.is_file():
        near = nearest(file, map(str, source.parent.glob("*.yaml"))) if source.parent.is_dir() else ""
        raise UserError(f"--config {file}: no such file{near}")
    try:
        text = source.read_bytes().decode("utf-8-sig")
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        for k, v in node.value if isinstance(node, yaml.MappingNode) else []:
            where = f"{file}:{k.start_mark.line + 1}"
            entries.append((str(loader.construct_object(k, deep=True)), loader.construct_object(v, deep=True), where))
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 (byte {error.start})") from error
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:  # `!!int x`, `!!bool x`
        mark = getattr(error, "problem_mark", None)
        if mark or hasattr(error, "position"):  # of a character that YAML does not allow
            where = f"{file}:{(mark.line if mark else text.count(chr(10), 0, error.position)) + 1}"
        raise UserError(f"{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from error
    if not isinstance(node, yaml.MappingNode | None):
        raise UserError(f"{file}:{node.start_mark.line + 1}: found a {node.id}, allowed: lines of `key: value`")
    first: dict[str, str] = {}
    for key, _, where in entries:
        if key in first:
            raise UserError(f"{where}: key {key!r} stands twice, first at {first[key]}")
        first[key] = where
    return entries


# --- One value ------------------------------------------------------------------------------------------------------


def checked(field: dataclasses.Field, value, where: str):
    """`value` (from YAML, or a string of the command line) as the field's type and within its bounds, or UserError."""
    kind, *optional = field.type.split(" | ")
    if optional and (value in (None, "none", "None", "null") or value == "" and kind != "str"):
        return None
    if kind.startswith("list["):
        text = str(value) if kind == "list[str]" else str(value).replace(" ", ",")
        items = value if isinstance(value, list) else [item for item in text.split(",") if item]
        return [one_checked(field, kind[5:-1], item, where) for item in items or [value]]
    return one_checked(field, kind, value, where)


def one_checked(field: dataclasses.Field, kind: str, value, where: str):
    (convert, meaning), may = KINDS[kind], field.metadata
    refuse, out = f"{where}: {field.name} = {value!r}, allowed:", convert(value)
    if out is None:
        raise UserError(f"{refuse} {meaning}")
    choices, bounds = may.get("allowed", ()), may.get("bounds", {})
    inside = all(BOUNDS[b][1](out, bound) for b, bound in bounds.items()) or out == may.get("also")
    if choices and out not in choices or not inside:
        raise UserError(f"{refuse} {limits(field)}{nearest(str(out), choices)}")
    return expand(out, f"{where}: {field.name}") if may.get("path") else out


def limits(field: dataclasses.Field) -> str:
    """What a value may be apart from its type: "at least 0 and below 1", or the choices; empty for any value."""
    bounds = " and ".join(f"{BOUNDS[b][0]} {bound}" for b, bound in field.metadata.get("bounds", {}).items())
    also = f"{field.metadata['also']}, or " if field.metadata.get("also") is not None else ""
    return ", ".join(field.metadata.get("allowed", ())) or also + bounds


def expand(name: str, where: str) -> str:
    """`name` with `~` and `$VARIABLE` replaced as a shell does; UserError where there is no such home or variable."""
    unset = [variable for variable in re.findall(r"\$\{?(\w+)", name) if not os.environ.get(variable)]
    out = os.path.expanduser(os.path.expandvars(name))
    if not unset and not out.startswith("~"):
        return out
    if os.path.exists(name):
        return name
    what = f"the variable {unset[0]} is not set" if unset else "there is no such home directory"
    raise UserError(f"{where} = {name!r}: {what}; allowed: a path whose ~ and $VARIABLE exist")


def text(value) -> str | None:
    return value if isinstance(value, str) else None


def boolean(value) -> bool | None:
    return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}.get(str(value).lower())


def number(value) -> float | None:
    """Finite; a string counts if it is one (YAML takes 1e-6 for text)."""
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        if not isinstance(value, bool) and math.isfinite(float(value)):
            return float(value)
    return None


def integer(value) -> int | None:
    """Exact at any size; 1e3 counts."""
    with contextlib.suppress(ValueError, TypeError):
        if not isinstance(value, bool | float):
            return int(value)
    whole = number(value)
    return int(whole) if whole is not None and whole.is_integer() else None


KINDS = {
    "str": (text, "text"),
    "bool": (boolean, "true or false"),
    "int": (integer, "an integer"),
    "float": (number, "a finite number"),
}

# --- Help -----------------------------------------------------------------------------------------------------------


def print_help(cls, program: str) -> None:
    """Each field with its default, meaning, type and bounds, under the headings of the class."""
    lines, comments, shown = [f"python {program} [--config FILE] [--key=value ...]"], read_comments(cls), ""
    for f in dataclasses.fields(cls):
        heading, meaning = comments[f.name]
        lines += ["", heading] * (heading != shown)
        shown = heading
        kind = "" if "allowed" in f.metadata else f.type.replace(" | None", " or none")
        lines.append(f"  --{f.name}={f.default!r}   {meaning}   [{', '.join(filter(None, (kind, limits(f))))}]")
    print("\n".join(lines))


def read_comments(cls) -> dict[str, tuple[str, str]]:
    """(heading, meaning) of each field, from the source of the class and of the classes that it extends."""
    found: dict[str, tuple[str, str]] = {}
    for base in filter(dataclasses.is_dataclass, reversed(cls.__mro__)):
        source = textwrap.dedent(inspect.getsource(base))
        body = ast.parse(source).body[0].body
        names = {n.lineno: n.target.id if isinstance(n, ast.AnnAssign) else None for n in body}
        heading, name, comments = "", None, {}
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            (line, column), words = token.start, token.string.strip("# ") if token.type == tokenize.COMMENT else ""
            if line in names and column == body[0].col_offset:
                name = names[line]
                comments[name] = heading, []
            elif words and column == body[0].col_offset:
                heading = words
            elif words and name:
                comments[name][1].append(words)
        for name, (heading, meaning) in comments.items():
            inherited = found.get(name, ("", ""))
            found[name] = heading or inherited[0], " ".join(meaning) or inherited[1]
    return found
