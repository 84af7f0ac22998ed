"""The protocol: crops, degradations, cache, rows; report and contact sheets."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import cv2
import numpy as np
import pytest
from scipy import ndimage

import recavsr
from recavsr.cli.main import run
from recavsr.errors import InputError
from recavsr.evaluation import crops, protocol, report
from recavsr.evaluation.peers import Upscaler, bicubic, open_peer
from recavsr.video.clips import write_clip

SMALL = protocol.Protocol(frames=9, niqe_every=0, still_side=64)
RATE = Fraction(25)


def scene(count: int = 12, height: int = 76, width: int = 134) -> np.ndarray:
    """A smooth grey texture that slides one pixel a frame, uint8: codecs halve chroma, not luma."""
    noise = np.random.default_rng(7).normal(size=(height, width + count, 1))
    noise = ndimage.gaussian_filter(noise, (2, 2, 0))
    wide = np.rint(np.clip(128 + 45 * noise / noise.std(), 0, 255)).astype(np.uint8)
    return np.stack([wide[:, t : t + width].repeat(3, axis=-1) for t in range(count)])


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("clips") / "scene.mp4"
    write_clip(path, scene(), RATE)
    return path


@pytest.mark.parametrize(
    ("size", "setting", "box"),
    [
        ((720, 1280), protocol.FULL, (8, 0, 704, 1280)),
        ((704, 1230), protocol.FULL, (0, 7, 704, 1216)),
        ((540, 960), protocol.FULL, (14, 0, 512, 960)),
        ((2160, 3840), protocol.FULL, (728, 1280, 704, 1280)),
        ((1280, 720), protocol.FULL, (0, 8, 1280, 704)),
        ((540, 960), protocol.QUICK, (110, 320, 320, 320)),
    ],
)
def test_crop_box(size, setting, box):
    assert protocol.crop_box(*size, setting) == box


def test_clips_smaller_than_a_token_are_refused():
    with pytest.raises(InputError, match="smaller than 32"):
        protocol.crop_box(20, 400, protocol.FULL)


def test_truth_is_the_centre_of_the_first_frames(clip):
    truth, rate = protocol.read_truth(clip, SMALL)
    assert truth.shape == (9, 64, 128, 3)
    assert rate == RATE
    expected = scene()[:9, 6:70, 3:131].astype(int)
    assert np.abs(truth - expected).mean() < 3  # what H.264 changed
    with pytest.raises(InputError, match="has 12 frames"):
        protocol.read_truth(clip, replace(SMALL, frames=13))


def test_what_comes_after_the_first_block_is_measured_by_itself():
    truth = np.repeat(scene(1, 32, 32), 25, axis=0)
    output = truth.copy()
    output[:20] += 3  # frame 20, the first block's last, is right: no step where the second begins
    pair = protocol.Pair("a", "mild", truth, truth[:, ::4, ::4])
    early = protocol.measure(output, pair, SMALL, None) | protocol.measure_still(output)
    assert early["psnr"] < 50 < early["later_psnr"] == pytest.approx(80)
    assert early["later_td"] == early["later_flicker"] == early["later_still_flicker"] == 0 < early["td"]
    output = truth.copy()
    output[21:] += 2
    late = protocol.measure(output, pair, SMALL, None)
    assert late["later_psnr"] == pytest.approx(20 * np.log10(255 / 2), abs=0.01)
    assert late["later_td"] == late["later_flicker"] == pytest.approx(2 / 4)
    short = protocol.measure(output[:9], replace(pair, truth=truth[:9]), SMALL, None)
    assert short["later_psnr"] is short["later_td"] is short["later_flicker"] is None


def test_mild_is_blur_area_noise_and_jpeg():
    truth = scene(3, 64, 96)
    settings = replace(protocol.DEGRADATIONS["mild"], noise=0.0, jpeg=100)
    blurred = ndimage.gaussian_filter(truth.astype(float), (0, 0.8, 0.8, 0), mode="mirror")
    expected = blurred.reshape(3, 16, 4, 24, 4, 3).mean((2, 4))
    assert np.abs(protocol.degrade(truth, settings, RATE, 0) - expected).mean() < 1.5


def test_heavy_takes_the_two_pixels_in_the_middle():
    truth = scene(1, 64, 96)
    settings = replace(protocol.DEGRADATIONS["heavy"], noise=0.0, jpeg=100, crf=None)
    blurred = ndimage.gaussian_filter(truth.astype(float), (0, 1.8, 1.8, 0), mode="mirror")
    middle = blurred.reshape(1, 16, 4, 24, 4, 3)[:, :, 1:3, :, 1:3]
    assert np.abs(protocol.degrade(truth, settings, RATE, 0) - middle.mean((2, 4))).mean() < 1.5


def test_noise_has_the_stated_strength_and_seed():
    truth = np.full((4, 256, 256, 3), 120, np.uint8)
    settings = replace(protocol.DEGRADATIONS["heavy"], jpeg=100, crf=None)
    lr_frames = protocol.degrade(truth, settings, RATE, 0)
    # JPEG keeps luma noise; chroma is subsampled. Luma of independent RGB noise: 7 x 0.668.
    luma = lr_frames.astype(float) @ [0.299, 0.587, 0.114]
    assert luma.std() == pytest.approx(7 * np.sqrt(0.299**2 + 0.587**2 + 0.114**2), rel=0.05)
    assert luma.mean() == pytest.approx(120, abs=0.3)
    assert (protocol.degrade(truth, settings, RATE, 0) == lr_frames).all()
    assert (protocol.degrade(truth, settings, RATE, 1) != lr_frames).any()


def test_codec_works_at_the_clips_rate():
    """x264 spends more bits on frames that last longer, so the rate must reach it."""
    truth = scene(8, 128, 128)
    heavy = protocol.DEGRADATIONS["heavy"]
    before = protocol.degrade(truth, replace(heavy, crf=None), RATE, 0).astype(int)
    twice = [protocol.degrade(truth, heavy, RATE, 0) for _ in range(2)]
    assert (twice[0] == twice[1]).all()
    errors = [np.abs(protocol.degrade(truth, heavy, Fraction(r), 0) - before).mean() for r in (10, 60)]
    assert 0.5 < errors[0] < errors[1]


def test_lr_frames_come_from_the_cache(clip, tmp_path):
    first = protocol.make_pair(clip, protocol.DEGRADATIONS["mild"], SMALL, tmp_path)
    (file,) = tmp_path.glob("lr_*.npy")
    np.save(file, first.lr_frames + 1)
    again = protocol.make_pair(clip, protocol.DEGRADATIONS["mild"], SMALL, tmp_path)
    assert (again.lr_frames == first.lr_frames + 1).all()
    protocol.make_pair(clip, protocol.DEGRADATIONS["mild"], replace(SMALL, seed=1), tmp_path)
    protocol.make_pair(clip, protocol.DEGRADATIONS["heavy"], SMALL, tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_rows_of_a_perfect_and_a_pulsing_upscaler(clip):
    settings = replace(SMALL, frames=12)
    truth, _ = protocol.read_truth(clip, settings)
    still = protocol.make_still(clip, protocol.DEGRADATIONS["mild"], settings)

    runs, lengths = [], []

    def right(lr_frames):
        return truth if lr_frames.shape[1:3] == (16, 32) else still.truth[: len(lr_frames)]

    def oracle(lr_frames):
        runs.append(len(lr_frames))
        return right(lr_frames)

    def pulsing(lr_frames):
        lengths.append(len(lr_frames))
        output = right(lr_frames).astype(int)
        pulse = (np.arange(len(output)) + 3) // 4 % 2  # changes where a latent ends: 0 | 1 1 1 1 | 0 0 0 0
        wobble = np.arange(len(output)) % 2
        return np.clip(output + (4 * pulse + wobble).reshape(-1, 1, 1, 1), 0, 255).astype(np.uint8)

    rows = protocol.evaluate(
        [Upscaler("oracle", oracle, True), Upscaler("pulse", pulsing, False)], [clip], settings, ["mild"]
    )
    assert [row["model"] for row in rows] == ["oracle", "pulse"]
    perfect, pulse = rows
    assert perfect["psnr"] == pytest.approx(80)
    assert perfect["ssim"] == perfect["ssim_rgb"] == pytest.approx(1)
    assert perfect["td"] == perfect["still_flicker"] == 0
    assert perfect["still_latent_border"] is None
    assert perfect["lpips"] is None
    assert (perfect["frames"], perfect["height"], perfect["width"]) == (12, 64, 128)
    assert pulse["still_latent_border"] > 1
    assert pulse["td_latent_border"] > 1
    assert pulse["still_block_border"] is None  # twelve frames have no second block
    assert pulse["still_latent_line"] is None  # nor has the border at frame 8 a whole latent behind it
    assert lengths == [12, 12, 11, 10, 9]  # the clip, then the still scene in every phase of the codec
    assert runs == [12, 12]  # frame by frame a later start gives the same frames
    json.dumps(rows, allow_nan=False)


def test_lines_of_the_input_are_not_taken_for_a_models():
    """What pulses with the codec's groups of frames has no line in the mean over their phases."""
    still = np.full((45, 8, 8, 3), 100)

    def with_pulse(at: int) -> np.ndarray:
        jumps = np.where(np.arange(44) % 4 == at, 12, 6) * (1 - 2 * (np.arange(44) % 2))
        return still + np.concatenate([[0], np.cumsum(jumps)]).reshape(-1, 1, 1, 1)

    of_input = [with_pulse(0)[n:] for n in range(protocol.CODEC_GROUP)]  # the first frames are left away
    of_model = [with_pulse(0) for _ in range(protocol.CODEC_GROUP)]
    assert protocol.measure_still(of_input[0])["still_latent_line"] == pytest.approx(1.0)
    assert protocol.measure_still(*of_input)["still_latent_line"] == pytest.approx(0.0625)  # 1, -1/4 thrice
    assert protocol.measure_still(*of_model)["still_latent_line"] == pytest.approx(1.0)
    assert protocol.measure_still(*of_model)["still_block_line"] == pytest.approx(1.0)


