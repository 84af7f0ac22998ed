"""Batches over a real Ray cluster: whoever makes the files, whoever is lost meanwhile, they are the same."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recavsr import __version__
from recavsr.cli.main import run
from recavsr.errors import InputError
from recavsr.stream.batch import FileStatus, upscale_many
from recavsr.stream.resume import work_folder
from recavsr.video.clips import write_clip

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'recavsr[cluster]'")

from recavsr.cluster.batch import Shared, run_batch  # noqa: E402
from recavsr.cluster.connection import Room, check_answers, connected, room_of  # noqa: E402
from recavsr.cluster.dispatch import Retried, Started  # noqa: E402
from recavsr.cluster.tasks import JoinShots, SomeShots, WholeFile  # noqa: E402
from recavsr.cluster.worker import Setup, Worker  # noqa: E402

SETTINGS: dict[str, Any] = {"model": "identity", "scale": 2, "device": "cpu", "preset": "ultrafast"}
SHOTS = (0, 110, 140, 300, 420, 500)
FRAMES = 640


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Start one cluster for all tests here: three workers fit into it, whatever this machine has."""
    with connected(None, workers=3, threads=1):
        yield


def clip(frames: int, starts: tuple[int, ...], seed: int) -> np.ndarray:
    """Return frames [N, 32, 48, 3] in shots that begin at `starts`."""
    rng = np.random.default_rng(seed)
    pictures = np.empty((frames, 32, 48, 3), np.uint8)
    for first, last in zip(starts, (*starts[1:], frames)):
        pictures[first:last] = np.kron(rng.integers(0, 256, (16, 24, 3)), np.ones((2, 2, 1)))
        for index in range(first, last):
            pictures[index, 8:16, index % 40 : index % 40 + 8] = 255
    return pictures


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a long film, three short ones, and a file that is none."""
    folder = tmp_path_factory.mktemp("films") / "in"
    folder.mkdir()
    write_clip(folder / "long.mp4", clip(FRAMES, SHOTS, 1), 25)
    for number, name in enumerate(("a [1].mp4", "-b 100%.mp4", "ç.mp4")):
        write_clip(folder / name, clip(40, (0,), number), 25)
    (folder / "bad.mkv").write_text("words")
    return folder


@pytest.fixture(scope="module")
def whole(films: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what one process makes of the folder."""
    out = tmp_path_factory.mktemp("whole")
    upscale_many(films, out, **SETTINGS)
    return out


def same_files(one: Path, other: Path) -> bool:
    """Say whether two folders hold the same files, hidden ones included, byte for byte."""
    files = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in (one, other)]
    return files[0] == files[1]


@dataclass
class Killer:
    """Notes what a batch says, and kills the workers of the tasks that `wanted` names, in their middle."""

    wanted: Any
    limit: int
    notes: list[Any] = field(default_factory=list)
    kills: int = 0

    def __call__(self, note: Any) -> None:
        self.notes.append(note)
        if isinstance(note, Started) and self.kills < self.limit and self.wanted(note.task):
            folder, deadline = work_folder(Path(note.task.job.output)), time.monotonic() + 60
            while not list(folder.glob("output" if isinstance(note.task, WholeFile) else ".recavsr-*.part")):
                assert time.monotonic() < deadline
                time.sleep(0.001)
            os.kill(note.place.pid, signal.SIGKILL)
            self.kills += 1

    def of(self, kind: type) -> list[Any]:
        return [note for note in self.notes if isinstance(note, kind)]


