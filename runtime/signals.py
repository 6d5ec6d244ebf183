"""signals.py: SIGTERM, Ctrl-C and crashes stop a run without the loss of a finished step.

    signals = Signals(grace_seconds, ranks)
    with signals.saving(save):                # `save` saves the last finished step
        with signals.interruptible():         # work that may be abandoned at any moment
            ...

Exit codes are 143 and 130, as a shell expects. Left out: saving in the middle of a step. A step changes nothing before
its optimiser step, so it can be repeated.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator

import torch.distributed as dist

from runtime.errors import UserError
from runtime.ranks import Ranks


class Stopped(BaseException):
    """SIGTERM or Ctrl-C where a step may be abandoned, with the exit code 143 or 130."""

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


class Signals:
    """At SIGTERM or Ctrl-C the run abandons its `interruptible` block or finishes its step; then it saves and exits.

    A second signal, or the end of `grace_seconds`, ends the process at once. A thread does that, because the main one
    may be in a kernel or a collective call. Before `saving` is entered the first signal ends the run where it is.
    """

    def __init__(self, grace_seconds: float, ranks: Ranks):
        self.grace, self.ranks = grace_seconds, ranks
        self.code, self.begun, self.may_stop = 0, False, False
        self.arrivals, arrive = os.pipe()  # the C handler writes each signal's number, even while Python is not running
        os.set_blocking(arrive, False)
        self.handlers = {s: signal.signal(s, self.receive) for s in (signal.SIGTERM, signal.SIGINT)}
        self.wakeup, self.arrive = signal.set_wakeup_fd(arrive, warn_on_full_buffer=False), arrive
        threading.Thread(target=self.watch, name="signals", daemon=True).start()

    def receive(self, number: int, frame) -> None:
        if self.code:  # the second one; `watch` ends the process
            return
        self.code = 128 + number
        if not self.begun:
            sys.exit(self.code)
        with contextlib.suppress(OSError):  # not print: it may be what the signal interrupted
            os.write(2, f"\nsignal {number}: stopping; the last finished step will be saved\n".encode())
        if self.may_stop:
            raise Stopped(self.code)

    def watch(self) -> None:
        if number := os.read(self.arrivals, 1):
            again, _, _ = select.select([self.arrivals], [], [], self.grace)
            if not again or os.read(self.arrivals, 1):  # an empty read means that `close` was called
                os._exit(128 + number[0])
        os.close(self.arrivals)

    def check_all(self) -> None:
        """Stops all ranks here or none, so that none of them waits in a collective call for another."""
        codes = self.ranks.sum(self.code if r == self.ranks.rank else 0 for r in range(self.ranks.size))
        if any(codes):
            raise Stopped(int(max(codes)))

    @contextlib.contextmanager
    def interruptible(self, collective: bool = False) -> Iterator[None]:
        """For work that changes nothing in a checkpoint: a signal ends it anywhere.

        With several ranks not in work with collective calls. At its end all ranks stop or none.
        """
        self.check_all()
        with contextlib.suppress(Stopped):
            self.may_stop = not collective or self.ranks.size == 1
            yield
            self.may_stop = False
        self.check_all()

    @contextlib.contextmanager
    def saving(self, save: Callable[[], None]) -> Iterator[None]:
        """Saves when a signal or a crash ends the block; after a signal it exits with the signal's code.

        With several ranks a crash saves nothing, because the other ranks wait in a collective call.
        """
        self.begun = True
        try:
            yield
        except Stopped as stop:
            self.code = stop.code  # of the rank that received it
            save()
        except Exception as crash:
            if self.ranks.size == 1:
                try:
                    save()
                except UserError as error:
                    print(f"\n{error}", file=sys.stderr)
            elif isinstance(crash, dist.DistError) or "gloo" in str(crash):
                self.ranks.heartbeat.wait()  # ends this process with the number of the rank that is gone
            raise
        if self.code:
            sys.exit(self.code)

    def close(self) -> None:
        signal.set_wakeup_fd(self.wakeup)
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        os.close(self.arrive)
