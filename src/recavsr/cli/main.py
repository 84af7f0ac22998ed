"""The `recavsr` command: its parts, and what becomes of every error.

Exit codes: 0 done; 1 done in part; 2 refused, bad input or options; 130 interrupted. Nothing heavy is
imported here, so that `recavsr --help` answers at once: each command imports what it needs when it runs.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, NoReturn

import typer

import recavsr
from recavsr.cli import (
    ablate,
    batch,
    bench,
    compare,
    convert,
    data,
    degrade,
    demo,
    doctor,
    evaluate,
    live,
    models,
    route,
    train,
    upscale,
)
from recavsr.cli.console import Console
from recavsr.errors import InputError, PartialError

REFUSED = 2
INTERRUPTED = 130
OPENMP_SPINS = "1000"
"""How long OpenMP's threads spin while they wait for one another: `GOMP_SPINCOUNT`, where it is not set.

Where something else wants the cores, shorter spins are twice as fast; where nothing does, they cost nothing,
but none at all cost a tenth (docs/performance.md).
"""

# Newer releases of typer carry their own copy of click, older ones use the package: right in both.
_CommandError = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

app = typer.Typer(
    name="recavsr",
    help="Upscale video as it streams, by one-step diffusion.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
# It says itself what to do about a second file name.
app.command("upscale", context_settings={"allow_extra_args": True})(upscale.command)
app.command("batch")(batch.command)
app.command("live")(live.command)
app.command("compare")(compare.command)
app.command("demo")(demo.command)
app.command("evaluate")(evaluate.command)
app.command("bench")(bench.command)
app.command("train")(train.command)
app.command("degrade")(degrade.command)
app.command("doctor")(doctor.command)
app.add_typer(ablate.app, name="ablate")
app.add_typer(data.app, name="data")
app.add_typer(models.app, name="models")
app.add_typer(route.app, name="route")
app.add_typer(convert.app, name="convert")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"recavsr {recavsr.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    pass


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; every error becomes one line on stderr."""
    console = Console(json_lines="--json" in arguments)
    try:
        code = app(args=list(arguments) or ["--help"], prog_name="recavsr", standalone_mode=False)
        # Newer releases of typer turn an interrupt into this code, older ones into Abort.
        if code == INTERRUPTED:
            return _fail(console, "interrupted", INTERRUPTED)
        return code if isinstance(code, int) else 0
    except (InputError, PartialError) as error:
        return _fail(console, str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _fail(console, "interrupted", INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our stdout has gone. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _fail(console, "the reader of the output closed it before the end", PartialError.exit_code)
    except Exception as error:
        if isinstance(error, _CommandError):
            return _fail(console, _usage(error), REFUSED)
        if os.environ.get("RECAVSR_DEBUG"):
            traceback.print_exc()
        return _fail(console, _unexpected(error), REFUSED)


def main() -> NoReturn:
    """Entry point of the `recavsr` command."""
    signal.signal(signal.SIGTERM, _interrupt)
    hangup = getattr(signal, "SIGHUP", None)  # the terminal was closed; nohup ignores that
    if hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN:
        signal.signal(hangup, _interrupt)
    os.environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPINS)  # read when torch is imported
    codes: list[int] = []
    atexit.register(_leave_threads_behind, codes)  # the first to be registered is the last to be called
    codes.append(run(sys.argv[1:]))
    sys.exit(codes[0])


def _leave_threads_behind(codes: list[int]) -> None:
    """End the process here where a daemon thread is left, such as one that waits for a source that hangs.

    Python would end such a thread wherever it is. Inside a library that is C++, PyTorch for one, that aborts
    the whole process after its work is done.
    """
    if not codes or not any(thread.daemon for thread in threading.enumerate()):
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads any more
            stream.flush()
    os._exit(codes[0])


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _fail(console: Console, text: str, code: int) -> int:
    console.error(text, code)
    return code


def _usage(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    where = f" (see {context.command_path} --help)" if context else ""
    return error.format_message().rstrip(".") + where  # type: ignore[attr-defined]


def _unexpected(error: Exception) -> str:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return (
            "not enough memory for this size: ask for a smaller output, for --direct where that is below the "
            "model's own scale, or for another --device"
        )
    hint = "RECAVSR_DEBUG=1 shows where it happened"
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror} ({hint})"
    return f"unexpected {type(error).__name__}: {error} ({hint})"