@pytest.mark.cluster
def test_a_lost_worker_changes_nothing(cluster: None, films: Path, whole: Path, tmp_path: Path) -> None:
    killer = Killer(lambda task: isinstance(task, SomeShots) and task.number == 1, limit=1)
    out = tmp_path / "out"
    report = run_batch(films, out, workers=3, threads=1, least_frames=120, on_note=killer, **SETTINGS)
    assert {Path(r.source).name: r.status for r in report.files} == {
        "-b 100%.mp4": FileStatus.DONE,
        "a [1].mp4": FileStatus.DONE,
        "long.mp4": FileStatus.DONE,
        "bad.mkv": FileStatus.FAILED,
        "ç.mp4": FileStatus.DONE,
    }
    assert report.exit_code == 1
    assert same_files(out, whole)
    (shared,) = killer.of(Shared)
    assert shared.shots.starts == SHOTS
    assert len(shared.shots.runs) == 4
    assert killer.kills == 1
    (retried,) = killer.of(Retried)
    assert (retried.task.number, retried.attempt) == (1, 2)
    pids = {note.place.pid for note in killer.of(Started)}
    assert len(pids) >= 3
    assert sum(isinstance(note.task, JoinShots) for note in killer.of(Started)) == 1


@pytest.mark.cluster
def test_a_file_that_costs_every_worker_is_left_out(
    cluster: None, films: Path, whole: Path, tmp_path: Path
) -> None:
    killer = Killer(lambda task: task.job.source.endswith("long.mp4"), limit=3)
    inputs = [films / "long.mp4", films / "ç.mp4"]
    report = run_batch(inputs, tmp_path / "out", workers=1, threads=1, on_note=killer, **SETTINGS)
    assert [r.status for r in report.files] == [FileStatus.FAILED, FileStatus.DONE]
    assert report.files[0].reason == f"{inputs[0]}: 3 workers were lost at it, one after the other"
    assert [note.attempt for note in killer.of(Retried)] == [2, 3]
    assert not (tmp_path / "out" / "long.mp4").exists()
    assert (tmp_path / "out" / "ç.mp4").read_bytes() == (whole / "ç.mp4").read_bytes()


@pytest.mark.cluster
def test_an_interrupted_batch_is_continued(cluster: None, films: Path, whole: Path, tmp_path: Path) -> None:
    out, options = tmp_path / "out", {"workers": 2, "threads": 1, "least_frames": 120, **SETTINGS}

    def interrupt(note: Any) -> None:
        if isinstance(note, Started) and isinstance(note.task, SomeShots) and note.task.number == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_batch(films, out, on_note=interrupt, **options)
    assert not (out / "long.mp4").exists()
    assert [path.name for path in out.iterdir() if path.suffix == ".part"] == []
    made = {path: path.stat().st_mtime_ns for path in work_folder(out / "long.mp4").glob("shots-*[0-9]")}
    assert made
    seen: dict[Path, int] = {}

    def look(note: Any) -> None:
        if isinstance(note, Started) and isinstance(note.task, JoinShots):
            seen.update({path: path.stat().st_mtime_ns for path in made})

    report = run_batch(films, out, resume=True, on_note=look, **options)
    assert report.count(FileStatus.FAILED) == 1
    assert seen == made
    assert same_files(out, whole)