def test_two_models_of_one_name_are_refused():
    same = protocol.Upscaler("S", lambda frames: frames, per_frame=True)
    with pytest.raises(InputError, match="two models are called S"):
        protocol.evaluate([same, replace(same)], [], SMALL)


def test_outputs_of_another_shape_are_refused(clip):
    pair = protocol.make_pair(clip, protocol.DEGRADATIONS["mild"], SMALL)
    with pytest.raises(ValueError, match="the model gave"):
        protocol.measure(pair.lr_frames, pair, SMALL, None)


def test_a_model_runs_through_its_session(clip):
    pair = protocol.make_pair(clip, protocol.DEGRADATIONS["mild"], SMALL)
    upscaler = protocol.session_upscaler(recavsr.load("identity", device="cpu"), "identity")
    row = protocol.measure(upscaler.run(pair.lr_frames), pair, SMALL, None)
    reference = protocol.measure(bicubic(pair.lr_frames), pair, SMALL, None)
    assert row["psnr"] == pytest.approx(reference["psnr"], abs=1.5)


def test_command_line(clip, tmp_path, monkeypatch, capsys):
    command = ["evaluate", "--model", "bicubic", "--data", str(tmp_path), "-o", str(tmp_path / "r.json")]
    assert run(command) == 2
    assert "recavsr: held-out clips missing" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())

    folder = tmp_path / "test_video"
    folder.mkdir()
    write_clip(folder / "scene.mp4", scene(29, 64, 64), RATE)
    monkeypatch.setattr(protocol, "HELD_OUT", ("scene",))
    output = tmp_path / "new" / "r.json"
    words = ["--model", "bicubic", "--data", str(tmp_path), "-o", str(output), "--cache", str(tmp_path / "c")]
    assert protocol.main([*words, "--quick", "--no-lpips"]) == 0
    result = json.loads(output.read_text())
    assert [(row["degradation"], row["clip"]) for row in result["rows"]] == [
        ("mild", "scene"),
        ("heavy", "scene"),
    ]
    assert result["protocol"]["frames"] == 29
    assert str(tmp_path) not in output.read_text()  # results are published: no folders of the machine

    for more in (["--degradation", "wild"], ["--clips", "other"]):
        with pytest.raises(InputError, match=more[1] if more[1] == "wild" else "must name some of scene"):
            protocol.main([*words, *more])
    assert json.loads(output.read_text()) == result  # what was there stays

    # Refused before anything is measured.
    monkeypatch.setattr(protocol, "evaluate", lambda *_, **__: pytest.fail("it measured"))
    for place, said in ((tmp_path, "is a folder"), (output / "r.json", "can't be written")):
        with pytest.raises(InputError, match=said):
            protocol.main([*words[:4], "-o", str(place), "--quick", "--no-lpips"])

    assert report.main([str(output), "--clips"]) == 0
    printed = capsys.readouterr().out
    assert "### heavy" in printed
    assert "#### scene, mild" in printed
    (tmp_path / "r.json").write_text("[]")
    with pytest.raises(InputError, match="no result file"):
        report.main([str(tmp_path / "r.json")])


