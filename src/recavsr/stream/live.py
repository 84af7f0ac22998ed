"""Live: a source that does not wait, through a model, to an output that people watch meanwhile.

Three threads: one receives (and reconnects), the caller's runs the model, one sends (and reconnects). What
lies between them is bounded. The output has one clock, which starts at 0 with the first picture and runs on
across drop-outs; picture and sound of a connection are moved onto it by the same offset, so that they stay
together. A drop-out ends the shot, as a scene cut does.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any, Literal, get_args

import numpy as np

from recavsr.errors import InputError, PartialError
from recavsr.geometry import working_size
from recavsr.stream.color_fix import ColorFix
from recavsr.stream.live_flow import (
    Backoff,
    Connection,
    Gap,
    Inbox,
    Item,
    Ladder,
    Late,
    LatencyHistogram,
    Timeline,
)
from recavsr.stream.load import load
from recavsr.stream.pipeline import Channel, Stopped
from recavsr.stream.plan import SizeRequest
from recavsr.stream.session import Session
from recavsr.stream.step import BlockModel
from recavsr.video.formats import output_sample_aspect
from recavsr.video.info import VideoInfo
from recavsr.video.live_sink import (
    Destination,
    LiveWriter,
    Picture,
    SinkLost,
    SoundPolicy,
    choose_picture,
    resolve_destination,
)
from recavsr.video.live_source import (
    LiveFrame,
    LiveKind,
    LiveReader,
    LiveSource,
    SoundPacket,
    SoundTrack,
    resolve_live,
)

FIRST_BLOCK_LATENTS = 2
"""The default first block of a live shot: 5 frames instead of 21."""

_SENT_BEHIND = 32  # items between the model and the output
_SOUND_EARLY = Fraction(1, 10)  # seconds that sound may begin before the first picture of its connection
_CLOSE_SECONDS = 15.0
_PAUSE_SECONDS = 0.25  # a longer time between two frames counts as so much of a standing connection
_POLL_SECONDS = 0.1
_SILENCE_SECONDS = 1.0


@dataclass(frozen=True)
class LiveEvent:
    """Something to tell the user: its kind, a line of text, and the facts in it."""

    kind: Literal["message", "connected", "dropout", "reconnected", "level", "latency"]
    text: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LiveReport:
    """What a live run did. Latencies are from a frame's arrival until its packet is handed to the output."""

    source: str
    output: str
    model: str
    out_size: tuple[int, int]
    seconds: float
    frames: int  # written
    dropped: int  # because the model was late
    undelivered: int  # because the output was away
    dropouts: int
    latency: LatencyHistogram
    cut_short: str | None
    interrupted: bool

    @property
    def exit_code(self) -> int:
        """Return 0; 1 if the source was lost for good; 130 if the user ended it."""
        return 130 if self.interrupted else int(self.cut_short is not None)