@pytest.mark.cluster
def test_the_command_says_what_happens(
    cluster: None, films: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = str(tmp_path / "out")
    arguments = ["batch", f"{films}/*.mp4", str(films / "a [1].mp4"), "-o", out, "--model", "identity"]
    arguments += [
        "--scale",
        "2",
        "--device",
        "cpu",
        "--preset",
        "ultrafast",
        "--workers",
        "2",
        "--threads",
        "1",
    ]
    assert run([*arguments, "--json"]) == 0
    said, err = capsys.readouterr()
    assert said == ""
    events = [json.loads(line) for line in err.splitlines()]
    ends = {Path(e["source"]).name for e in events if e["event"] == "file" and e["status"] == "done"}
    assert ends == {"long.mp4", "a [1].mp4", "-b 100%.mp4", "ç.mp4"}
    counts = [(e["frames"], e["total"]) for e in events if e["event"] == "progress"]
    assert counts[-1][0] == counts[-1][1]
    assert events[-1] == {
        "event": "result", "output": out, "done": 4, "partial": 0, "skipped": 0, "failed": 0
    }  # fmt: skip
    assert same_files(tmp_path / "out", whole)
    assert run(arguments) == 0
    assert "skipped: " in capsys.readouterr().err
    assert run([*arguments, "--overwrite", "--workers", "50"]) == 2
    assert "room for 3 workers of 1 threads, not for 50" in capsys.readouterr().err
    assert run([*arguments, "--overwrite", "--model", "nowhere", "--workers", "1"]) == 2
    assert "model 'nowhere' is unknown" in capsys.readouterr().err


# -- without a cluster ---------------------------------------------------------------------------------


def test_an_address_where_nothing_listens_is_refused_at_once() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        for written in (address, f"ray://{address}"):
            with pytest.raises(InputError, match=f"no cluster answers at {written}"):
                check_answers(written)
        free.listen()
        check_answers(address)
        check_answers("auto")


def test_without_ray_one_line_says_what_to_install(
    films: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run(["batch", str(films), "-o", str(tmp_path / "out"), "--model", "identity"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("pip install 'recavsr[cluster]'")


def setup(tmp_path: Path, **changes: Any) -> Setup:
    seal = tmp_path / "seal"
    seal.touch()
    settings = {
        "version": __version__,
        "folder": str(tmp_path),
        "sources": (),
        "seal": str(seal),
        "threads": 1,
    }
    model = {"model": "identity", "device": "cpu", "precision": "auto", "memory": None}
    return Setup(**{**settings, **model, **changes})


def test_what_the_caller_prints_meanwhile_is_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """What Ray's threads print is not."""
    running = SimpleNamespace(is_initialized=lambda: True)
    monkeypatch.setattr("recavsr.cluster.connection.ray_module", lambda: running)
    with connected(None, None, None):
        print("a file is done")
        others = threading.Thread(target=print, args=("a worker died",))
        others.start()
        others.join()
    assert capsys.readouterr().out == "a file is done\n"


def test_a_machine_that_sees_other_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Worker(setup(tmp_path)).prepare().pid == os.getpid()
    for changes, reason in (
        ({"sources": ("/elsewhere/a.mp4",)}, "does not see /elsewhere/a.mp4: inputs and outputs must lie on"),
        ({"seal": "/elsewhere/out/seal"}, "does not see /elsewhere/out: inputs and outputs must lie on"),
        ({"version": "0.0.1"}, f"has recavsr {__version__}, this machine 0.0.1"),
        ({"model": "nowhere"}, "model 'nowhere' is unknown"),
    ):
        with pytest.raises(InputError, match=reason):
            Worker(setup(tmp_path, **changes)).prepare()


def nodes(*resources: dict[str, float]) -> Any:
    return SimpleNamespace(nodes=lambda: [{"Alive": True, "Resources": r} for r in resources])


@pytest.mark.parametrize(
    ("cluster_nodes", "device", "workers", "threads", "expected"),
    [
        ([{"CPU": 16}], "auto", None, None, Room(4, 4, False)),
        ([{"CPU": 16}, {"CPU": 6}], "auto", None, None, Room(5, 4, False)),
        ([{"CPU": 2}], "auto", None, None, Room(1, 2, False)),
        ([{"CPU": 3}], "cpu", 3, None, Room(3, 1, False)),
        ([{"CPU": 16}], "cpu", 2, None, Room(2, 4, False)),
        ([{"CPU": 16}], "cpu", None, 1, Room(16, 1, False)),
        ([{"CPU": 64, "GPU": 8}, {"CPU": 32}], "auto", None, None, Room(8, 8, True)),
        ([{"CPU": 8, "GPU": 4}], "cuda", 2, None, Room(2, 2, True)),
        ([{"CPU": 8, "GPU": 4}], "cpu", None, None, Room(2, 4, False)),
    ],
)
def test_workers_get_a_gpu_each_or_some_cores(
    cluster_nodes: list[dict[str, float]], device: str, workers: int, threads: int, expected: Room
) -> None:
    assert room_of(nodes(*cluster_nodes), device, workers, threads) == expected


@pytest.mark.parametrize(("device", "workers"), [("cuda", None), ("cuda:0", None), ("cpu", 9)])
def test_what_the_cluster_has_not_is_refused(device: str, workers: int | None) -> None:
    with pytest.raises(InputError):
        room_of(nodes({"CPU": 8}), device, workers, None)