def test_held_out_clips_are_all_there(shared):
    clips = protocol.held_out_clips(shared / "data")
    assert [clip.stem for clip in clips] == list(protocol.HELD_OUT)
    truth, rate = protocol.read_truth(clips[0], replace(protocol.FULL, frames=2))
    assert truth.shape == (2, 704, 1280, 3)
    assert rate == 24


# Report -------------------------------------------------------------------------------------------------


def row(model: str, clip: str, degradation: str = "mild", **values) -> dict:
    base = {"model": model, "degradation": degradation, "clip": clip, "frames": 45, "height": 10, "width": 10}
    return base | values


ROWS = [
    row(
        "bicubic",
        "a",
        psnr=20.0,
        lpips=0.4,
        flicker=2.0,
        static_share=0.75,
        still_flicker=1.0,
        still_latent_line=0.4,
    ),
    row("bicubic", "b", psnr=30.0, lpips=0.6, flicker=4.0, static_share=0.25, still_flicker=1.0),
    row(
        "ours",
        "a",
        psnr=21.0,
        lpips=0.3,
        flicker=1.0,
        static_share=0.75,
        still_flicker=2.0,
        still_latent_line=0.54,
    ),
    row("ours", "b", psnr=31.0, lpips=0.3, flicker=None, static_share=0.0, still_flicker=4.0),
]