def live(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    model: str | os.PathLike[str] | BlockModel = "nano",
    scale: float | None = None,
    size: tuple[int, int] | str | None = None,
    fit: tuple[int, int] | str | None = None,
    height: int | None = None,
    width: int | None = None,
    late: Late | None = None,
    first_block: int = FIRST_BLOCK_LATENTS,
    sound: SoundPolicy = "copy",
    reconnect: float = 60.0,
    timeout: float = 5.0,
    listen: bool = False,
    input_options: Mapping[str, str] | None = None,
    output_options: Mapping[str, str] | None = None,
    seed: int = 42,
    color_fix: ColorFix = "none",
    cuts: Literal["auto", "off"] = "auto",
    deinterlace: bool = False,
    codec: str | None = None,
    quality: int | str | None = None,
    preset: str | None = None,
    bitrate: int | None = None,
    direct: bool = False,
    overwrite: bool = False,
    device: str = "auto",
    precision: str = "auto",
    memory: int | str | None = None,
    report_every: float = 5.0,
    on_event: Callable[[LiveEvent], None] | None = None,
) -> LiveReport:
    """Upscale a live source until it ends or the user ends it (KeyboardInterrupt: it returns all the same).

    source: a camera ("camera", "/dev/video0", "avfoundation:0", "dshow:NAME"), a URL (rtmp, rtsp, srt, udp,
        tcp, http), "-" (y4m or any container on standard input), or a video file, which plays in real time.
    output: a URL (rtmp, srt, udp, tcp), a .m3u8 playlist, a video file, or "-" (y4m on standard output).
    model, scale, size, fit, height, width, seed, color_fix, deinterlace, codec, quality, preset, direct,
        overwrite, device, precision, memory: as for `upscale`; cuts: "auto" or "off". Sides are even except
        in y4m.
    late: where the model is slower than the source, "drop" frames, let it "wait", or do "lower" work; by
        default pipes and files wait, and frames of cameras and networks, which can't, are dropped.
    first_block: latents of each shot's first block, 1 to 6 (1, 5, 9, 13, 17, 21 frames).
    sound: "copy" where the output can carry it, else encoded; "encode" always; "none".
    reconnect: try to come back to a lost source or output for so many seconds; 0 does not try.
    timeout: so many seconds without data are a drop-out. listen: wait for the source to connect to us.
    input_options, output_options: of libav's demuxer (or device) and muxer.
    bitrate: at most so many bits a second; over a network there is a default by size and rate.
    report_every: seconds between "latency" events; on_event is called for every event, from any thread.

    Raises InputError for what can't be opened, before anything is written; PartialError if the output is
    lost for good. A source that is lost for good gives a report with `cut_short`.
    """
    request = SizeRequest(scale, size, height, width, fit)
    _check(late, sound, first_block, cuts, reconnect, timeout)
    origin = resolve_live(os.fspath(source), listen=listen, options=input_options, patience=timeout)
    late = late or ("drop" if origin.comes_back else "wait")
    destination = resolve_destination(os.fspath(output), options=output_options, overwrite=overwrite)
    destination.check()
    say = _Speaker(on_event)
    block_model: BlockModel
    if isinstance(model, (str, os.PathLike)):
        settings: dict[str, Any] = {"device": device, "precision": precision, "memory": memory}
        tell = partial(say, "message")
        block_model = load(os.fspath(model), first_block_latents=first_block, tell=tell, **settings)
    else:
        block_model = model
    coding = {"codec": codec, "quality": quality, "preset": preset, "bitrate": bitrate}

    def choose(info: VideoInfo) -> Picture:
        out_size = request.resolve(info.size)
        aspect = output_sample_aspect(info, out_size, forced=request.forced)
        return choose_picture(info, destination, out_size, aspect, **coding)  # type: ignore[arg-type]

    def new_session(lr_size: tuple[int, int], out_size: tuple[int, int], level: int) -> Session:
        work = working_size(lr_size, out_size, block_model.native_scale, direct=direct)
        return Session(
            block_model,
            lr_size,
            (work[0] >> level, work[1] >> level) if level else out_size,
            seed=seed,
            color_fix=color_fix,
            detect_cuts=cuts == "auto",
            direct=direct or level > 0,
        )

    stop = threading.Event()
    inbox = Inbox(late, block_model.blocks.frames(1), stop)
    reception = _Reception(origin, inbox, stop, reconnect, deinterlace, say)
    sending = _Sending(destination, sound, reconnect, say)
    run = _Run(inbox, reception, sending, choose, new_session, late, report_every, say)
    return run.run(block_model.name)


def _check(
    late: str | None, sound: str, first_block: int, cuts: str, reconnect: float, timeout: float
) -> None:
    for name, value, known in (
        ("late", late or "drop", get_args(Late)),
        ("sound", sound, get_args(SoundPolicy)),
        ("cuts", cuts, ("auto", "off")),
    ):
        if value not in known:
            raise InputError(f"{name} is one of {', '.join(known)}, not {value}")
    if not 1 <= first_block <= 6:
        raise InputError(f"first block must be 1 to 6 latents, not {first_block}")
    if reconnect < 0 or timeout <= 0:
        raise InputError("reconnect can't be negative, and timeout must be more than 0 seconds")


class _Speaker:
    """Tells events, one at a time."""

    def __init__(self, listener: Callable[[LiveEvent], None] | None) -> None:
        self._listener, self._lock = listener, threading.Lock()

    def __call__(self, kind: Any, text: str, **facts: Any) -> None:
        if self._listener is not None:
            with self._lock:
                self._listener(LiveEvent(kind, text, facts))


