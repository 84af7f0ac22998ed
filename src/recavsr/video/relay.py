"""Protocols that PyAV's libraries lack (SRT): an `ffmpeg` executable carries MPEG-TS to and fro."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import sys
import tempfile
from typing import IO

from recavsr.errors import InputError

_TERMINATE_SECONDS = 3.0


def ffmpeg_with(protocol: str) -> str:
    """Return the path of an `ffmpeg` executable that speaks `protocol`; InputError if there is none."""
    executable = shutil.which("ffmpeg")
    if executable is None:
        raise InputError(f"{protocol} needs an ffmpeg executable on the PATH, and there is none")
    listed = subprocess.run(
        [executable, "-hide_banner", "-protocols"], capture_output=True, text=True, check=False
    )
    if protocol not in listed.stdout.split():
        raise InputError(f"{executable} was built without {protocol}; install an ffmpeg that has it")
    return executable


class Relay:
    """A running `ffmpeg` that copies MPEG-TS from a URL to us, or from us to a URL.

    As libav's input or output (`read`, `write`) it raises OSError when the other side is gone, and on POSIX
    systems TimeoutError when nothing came for `patience` seconds. For the first bytes a listener waits
    as long as it takes.
    """

    def __init__(
        self, url: str, *, sending: bool, patience: float | None = None, listening: bool = False
    ) -> None:
        executable = ffmpeg_with(url.partition(":")[0])
        from_us = ["-f", "mpegts", "-i", "pipe:0", "-map", "0", "-c", "copy", "-flush_packets", "1"]
        to_us = ["-i", url, "-map", "0:v", "-map", "0:a?", "-c", "copy", "-flush_packets", "1"]
        arguments = [*from_us, "-f", "mpegts", url] if sending else [*to_us, "-f", "mpegts", "pipe:1"]
        self._patience = None if listening else patience
        self._patience_later = patience
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        self._process = subprocess.Popen(
            [executable, "-nostdin", "-v", "error", *arguments],
            stdin=subprocess.PIPE if sending else subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if sending else subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            start_new_session=True,  # a Ctrl-C in the terminal is for us: we end it when all is written
        )

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes as they come; empty at the end."""
        assert self._process.stdout is not None
        data = read_pipe(self._process.stdout.fileno(), size, self._patience)
        self._patience = self._patience_later
        return data

    def write(self, data: bytes) -> int:
        """Send all of `data`."""
        assert self._process.stdin is not None
        view = memoryview(data)
        while view:
            view = view[self._process.stdin.write(view) :]
        return len(data)

    def why_ended(self) -> str | None:
        """Return the last thing that ffmpeg complained about, or None."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), None)

    def close(self) -> None:
        """End the process: after the last byte if we send, at once if we receive."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        else:
            self._process.terminate()
        try:
            self._process.wait(_TERMINATE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def read_pipe(handle: int, size: int, patience: float | None) -> bytes:
    """Read what is in a pipe, waiting for it at most `patience` seconds (TimeoutError)."""
    if patience is not None and sys.platform != "win32" and not select.select([handle], [], [], patience)[0]:
        raise TimeoutError(f"no data for {patience:g} s")
    return os.read(handle, size)
