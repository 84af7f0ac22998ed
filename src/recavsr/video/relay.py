"""Protocols that PyAV's libraries lack (SRT): an `ffmpeg` executable carries MPEG-TS to and fro."""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
from typing import IO, cast

from recavsr.errors import InputError
from recavsr.video.source import shown_name

_TERMINATE_SECONDS = 3.0
_LAST_WORDS = 4096  # bytes of what ffmpeg said in perhaps many days


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

    It is libav's input or output (`read`, `write`). As an input it ends when the other side is gone, when
    nothing came for `patience` seconds, and on POSIX systems when nothing at all came in the first
    `connect_seconds` (None, for both: it waits as long as it takes).
    """

    def __init__(
        self,
        url: str,
        *,
        sending: bool,
        patience: float | None = None,
        connect_seconds: float | None = None,
    ) -> None:
        executable = ffmpeg_with(url.partition(":")[0])
        soon = ["-analyzeduration", "500000"]  # ffmpeg looks at a stream for up to 5 s before it goes on
        from_us = [*soon, "-f", "mpegts", "-i", "pipe:0", "-map", "0", "-c", "copy"]
        # ffmpeg itself ends after a silence: stopped from outside it would stay in SRT's own wait of 5 s, and
        # keep the packet whose end it has not seen.
        limit = [] if patience is None else ["-rw_timeout", str(round(patience * 1e6))]
        to_us = [*soon, *limit, "-i", url, "-map", "0:v", "-map", "0:a?", "-c", "copy"]
        arguments = (
            [*from_us, "-flush_packets", "1", "-f", "mpegts", url]
            if sending
            else [*to_us, "-f", "mpegts", "pipe:1"]
        )
        self._url, self._patience, self._connect_seconds = url, patience, connect_seconds
        self._silence: str | None = None
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        self._process = subprocess.Popen(
            [executable, "-nostdin", "-v", "repeat+error", *arguments],
            stdin=subprocess.PIPE if sending else subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if sending else subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            start_new_session=True,  # a Ctrl-C in the terminal is for us: we end it when all is written
        )
        atexit.register(self._process.kill)  # a thread that waits for it ends with us, without closing it

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes as they come; empty at the end."""
        assert self._process.stdout is not None
        if self._connect_seconds is not None and not self._silence and not self._hears(self._connect_seconds):
            self._silence = f"no data for {self._connect_seconds:.3g} s"
        if self._silence:  # libav asks again
            return b""
        self._connect_seconds = None
        return os.read(self._process.stdout.fileno(), size)

    def _hears(self, seconds: float) -> bool:
        """Wait at most so long for something to read; on Windows pipes can't be waited for."""
        if sys.platform == "win32":
            return True
        with selectors.DefaultSelector() as selector:
            selector.register(cast(IO[bytes], self._process.stdout), selectors.EVENT_READ)
            return bool(selector.select(seconds))

    def write(self, data: bytes) -> int:
        """Send all of `data`."""
        assert self._process.stdin is not None
        view = memoryview(data)
        while view:
            view = view[self._process.stdin.write(view) :]
        return len(data)

    def why_ended(self) -> str | None:
        """Return why it ended: silence, or the last thing that ffmpeg complained about, or None."""
        if self._silence is not None:
            return self._silence
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - _LAST_WORDS))
        lines = self._errors.read().decode(errors="replace").splitlines()
        last = next((line.strip() for line in reversed(lines) if line.strip()), None)
        if last is not None and "timed out" in last and self._patience is not None:
            return f"no data for {self._patience:.3g} s"
        return last and last.replace(self._url, shown_name(self._url))

    def close(self) -> None:
        """End the process: after the last byte if we send, at once if we receive.

        Raises OSError if what we sent did not get there.
        """
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
        atexit.unregister(self._process.kill)
        if self._process.stdout is not None:
            self._process.stdout.close()
        elif self._process.returncode:
            raise OSError(self.why_ended() or f"ffmpeg ended with {self._process.returncode}")