class _Reception:
    """The receiving thread: reads the source, connects again when it is lost, and puts all into the inbox."""

    def __init__(
        self,
        source: LiveSource,
        inbox: Inbox,
        stop: threading.Event,
        reconnect: float,
        deinterlace: bool,
        say: _Speaker,
    ) -> None:
        self.source, self.stop = source, stop
        self.dropouts = 0
        self.cut_short: str | None = None
        self._inbox, self._reconnect, self._deinterlace, self._say = inbox, reconnect, deinterlace, say
        patience = math.inf if source.kind is LiveKind.FILE else source.patience
        self._timeline = Timeline(patience, own_clock=source.kind is not LiveKind.PIPE)
        self._held_up = 0.0  # seconds for which we, not the source, were late
        self._away = False
        self._backoff = Backoff(0)
        self._attempts = 0

    def run(self) -> None:
        """Read until the source ends, is lost for good, or `stop` is set."""
        reader: LiveReader | None = self._first_connection()
        while reader is not None:
            with reader:
                self._inbox.put(Connection(reader.info, reader.tracks))
                for item in reader:
                    if self.stop.is_set():
                        return
                    self._take(item, repeats=reader.paced)
            goodbye = reader.why_ended is None and (reader.paced or self._reconnect == 0)
            if goodbye or not self.source.comes_back:
                self.cut_short = reader.why_ended
                break
            reader = self._next_connection(reader.why_ended)
        self._inbox.close()

    def _take(self, item: LiveFrame | SoundPacket, *, repeats: bool) -> None:
        timeline = self._timeline
        if isinstance(item, SoundPacket):
            if timeline.offset is not None and item.time + timeline.offset >= timeline.began - _SOUND_EARLY:
                self._inbox.put(item.moved(timeline.offset))
            return
        if repeats and self._away and timeline.replays(item):
            return
        at = timeline.now
        frame, gap = timeline.place(item, item.arrived - self._held_up)
        if self._away:
            self._away = False
            facts = {"side": "source", "gap_s": round(gap, 2), "attempts": self._attempts}
            self._say("reconnected", f"{self.source.shown} is back after {gap:.1f} s", **facts)
        elif gap:
            self._drop_out(f"no picture for {gap:.1f} s, or a new clock", at)
        began = time.monotonic()
        self._inbox.put(frame)
        self._held_up += time.monotonic() - began

    def _drop_out(self, reason: str, at: float) -> None:
        self.dropouts += 1
        self._inbox.put(Gap())
        facts = {"side": "source", "reason": reason, "at_s": round(at, 2)}
        self._say("dropout", f"drop-out: {self.source.shown}: {reason}", **facts)

    def _first_connection(self) -> LiveReader:
        source = self.source
        if source.listen:
            self._say("message", f"waiting for {source.shown}")
        may_wait = source.kind is LiveKind.NETWORK
        limit = (math.inf if source.listen else self._reconnect) if may_wait else 0.0
        reader = self._connect(Backoff(limit))
        height, width = reader.info.size
        rate = round(float(reader.info.rate), 3)
        sound = [str(track) for track in reader.tracks]
        text = f"{source.shown}: {width}x{height}, {rate:g} fps, {reader.info.codec}"
        facts = {"side": "source", "size": [height, width], "fps": rate, "sound": sound}
        self._say("connected", "; ".join([text, *sound]), **facts)
        for warning in reader.warnings:
            self._say("message", warning)
        return reader

    def _next_connection(self, reason: str | None) -> LiveReader | None:
        if self._away:  # the last connection gave nothing new
            self.stop.wait(self._backoff.next_wait())
        else:
            self._timeline.lose()
            self._away, self._backoff = True, Backoff(self._reconnect)
            self._drop_out(reason or "the source closed the connection", self._timeline.now)
        try:
            if self._backoff.attempts and not self._backoff.left:
                raise InputError("nothing new came")
            return self._connect(self._backoff)
        except InputError:
            self._say("message", f"{self.source.shown} did not come back in {self._reconnect:g} s")
            self.cut_short = reason
            return None

    def _connect(self, backoff: Backoff) -> LiveReader:
        """Try to connect as long as there is time; then raise the last attempt's InputError."""
        told = self._away
        while True:
            if self.stop.is_set():
                raise Stopped
            self._attempts = backoff.attempts + 1
            source = self.source
            if source.listen:  # one attempt is as long as there is time
                left = backoff.left
                source = replace(source, connect_seconds=None if left == math.inf else max(0.1, left))
            try:
                return LiveReader(source, deinterlace=self._deinterlace)
            except InputError as error:
                if not backoff.left:
                    raise
                if not told:
                    self._say("message", f"waiting: {error}")
                    told = True
            self.stop.wait(backoff.next_wait())


