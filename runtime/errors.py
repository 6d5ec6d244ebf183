"""errors.py: what a user's mistake becomes: one line on stderr and exit code 2. A bug of ours keeps its traceback.

    raise UserError(f"config key 'lr': found {value!r}, allowed: a number above 0")
"""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
from collections.abc import Iterable, Iterator


class UserError(ValueError):
    """A mistake in what the user gave. The message is one line: the place, what was found, what is allowed."""


def nearest(name: str, allowed: Iterable[str]) -> str:
    """`" (did you mean 'lr'?)"` for the allowed name closest to `name`, or an empty string if none is close."""
    close = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


@contextlib.contextmanager
def exit_cleanly() -> Iterator[None]:
    """Around a `main`: a UserError becomes `error: ...` on stderr and exit code 2, Ctrl-C exit code 130 without a
    traceback; whatever else passes through."""
    try:
        yield
    except UserError as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(141)