def test_summary_by_hand():
    plain, ours = report.summarise(ROWS)
    assert plain["psnr"] == 25
    assert plain["flicker"] == pytest.approx(2.5)  # weighted by static pixels
    assert plain["psnr_gain"] == 0
    assert plain["lpips_share"] == 1
    assert ours["psnr_gain"] == pytest.approx(1)
    assert ours["lpips_share"] == pytest.approx(0.6)
    assert ours["flicker_ratio"] == pytest.approx(1 / 2.5)
    assert ours["still_ratio"] == pytest.approx(3)
    assert ours["still_latent_line"] == pytest.approx(0.54)  # of the clips that have it
    assert ours["td_share"] is None
    assert report.summarise(ROWS[2:])[0]["psnr_gain"] is None  # no baseline, no comparison


def test_rendered_table():
    text = report.render(ROWS)
    assert "| ours | 26.00 (+1.00) | - | 0.300 (0.60) |" in text
    assert " | +54.0% | - |" in text
    assert report.NOTE in text


def test_files_of_one_protocol_are_joined_and_others_refused(tmp_path):
    def write(name, rows, frames=45):
        path = tmp_path / name
        path.write_text(json.dumps({"protocol": {"frames": frames}, "rows": rows}))
        return path

    newer = [row("ours", "a", psnr=22.0)]
    joined = report.load_rows([write("a.json", ROWS), write("b.json", newer)])
    assert len(joined) == 4
    assert [r["psnr"] for r in joined if (r["model"], r["clip"]) == ("ours", "a")] == [22.0]
    with pytest.raises(InputError, match="another protocol"):
        report.load_rows([write("a.json", ROWS), write("c.json", newer, frames=29)])


# Contact sheets -----------------------------------------------------------------------------------------


def test_crops_line_up(clip):
    pair = protocol.make_pair(clip, protocol.DEGRADATIONS["mild"], SMALL)
    request = crops.CropRequest.parse("scene:mild:3:16,8,24,20")
    late = Upscaler("late", lambda lr: bicubic(lr)[::-1], per_frame=False)
    cells = crops.crops(request, pair, [open_peer("bicubic"), late])
    assert [label for label, _ in cells] == ["input", "bicubic", "late", "truth"]
    assert all(image.shape == (20, 24, 3) for _, image in cells)
    images = dict(cells)
    assert (images["truth"] == pair.truth[3, 8:28, 16:40]).all()
    assert (images["bicubic"] == bicubic(pair.lr_frames)[3, 8:28, 16:40]).all()
    assert (images["late"] == bicubic(pair.lr_frames)[5, 8:28, 16:40]).all()  # frame 3 of the whole clip
    assert (images["input"][0, 0] == pair.lr_frames[3, 2, 4]).all()


def test_contact_sheet_is_written_as_it_was_laid_out(tmp_path):
    red = np.zeros((10, 12, 3), np.uint8)
    red[..., 0] = 200
    sheet = crops.contact_sheet([[("one", red), ("two", red)], [("three", red)]], zoom=2)
    strip = crops.LABEL_HEIGHT + 20 + crops.GAP
    assert sheet.shape == (2 * strip, 2 * 24 + crops.GAP, 3)
    assert (sheet[crops.LABEL_HEIGHT : strip - crops.GAP, :24] == red[0, 0]).all()
    assert (sheet[: crops.LABEL_HEIGHT, :24] < 100).any()  # the label
    crops.save_png(sheet, tmp_path / "sheet.png")
    assert (cv2.imread(str(tmp_path / "sheet.png"))[..., ::-1] == sheet).all()


@pytest.mark.parametrize(
    "text", ["scene:mild:3", "scene:wild:3:0,0,8,8", "scene:mild:x:0,0,8,8", "scene:mild:3:0,0,8"]
)
def test_bad_crop_requests_are_refused(text):
    with pytest.raises(InputError):
        crops.CropRequest.parse(text)


@pytest.mark.parametrize("region", ["-1,0,8,8", "0,0,0,8", "120,0,16,8"])
def test_regions_must_lie_inside(clip, region):
    pair = protocol.make_pair(clip, protocol.DEGRADATIONS["mild"], SMALL)
    with pytest.raises(InputError, match="leaves 128x64"):
        crops.crops(crops.CropRequest.parse(f"scene:mild:3:{region}"), pair, [])