class _Sending:
    """The sending thread: writes what the model gives, and opens the output again when it is lost."""

    def __init__(self, destination: Destination, sound: SoundPolicy, reconnect: float, say: _Speaker) -> None:
        self.destination = destination
        self.frames = self.undelivered = self.dropouts = 0
        self.picture: Picture | None = None
        """How the picture is written; set before the first connection comes."""
        self.latency = LatencyHistogram()
        self._recent = LatencyHistogram()
        self._lock = threading.Lock()
        self._sound, self._reconnect, self._say = sound, reconnect, say
        self._tracks: tuple[SoundTrack, ...] = ()
        self._writer: LiveWriter | None = None
        self._opened_at = self._wrote_at = self._retry_at = -math.inf
        self._stood = 0.0  # seconds that the connection has taken frames
        self._ever_confirmed = self._confirmed = False
        self._lost_at: float | None = None
        self._refused: str | None = None
        self._backoff: Backoff | None = None
        self._warned: set[str] = set()

    def take_recent(self) -> LatencyHistogram:
        """Return the latencies since the last call."""
        with self._lock:
            recent, self._recent = self._recent, LatencyHistogram()
            return recent

    def run(self, items: Channel[Item]) -> None:
        """Write until the channel ends; complete the output whatever happened."""
        try:
            for item in items:
                self._take(item)
        finally:
            self._close()

    def _take(self, item: Item) -> None:
        if isinstance(item, Gap):
            return
        try:
            if isinstance(item, Connection):
                self._connection(item)
            elif isinstance(item, SoundPacket):
                if self._writer is not None:
                    self._writer.sound(item)
            else:
                self._write(item)
        except SinkLost as lost:
            self._lost(str(lost))
            self.undelivered += isinstance(item, LiveFrame)
        if self._writer is not None:
            for warning in self._writer.warnings:
                if warning not in self._warned:
                    self._warned.add(warning)
                    self._say("message", warning)

    def _connection(self, connection: Connection) -> None:
        self._tracks = connection.tracks
        if self._writer is not None:
            self._writer.begin_connection(connection.tracks)
        elif not self._ever_confirmed and self._backoff is None:
            self._writer = self._open()

    def _open(self) -> LiveWriter:
        assert self.picture is not None
        self._opened_at = self._wrote_at = time.monotonic()
        self._stood = 0.0
        return LiveWriter(self.destination, self.picture, self._tracks, self._sound)

    def _write(self, frame: LiveFrame) -> None:
        now = time.monotonic()
        if self._writer is None:
            if now < self._retry_at:
                self.undelivered += 1
                return
            self._writer = self._open()
        arrivals = self._writer.write(frame)
        self.frames += 1
        with self._lock:
            for arrived in arrivals:
                self.latency.add(time.monotonic() - arrived)
                self._recent.add(time.monotonic() - arrived)
        # What went wrong comes back with a later frame: a pause, our own too, says nothing.
        self._stood += min(now - self._wrote_at, _PAUSE_SECONDS)
        self._wrote_at = now
        if not self._confirmed and self._stood >= self.destination.confirmed_after:
            self._confirm(now)

    def _confirm(self, now: float) -> None:
        attempts = 1 if self._backoff is None else self._backoff.attempts
        if self._ever_confirmed and self._lost_at is not None:
            gap = self._opened_at - self._lost_at
            facts = {"side": "output", "gap_s": round(gap, 2), "attempts": attempts}
            self._say("reconnected", f"{self.destination.shown} is back after {gap:.1f} s", **facts)
        else:
            assert self.picture is not None
            height, width = self.picture.size
            text = f"writing {width}x{height}, {self.picture.encoding.codec}, to {self.destination.shown}"
            self._say("connected", text, side="output", size=[height, width])
        self._confirmed = self._ever_confirmed = True
        self._lost_at = self._backoff = None

    def _lost(self, reason: str) -> None:
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None
        shown = self.destination.shown
        if self._backoff is None:
            self._backoff, self._lost_at = Backoff(self._reconnect), time.monotonic()
            if self._ever_confirmed:
                self.dropouts += 1
                self._say("dropout", f"drop-out: {shown}: {reason}", side="output", reason=reason)
            elif self._reconnect:
                self._say("message", f"waiting: {shown}: can't be opened ({reason})")
        self._confirmed, self._refused = False, reason
        if not self._backoff.left:
            if self._ever_confirmed:
                raise PartialError(f"{shown}: lost, and not back in {self._reconnect:g} s ({reason})")
            raise InputError(f"{shown}: can't be opened ({reason})")
        self._retry_at = time.monotonic() + self._backoff.next_wait()

    def _close(self) -> None:
        if self._writer is None:
            if self._refused is not None and not self._ever_confirmed:  # the source ended first
                raise InputError(f"{self.destination.shown}: can't be opened ({self._refused})")
            return
        try:
            self._writer.close()
            if not self._confirmed:  # it was short
                self._confirm(time.monotonic())
        except SinkLost as lost:
            if not self._ever_confirmed:
                raise InputError(f"{self.destination.shown}: can't be opened ({lost})") from None
            self._say("message", f"{self.destination.shown}: the last packets did not arrive ({lost})")
        except InputError:
            self._writer.abandon()
            raise


class _Run:
    """The caller's thread: takes what has arrived, runs the model, hands on the result, reports."""

    def __init__(
        self,
        inbox: Inbox,
        reception: _Reception,
        sending: _Sending,
        choose: Callable[[VideoInfo], Picture],
        new_session: Callable[[tuple[int, int], tuple[int, int], int], Session],
        late: Late,
        report_every: float,
        say: _Speaker,
    ) -> None:
        self._inbox, self._reception, self._sending = inbox, reception, sending
        self._choose, self._new_session, self._say = choose, new_session, say
        self._ladder = Ladder() if late == "lower" else None
        self._report_every = report_every
        self._abort = threading.Event()
        self._error: BaseException | None = None
        self._channel: Channel[Item] = Channel(_SENT_BEHIND, self._abort)
        self._waiting: deque[LiveFrame] = deque()  # frames inside the session, without their pixels
        self._arrived: float | None = None  # when the last frame came; None at the start and after a drop-out
        self._interval = 0.0  # seconds between the last two frames
        self._session: Session | None = None
        self._lr_size = (0, 0)
        self._last_needed = math.inf
        self._reported_at = time.monotonic()

    def run(self, model_name: str) -> LiveReport:
        """Run until the source ends or the user interrupts."""
        began = time.monotonic()
        reception, sending, interrupted = self._reception, self._sending, False
        receiver = self._thread("recavsr-receive", self._receive)
        sender = self._thread("recavsr-send", self._send)
        try:
            self._loop()
        except KeyboardInterrupt:
            interrupted = True
        except Stopped:
            pass
        except BaseException as error:
            self._error = self._error or error
        finally:
            self._finish(sender, receiver, _CLOSE_SECONDS if interrupted else math.inf)
        if self._error is not None:
            raise self._error
        picture = sending.picture
        return LiveReport(
            source=reception.source.shown,
            output=sending.destination.shown,
            model=model_name,
            out_size=(0, 0) if picture is None else picture.size,
            seconds=time.monotonic() - began,
            frames=sending.frames,
            dropped=self._inbox.dropped,
            undelivered=sending.undelivered,
            dropouts=reception.dropouts + sending.dropouts,
            latency=sending.latency,
            cut_short=reception.cut_short,
            interrupted=interrupted,
        )

    def _finish(self, sender: threading.Thread, receiver: threading.Thread, limit: float) -> None:
        """Let the output be completed. An interrupt that comes twice at once means the same as one."""
        self._reception.stop.set()
        began, closed = time.monotonic(), False
        deadline = threading.Timer(min(limit, threading.TIMEOUT_MAX), self._abort.set)
        deadline.daemon = True
        deadline.start()
        while sender.is_alive() and time.monotonic() - began < limit:
            try:
                if not closed:
                    self._channel.close()
                    closed = True
                sender.join(_POLL_SECONDS)
            except Stopped:
                closed = True
            except KeyboardInterrupt:
                if time.monotonic() - began > 1:
                    raise
        deadline.cancel()
        receiver.join(_POLL_SECONDS)  # it may hang in a source that sends nothing
        if sender.is_alive():
            self._say("message", f"{self._sending.destination.shown}: not complete, it hangs")

    def _thread(self, name: str, target: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    def _receive(self) -> None:
        try:
            self._reception.run()
        except Stopped:
            pass
        except BaseException as error:
            self._error = self._error or error
            self._inbox.close()

    def _send(self) -> None:
        try:
            self._sending.run(self._channel)
        except Stopped:
            pass
        except BaseException as error:
            self._error = self._error or error
            self._abort.set()

    def _loop(self) -> None:
        while not self._inbox.ended:
            if self._abort.is_set():
                raise Stopped
            item = self._inbox.take()
            if isinstance(item, LiveFrame):
                self._frame(item)
            elif isinstance(item, Connection):
                self._connection(item)
            elif isinstance(item, Gap):
                self._end_shot()
                self._arrived = None
            elif item is not None:
                self._channel.put(item)
            if self._waiting and self._silent():
                self._end_shot()
            self._report()
        self._end_shot()

    def _silent(self) -> bool:
        """Say whether no frame comes for so long that those inside the session are better shown now.

        That ends the shot. A source that is slow, but steady, is not silent.
        """
        if self._arrived is None or self._inbox.frames:
            return False
        return time.monotonic() - self._arrived > max(_SILENCE_SECONDS, 3 * self._interval)

    def _connection(self, connection: Connection) -> None:
        first = self._sending.picture is None
        if first:
            self._sending.picture = self._choose(connection.info)
        if connection.info.size != self._lr_size:
            self._end_shot()
            self._lr_size = connection.info.size
            self._begin_level()
            if first:
                self._warm_up(connection.info)
            else:
                height, width = self._lr_size
                self._say("message", f"the picture is now {width}x{height}")
        self._channel.put(connection)

    def _begin_level(self) -> None:
        """Make the session for the size in hand and the level of work."""
        assert self._sending.picture is not None
        level = 0 if self._ladder is None else self._ladder.level
        if level == len(Ladder.NAMES) - 1:
            self._session = None  # the writer brings every frame to its size
        else:
            self._session = self._new_session(self._lr_size, self._sending.picture.size, level)

    def _warm_up(self, info: VideoInfo) -> None:
        """Run two blocks for nothing: the first are slow, and the pace has to be known."""
        assert self._session is not None
        for _ in range(2):
            black = np.zeros(
                (self._session.frames_wanted, *info.size, 3), np.uint16 if info.deep else np.uint8
            )
            began = time.monotonic()
            self._session.push(black)
            self._set_pace((time.monotonic() - began) / len(black))
        self._begin_level()

    def _frame(self, frame: LiveFrame) -> None:
        self._interval = 0.0 if self._arrived is None else frame.arrived - self._arrived
        self._arrived = frame.arrived
        if self._session is None:
            self._channel.put(frame)
            self._keep_up()
            return
        self._waiting.append(replace(frame, pixels=_NO_PIXELS))
        began = time.monotonic()
        made = self._emit(self._session.push(frame.pixels[None]))
        if made:
            self._set_pace((time.monotonic() - began) / made)
            self._keep_up()

    def _set_pace(self, needed: float) -> None:
        """Take the smaller need of two blocks: one may have been held up by something else."""
        self._inbox.pace, self._last_needed = min(needed, self._last_needed), needed

    def _end_shot(self) -> None:
        if self._session is not None:
            self._emit(self._session.cut())

    def _emit(self, blocks: list[np.ndarray]) -> int:
        """Hand finished blocks on; return the number of frames."""
        for block in blocks:
            for pixels in block:
                self._channel.put(replace(self._waiting.popleft(), pixels=pixels))
        return sum(map(len, blocks))

    def _keep_up(self) -> None:
        ladder = self._ladder
        if ladder is not None and ladder.after_block(self._inbox.backlog, time.monotonic()):
            self._end_shot()
            self._begin_level()
            name = Ladder.NAMES[ladder.level]
            self._say("level", f"now at {name}", level=ladder.level, name=name)

    def _report(self) -> None:
        now = time.monotonic()
        if now - self._reported_at < self._report_every or self._sending.picture is None:
            return
        recent, seconds = self._sending.take_recent(), now - self._reported_at
        self._reported_at = now
        facts = {
            "frames": self._sending.frames,
            "fps": round(recent.count / seconds, 2),
            **recent.facts(),
            "dropped": self._inbox.dropped,
            "undelivered": self._sending.undelivered,
            "waiting": self._inbox.frames,
        }
        text = "{fps} fps, latency p50 {p50_ms:.0f}, p95 {p95_ms:.0f}, max {max_ms:.0f} ms, {dropped} dropped"
        self._say("latency", text.format(**facts), **facts)


_NO_PIXELS = np.empty((0, 0, 3), np.uint8)
