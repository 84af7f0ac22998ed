"""Degradation: agreement with OpenCV and libjpeg, ranges of the draws, records, alignment."""

from __future__ import annotations

import dataclasses
import itertools
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from recavsr.data import degradation as D
from recavsr.errors import InputError
from recavsr.evaluation import protocol
from recavsr.video.memory_codec import code_clip

cv2 = pytest.importorskip("cv2")


def scene(frames: int = 5, size: int = 96, grey: bool = False) -> Tensor:
    """A moving picture with edges, texture and colour: [T, 3, S, S] in [0, 1]."""
    y, x = torch.meshgrid(torch.arange(size) / 96, torch.arange(size) / 96, indexing="ij")
    clip = []
    for t in range(frames):
        s = x + 0.01 * t
        waves = torch.stack([torch.sin(9 * s + 4 * y), torch.sin(5 * s * y + 1), torch.cos(7 * y - 3 * s)])
        texture = 0.25 * torch.sin(60 * s) * torch.sin(47 * y) * (y > 0.5)
        disc = ((s - 0.5) ** 2 + (y - 0.4) ** 2 < 0.04).float()
        clip.append(
            (0.5 + 0.2 * waves + texture) * (1 - disc) + disc * torch.tensor([0.9, 0.3, 0.1])[:, None, None]
        )
    result = torch.stack(clip).clamp(0, 1)
    return result.mean(1, keepdim=True).repeat(1, 3, 1, 1) if grey else result


def as_image(frame: Tensor) -> np.ndarray:
    return (frame * 255).permute(1, 2, 0).contiguous().numpy()


def still(value: float, frames: int = 1) -> tuple[float, ...]:
    return (value,) * frames


# ---------------------------------------------------------------- against other implementations


@pytest.mark.parametrize("target", [24, 40, 96, 128])
@pytest.mark.parametrize(("name", "code"), [("bilinear", "LINEAR"), ("bicubic", "CUBIC"), ("area", "AREA")])
def test_resize_is_opencvs(name: str, code: str, target: int) -> None:
    frame = scene(1)
    ours = D._resample(frame, None, D.Resize(name, still(target / 96)), (0, 0))[0]
    theirs = cv2.resize(as_image(frame[0]), (target, target), interpolation=getattr(cv2, f"INTER_{code}"))
    assert np.abs(as_image(ours) - theirs).max() < 1e-3


@pytest.mark.parametrize("kernel", D.KERNELS)
@pytest.mark.parametrize("target", [96, 24, 120])
def test_blur_and_resize_is_the_exact_convolution_then_the_resize(kernel: str, target: int) -> None:
    frames = 2
    blur = D._draw_blur(np.random.default_rng(3), frames, D._Range(0.2, 3, 0.4), kinds=[kernel])
    clip = scene(frames)
    ours = D._blur_resize(clip, blur, range(frames), (target, target), "bicubic")
    kernels = torch.from_numpy(D.blur_kernels(blur)).float()
    padded = F.pad(clip, (blur.size // 2,) * 4, mode="reflect")
    blurred = torch.cat(
        [F.conv2d(p[:, None], k[None, None]).transpose(0, 1) for p, k in zip(padded, kernels)]
    )
    theirs = np.stack(
        [cv2.resize(as_image(f), (target, target), interpolation=cv2.INTER_CUBIC) for f in blurred]
    )
    # Half a grey level is allowed to the blur; the cubic's negative lobes can amplify that.
    assert np.abs(np.stack([as_image(f) for f in ours]) - theirs).max() < 1.0


@pytest.mark.parametrize("quality", [30, 55, 75, 95])
def test_jpeg_agrees_with_libjpeg(quality: int) -> None:
    for grey, mean_limit in ((True, 0.25), (False, 0.8)):
        frame = (scene(1, grey=grey) * 255).round() / 255
        image = as_image(frame[0]).round().astype(np.uint8)
        coded = cv2.imencode(".jpg", image[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, quality])[1]
        theirs = cv2.imdecode(coded, cv2.IMREAD_COLOR)[..., ::-1].astype(np.float32)
        ours = as_image(D.jpeg_compress(frame, [quality])[0])
        damage = np.abs(theirs - image).mean()
        assert np.abs(ours - theirs).mean() < mean_limit
        assert abs(np.abs(ours - image).mean() / damage - 1) < 0.15


def test_jpeg_takes_a_quality_a_frame_and_odd_sizes() -> None:
    clip = scene(2)[..., :51, :37].contiguous()
    clip[1] = clip[0]
    coded = D.jpeg_compress(clip, [95, 30])
    assert coded.shape == clip.shape
    error = (coded - clip).abs().mean((1, 2, 3))
    assert error[1] > 2 * error[0]
    torch.testing.assert_close(coded[1:], D.jpeg_compress(clip[1:], [30]), rtol=0, atol=0)


# ---------------------------------------------------------------- noise, codec, sharpening


@pytest.mark.parametrize("grey", [False, True])
def test_gaussian_noise_has_its_sigma_and_is_fresh_in_each_frame(grey: bool) -> None:
    clip = torch.full((3, 3, 64, 64), 0.5)
    noise = (D._add_noise(clip, D.Noise("gaussian", grey, (2.0, 8.0, 8.0), 5), range(3)) - clip) * 255
    assert noise[0].std() == pytest.approx(2, rel=0.05)
    assert noise[1].std() == pytest.approx(8, rel=0.05)
    assert abs(float((noise[1] * noise[2]).mean())) < 3
    assert bool((noise[:, 0] == noise[:, 1]).all()) is grey


def test_poisson_noise_has_the_variance_of_counts() -> None:
    ramp = (
        torch.arange(256).repeat(3, 64, 1).reshape(1, 3, 128, 128).float() / 255
    )  # all 256 values: 256 levels
    noise = D._add_noise(ramp, D.Noise("poisson", False, (1.0,), 1), [0]) - ramp
    for low, high in ((0.02, 0.1), (0.2, 0.4), (0.8, 1.0)):
        inside = (ramp > low) & (ramp < high)
        assert noise[inside].var() == pytest.approx(float(ramp[inside].mean()) / 256, rel=0.1)
        assert abs(float(noise[inside].mean())) < 0.003
    assert (noise[ramp == 0] == 0).all()


@pytest.mark.parametrize(
    ("gentle", "harsh"),
    [
        (D.Codec("libx264", 18, None), D.Codec("libx264", 38, None)),
        (D.Codec("libx264", None, 20_000), D.Codec("libx264", None, 2_000)),
        (D.Codec("mpeg4", None, 20_000), D.Codec("mpeg4", None, 500)),
    ],
)
def test_codecs_change_pixels_more_at_lower_rates(gentle: D.Codec, harsh: D.Codec) -> None:
    clip = scene(24)
    area = 256 * 256
    coded = [D._compress(clip, codec, area) for codec in (gentle, harsh)]
    # mpeg4's rate control takes a dozen frames to act.
    errors = [(clip - result)[16:].abs().mean() * 255 for result in coded]
    assert 0.3 < errors[0] < 0.8 * errors[1]
    assert errors[1] < 25
    assert torch.equal(coded[1], D._compress(clip, harsh, area))


def test_a_crf_codes_a_crop_as_hard_as_the_frame_it_is_of(shared: Path) -> None:
    video = shared / "data" / "train_video" / "A2_sam2demo_03_skateboarder.mp4"
    truth, _ = protocol.read_truth(video, dataclasses.replace(protocol.FULL, frames=20))
    clip = torch.from_numpy(truth).permute(0, 3, 1, 2).float() / 255
    clip = D.apply_degradation(clip, D.FixedDegradation("small", 1.0, "area", 2, 95, None).record(20)) / 255
    height, width = clip.shape[2:]
    assert height >= 176
    assert width >= 320

    def error(part: Tensor, crf: float) -> Tensor:
        coded = code_clip(D._to_planes(part), "libx264", crf=crf, speed="medium", rate=25)
        return (D._from_planes(coded, part) - part).square()

    whole, crops, crf_of_crop = error(clip, 27), [], D.crf_of_part(27, 64, 64)
    for y, x in itertools.product(range(0, height - 63, 64), range(0, width - 63, 64)):
        part = (slice(None), slice(None), slice(y, y + 64), slice(x, x + 64))
        crops.append(
            [whole[part].mean(), error(clip[part], 27).mean(), error(clip[part], crf_of_crop).mean()]
        )
    of_whole, uncorrected, corrected = np.mean(crops, axis=0)
    assert uncorrected < 0.75 * of_whole
    assert corrected == pytest.approx(of_whole, rel=0.15)


def test_a_crf_is_raised_where_x264_counts_less_of_a_clip() -> None:
    assert D.crf_of_part(27, 180, 320) == D.crf_of_part(27, 1080, 1920) == 27
    assert D.crf_of_part(27, 64, 64) == pytest.approx(27 + 2.4 * math.log2(3))
    assert D.crf_of_part(50, 64, 64) == 51
    assert D.crf_of_part(27, 32, 32) == pytest.approx(27 + 2.4 * math.log2(0.75))  # all blocks count
    clip = scene(6, size=64)
    coded = D._compress(clip, D.Codec("libx264", 27, None), 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(D, "crf_of_part", lambda crf, height, width: crf)
        assert not torch.equal(D._compress(clip, D.Codec("libx264", 27, None), 1), coded)
        assert torch.equal(D._compress(clip, D.Codec("libx264", 27 + 2.4 * math.log2(3), None), 1), coded)


def test_bitrate_follows_the_area() -> None:
    clip = scene(4)
    codec = D.Codec("libx264", None, 5_000)
    errors = [(D._compress(clip, codec, area) - clip).abs().mean() for area in (96 * 96, 16 * 96 * 96)]
    assert errors[1] < 0.8 * errors[0]


def test_colour_conversion_for_codecs_round_trips() -> None:
    smooth = F.interpolate(
        torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(1)), size=(48, 64), mode="bicubic"
    )
    clip = (smooth * 0.6 + 0.2).clamp(0, 1)
    assert (D._from_planes(D._to_planes(clip), clip) - clip).abs().mean() * 255 < 1.0


def test_unsharp_mask_sharpens_edges_and_leaves_flat_areas() -> None:
    clip = torch.full((1, 3, 96, 96), 0.3)
    clip[..., 48:] = 0.6
    sharp = D.usm_sharpen(clip)
    assert sharp[0, 0, 48, 48] > 0.62
    assert sharp[0, 0, 48, 47] < 0.28
    flat = torch.full((1, 3, 96, 96), 0.4)
    torch.testing.assert_close(D.usm_sharpen(flat), flat)
    # OpenCV's filters give the same.
    low = cv2.GaussianBlur(as_image(clip[0]) / 255, (51, 51), 0, borderType=cv2.BORDER_REFLECT_101)
    rest = as_image(clip[0]) / 255 - low
    mask = (np.abs(rest) * 255 > 10).astype(np.float32)
    mask = cv2.GaussianBlur(mask, (51, 51), 0, borderType=cv2.BORDER_REFLECT_101)
    expected = (
        mask * np.clip(as_image(clip[0]) / 255 + 0.5 * rest, 0, 1) + (1 - mask) * as_image(clip[0]) / 255
    )
    assert np.abs(as_image(sharp[0]) / 255 - expected).max() < 1e-4


# ---------------------------------------------------------------- draws


def draws(preset: str, count: int = 300, frames: int = 12) -> list[D.DegradationRecord]:
    return [D.sample_degradation(np.random.default_rng((7, i)), preset, frames) for i in range(count)]


def stages(records: list[D.DegradationRecord], kind: type) -> list:
    return [stage for record in records for stage in record.stages if isinstance(stage, kind)]


def check_walk(walk: tuple[float, ...], low: float, high: float, step: float) -> None:
    values = np.array(walk)
    assert values.min() >= low - 1e-6
    assert values.max() <= high + 1e-6
    assert np.abs(np.diff(values)).max() <= step + 2e-5


def test_heavy_is_realbasicvsrs_pipeline() -> None:
    records = draws("heavy")
    for record in records:
        kinds = [type(stage).__name__ for stage in record.stages]
        assert kinds[:5] == ["Blur", "Resize", "Noise", "Jpeg", "Codec"]
        second = 6 if kinds[5] == "Blur" else 5
        assert kinds[second : second + 3] == ["Resize", "Noise", "Jpeg"]
        assert sorted(kinds[second + 3 :]) in (["Blur", "Codec", "Resize"], ["Codec", "Resize"])
        assert [s.to_lr for s in record.stages if isinstance(s, D.Resize)] == [False, False, True]
        check_walk(record.stages[0].sigma_x, 0.2, 3, 0.02)
        check_walk(record.stages[1].factor, 0.15, 1.5, 0.015)
        assert len(set(record.stages[1].factor)) > 1  # "keep" walks too, from 1 on
        check_walk(record.stages[second].factor, 0.3, 1.2, 0.03)
        if second == 6:
            check_walk(record.stages[5].sigma_x, 0.2, 1.5, 0.02)
        gaussian = record.stages[2].kind == "gaussian"
        check_walk(record.stages[2].level, *((1, 30, 0.1) if gaussian else (0.05, 3, 0.005)))
    for jpeg in stages(records, D.Jpeg):
        check_walk(jpeg.quality, 30, 95, 3)
    for codec in stages(records, D.Codec):
        assert 10_000 <= codec.bits <= 100_000
    first = [record.stages[0].kernel for record in records]
    for kernel, odds in zip(D.KERNELS, D._KERNEL_ODDS):
        assert first.count(kernel) / 300 == pytest.approx(odds, abs=4 * math.sqrt(odds * (1 - odds) / 300))
    directions = [np.sign(record.stages[1].factor[0] - 1) for record in records]
    for direction, odds in ((1, 0.2), (-1, 0.7), (0, 0.1)):
        assert directions.count(direction) / 300 == pytest.approx(odds, abs=0.11)
    assert sum(s.kind == "poisson" for s in stages(records, D.Noise)) / 600 == pytest.approx(0.5, abs=0.09)
    assert sum(s.grey for s in stages(records, D.Noise)) / 600 == pytest.approx(0.4, abs=0.09)
    assert sum(s.codec == "mpeg4" for s in stages(records, D.Codec)) / 600 == pytest.approx(1 / 3, abs=0.08)
    last_is_codec = sum(isinstance(record.stages[-1], D.Codec) for record in records) / 300
    assert last_is_codec == pytest.approx(0.5, abs=0.12)


def test_the_other_numbers_of_realbasicvsr() -> None:
    """Kernel shapes, filters, and what differs in the second round: ranges, steps, odds."""

    def share(found: list[bool]) -> float:
        return sum(found) / len(found)

    records = draws("heavy")
    for blur in stages(records, D.Blur):
        assert blur.size in range(7, 22, 2)
        check_walk(blur.omega, math.pi / 3 if blur.size < 13 else math.pi / 5, math.pi, 0.0628)
        if blur.beta[0] != 1.0 or len(set(blur.beta)) > 1:  # the last sinc uses none of these
            check_walk(blur.angle, -math.pi, math.pi, 0.31416)
            plateau = blur.kernel.startswith("plateau")
            check_walk(blur.beta, *((1, 2, 0.1) if plateau else (0.5, 4, 0.05)))
            round_kernel = blur.kernel in ("iso", "generalized_iso", "plateau_iso")
            assert (blur.sigma_x == blur.sigma_y) == round_kernel
    assert {blur.size for blur in stages(records, D.Blur)} == set(range(7, 22, 2))
    resizes = stages(records, D.Resize)
    for name in ("bilinear", "area", "bicubic"):
        assert share([resize.filter == name for resize in resizes]) == pytest.approx(1 / 3, abs=0.07)
    second = [next(i for i, s in enumerate(r.stages[5:], 5) if isinstance(s, D.Resize)) for r in records]
    assert share([at == 6 for at in second]) == pytest.approx(0.8, abs=0.1)  # the second blur
    directions = [np.sign(record.stages[at].factor[0] - 1) for record, at in zip(records, second)]
    for direction, odds in ((1, 0.3), (-1, 0.4), (0, 0.3)):
        assert directions.count(direction) / 300 == pytest.approx(odds, abs=0.12)
    for record, at in zip(records, second):
        noise = record.stages[at + 1]
        check_walk(noise.level, *((1, 25, 0.1) if noise.kind == "gaussian" else (0.05, 2.5, 0.005)))
    last = [
        [s for s in record.stages[at + 3 :] if isinstance(s, D.Blur)] for record, at in zip(records, second)
    ]
    assert share([bool(blurs) for blurs in last]) == pytest.approx(0.8, abs=0.1)
    for blur in itertools.chain(*last):
        assert blur.kernel == "sinc"
        check_walk(blur.omega, math.pi / 3, math.pi, 0.0628)
    bits = [codec.bits for codec in stages(records, D.Codec)]
    assert np.mean(bits) == pytest.approx(55_000, abs=4 * 26_000 / 600**0.5)


def test_realbasicvsrs_shot_noise_is_that_of_grey_levels() -> None:
    heavy, published = draws("heavy", 40), draws("realbasicvsr", 40)
    for a, b in zip(heavy, published):
        assert [type(s) for s in a.stages] == [type(s) for s in b.stages]
    levels = [max(s.level) for s in stages(published, D.Noise) if s.kind == "poisson"]
    assert max(levels) <= 3 / 255**0.5 + 1e-5
    # A grey-level picture of value v with 256 distinct values has variance v / 256, in grey levels.
    ramp = torch.arange(256).repeat(3, 64, 1).reshape(1, 3, 128, 128).float() / 255
    noise = (D._add_noise(ramp, D.Noise("poisson", False, (255**-0.5,), 1), [0]) - ramp) * 255
    bright = (ramp > 0.8) & (ramp < 1)
    assert noise[bright].var() == pytest.approx(float(ramp[bright].mean()) * 255 / 256, rel=0.1)


def test_realesrgan_has_no_codec_and_holds_every_number() -> None:
    records = draws("realesrgan")
    for record in records:
        kinds = [type(stage).__name__ for stage in record.stages]
        assert kinds[:4] == ["Blur", "Resize", "Noise", "Jpeg"]
        second = 5 if kinds[4] == "Blur" else 4
        assert kinds[second : second + 2] == ["Resize", "Noise"]
        assert sorted(kinds[second + 2 :]) in (["Blur", "Jpeg", "Resize"], ["Jpeg", "Resize"])
        # Quality never falls between the last resize and its sinc.
        last = kinds[second + 2 :]
        assert "Blur" not in last or last.index("Blur") == last.index("Resize") + 1
        assert [s.of_lr for s in record.stages if isinstance(s, D.Resize)] == [False, True, False]
        for stage in record.stages:
            for value in dataclasses.asdict(stage).values():
                assert not isinstance(value, tuple) or len(set(value)) == 1
    assert all(s.clip for s in stages(records, D.Noise))
    first = [record.stages[0] for record in records]
    betas = np.array([b.beta[0] for b in first if b.kernel.startswith("generalized")])
    assert np.mean(betas < 1) == pytest.approx(0.5, abs=0.3)
    assert sum(type(r.stages[-1]).__name__ == "Jpeg" for r in records) / 300 == pytest.approx(0.5, abs=0.12)


def test_the_second_resize_of_realesrgan_is_of_the_lr_size() -> None:
    frames = D._resample(scene(1), None, D.Resize("area", still(1.2), of_lr=True), (24, 20))
    assert tuple(frames.shape[-2:]) == (28, 24)


def test_mild_and_medium_cover_the_test_degradations() -> None:
    for preset, sigma, noise, quality in (("mild", 0.8, 1.5, 80), ("medium", 1.8, 7, 70)):
        records = draws(preset)
        blurs, jpegs = stages(records, D.Blur), stages(records, D.Jpeg)
        noises = [s for s in stages(records, D.Noise) if s.kind == "gaussian"]
        for values, wanted in (
            ([s.sigma_x[0] for s in blurs], sigma),
            ([s.level[0] for s in noises], noise),
            ([s.quality[0] for s in jpegs], quality),
        ):
            assert 0.05 < np.mean(np.array(values) < wanted) < 0.95
        assert all(sum(isinstance(s, D.Resize) for s in record.stages) == 1 for record in records)
    crfs = [s.crf for s in stages(draws("medium"), D.Codec) if s.crf is not None]
    assert min(crfs) >= 18
    assert max(crfs) <= 32
    assert 0.2 < np.mean(np.array(crfs) > 27) < 0.6


def test_mix_of_presets_and_scales() -> None:
    rng = np.random.default_rng(0)
    presets = [D.draw_preset(rng) for _ in range(2000)]
    scales = [D.draw_scale(rng) for _ in range(2000)]
    for name, share in D.TRAINING_MIX.items():
        assert presets.count(name) / 2000 == pytest.approx(share, abs=0.05)
    for scale, share in D.SCALE_MIX.items():
        assert scales.count(scale) / 2000 == pytest.approx(share, abs=0.05)


# ---------------------------------------------------------------- records


@pytest.mark.parametrize(("preset", "scale"), [*itertools.product(D.PRESETS, (2, 3, 4))])
def test_a_record_is_json_and_gives_the_same_pixels_again(preset: str, scale: int) -> None:
    clip = scene(5)
    for seed in range(3):
        record = D.sample_degradation(np.random.default_rng(seed), preset, 5, scale)
        again = D.DegradationRecord.from_json(record.to_json())
        assert again == record
        lr = D.apply_degradation(clip, record)
        assert lr.dtype == torch.uint8
        assert tuple(lr.shape) == (5, 3, *D.lr_size(96, 96, scale))
        assert torch.equal(lr, D.apply_degradation(clip.clone(), again))
        assert D.sample_degradation(np.random.default_rng(seed), preset, 5, scale) == record
    other = D.sample_degradation(np.random.default_rng(99), preset, 5, scale)
    assert not torch.equal(lr, D.apply_degradation(clip, other))


def test_harder_presets_are_harder() -> None:
    clip = scene(5)
    target = D.apply_degradation(
        clip, D.DegradationRecord("none", 4, 5, (D.Resize("area", still(1, 5), True),))
    ).float()
    errors = {}
    for name in ("clean", *D.TRAINING_MIX):
        lrs = [
            D.apply_degradation(clip, D.sample_degradation(np.random.default_rng(i), name, 5))
            for i in range(24)
        ]
        errors[name] = float(np.mean([(lr.float() - target).abs().mean() for lr in lrs]))
    assert errors["clean"] < 0.7 * errors["mild"]
    assert errors["mild"] < 0.7 * errors["medium"]
    assert errors["medium"] < 0.8 * errors["heavy"]


@pytest.mark.parametrize("name", ["mild", "heavy"])
def test_fixed_degradations_are_the_protocols(name: str) -> None:
    """The protocol makes them with OpenCV; the record gives the same, noise and codec apart."""
    clip = (F.interpolate(scene(3), size=(320, 320), mode="bilinear") * 255).round() / 255
    fixed = D.FIXED_DEGRADATIONS[name]
    record = fixed.record(3)
    noises, codecs = (stages([record], kind) for kind in (D.Noise, D.Codec))
    assert [(s.kind, s.grey, s.level) for s in noises] == [("gaussian", False, still(fixed.noise, 3))]
    assert [(s.codec, s.crf) for s in codecs] == ([] if fixed.crf is None else [("libx264", fixed.crf)])
    quiet = dataclasses.replace(fixed, noise=0.0, crf=None)
    truth = np.stack([as_image(frame) for frame in clip]).round().astype(np.uint8)
    theirs = protocol.degrade(truth, quiet, Fraction(25), 0).astype(np.float32)
    ours = D.apply_degradation(clip, quiet.record(3))
    assert np.abs(ours.permute(0, 2, 3, 1).numpy() - theirs).mean() < 1.0
    whole = D.apply_degradation(clip, record).float()
    assert fixed.noise / 3 < (whole - ours.float()).std() < 2.5 * fixed.noise
    assert D.fixed_degradation(name, 3) == record


def test_bursts_of_noise_come_and_go_and_are_all_that_changes() -> None:
    frames, grey = 200, torch.full((200, 3, 64, 64), 0.5)
    record = D.DegradationRecord("none", 4, frames, (D.Resize("area", still(1.0, frames), to_lr=True),))
    noisy = D.with_noise_bursts(record, np.random.default_rng(3))
    assert D.DegradationRecord.from_json(noisy.to_json()) == noisy
    levels = np.array(noisy.stages[1].level)
    deviation = D.apply_degradation(grey, noisy).float().flatten(1).std(1).numpy()
    assert (deviation[levels == 0] == 0).all()
    assert np.allclose(deviation[levels > 0], levels[levels > 0], rtol=0.12)
    changes = np.flatnonzero(np.diff(levels))
    lengths = np.diff(changes)
    assert lengths.min() >= 2
    assert lengths.max() <= 16
    assert 0.25 < (levels == 0).mean() < 0.85
    for preset in D.PRESETS:
        plain = D.sample_degradation(np.random.default_rng(1), preset, 9)
        burst = D.with_noise_bursts(plain, np.random.default_rng(2))
        (place,) = [i for i, stage in enumerate(burst.stages) if stage not in plain.stages]
        before = burst.stages[place - 1]
        assert isinstance(before, D.Resize)
        assert before.to_lr
        assert tuple(stage for stage in burst.stages if stage in plain.stages) == plain.stages


def test_parts_of_a_record_degrade_parts_of_the_clip() -> None:
    clip = scene(6)
    kinds = (D.Blur, D.Resize, D.Noise, D.Jpeg)
    record = D.sample_degradation(np.random.default_rng(4), "heavy", 6)
    record = dataclasses.replace(record, stages=tuple(s for s in record.stages if isinstance(s, kinds)))
    parts = [D.apply_degradation(clip[i : i + 2], record.part(i, 2)) for i in (0, 2, 4)]
    noiseless = dataclasses.replace(record, stages=tuple(s for s in record.stages if type(s) is not D.Noise))
    whole = D.apply_degradation(clip, noiseless)
    quiet = [D.apply_degradation(clip[i : i + 2], noiseless.part(i, 2)) for i in (0, 2, 4)]
    # A blur's number of rank-one terms depends on all of its kernels: half a grey level.
    assert (torch.cat(quiet).int() - whole.int()).abs().max() <= 4
    assert (torch.cat(quiet).int() - whole.int()).abs().float().mean() < 0.1
    noise = [(part.float() - q.float()) for part, q in zip(parts, quiet)]
    assert abs(float((noise[0] * noise[1]).mean() / noise[0].std() / noise[1].std())) < 0.3
    assert record.part(2, 3).part(1, 2) == record.part(3, 2)
    with pytest.raises(InputError, match="has no 3 frames from 4 on"):
        record.part(4, 3)


@pytest.mark.parametrize("preset", D.PRESETS)
def test_a_picture_is_a_clip_of_one_frame(preset: str) -> None:
    image = scene(1)[0]
    record = D.sample_degradation(np.random.default_rng(2), preset, 1)
    lr = D.degrade_image(image, record)
    assert lr.shape == (3, 24, 24)
    assert lr.dtype == torch.uint8
    assert torch.equal(lr, D.degrade_image(image, D.DegradationRecord.from_json(record.to_json())))
    area = F.avg_pool2d(image[None] * 255, 4)[0]
    assert (lr - area).abs().mean() < 40


def test_bad_requests_are_refused() -> None:
    with pytest.raises(InputError, match="choose one of clean, mild, medium, heavy"):
        D.sample_degradation(np.random.default_rng(0), "awful", 5)
    with pytest.raises(InputError, match="mild or heavy"):
        D.fixed_degradation("medium", 5)
    with pytest.raises(InputError, match="4 frames"):
        D.apply_degradation(scene(4), D.fixed_degradation("mild", 5))
    for text in (
        "[]",
        "{",
        '{"stages": [{"stage": "blur", "colour": 1}]}',
        '{"stages": [{"stage": "melt"}]}',
    ):
        with pytest.raises(InputError, match="not a degradation record"):
            D.DegradationRecord.from_json(text)


# ---------------------------------------------------------------- alignment


def measured_shift(reference: Tensor, picture: Tensor) -> float:
    """How far `picture` is shifted against `reference` [3, S, S], in pixels (least squares on gradients)."""
    smooth = F.avg_pool2d(F.pad(torch.stack((reference, picture)), (6,) * 4, mode="replicate"), 13, 1)
    across = (smooth[0, :, 1:-1, 2:] - smooth[0, :, 1:-1, :-2]) / 2
    down = (smooth[0, :, 2:, 1:-1] - smooth[0, :, :-2, 1:-1]) / 2
    change = (smooth[0] - smooth[1])[:, 1:-1, 1:-1]
    system = torch.stack((across, down), -1)[:, 8:-8, 8:-8].reshape(-1, 2)
    solution = torch.linalg.lstsq(system.double(), change[:, 8:-8, 8:-8].reshape(-1, 1).double()).solution
    return float(solution.norm())


def test_measured_shift_sees_a_shift() -> None:
    frame = scene(1)[0]
    assert measured_shift(frame, torch.roll(frame, 1, 2)) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("scale", [2, 3, 4])
@pytest.mark.parametrize("name", D.FILTERS)
def test_lr_lies_exactly_over_hq(scale: int, name: str) -> None:
    # Soft, since a sharp edge falls between the samples that a filter without antialiasing takes.
    clip = F.avg_pool2d(F.pad(scene(1), (3,) * 4, mode="replicate"), 7, 1)
    record = D.DegradationRecord("none", scale, 1, (D.Resize(name, still(1), to_lr=True),))
    up = F.interpolate(D.apply_degradation(clip, record).float() / 255, size=(96, 96), mode="bilinear")
    assert measured_shift(clip[0], up[0]) < 0.1


@pytest.mark.parametrize("preset", D.PRESETS)
def test_degradation_does_not_move_the_picture(preset: str) -> None:
    clip = scene(5, size=128)
    shifts = []
    for seed in range(5):
        lr = D.apply_degradation(clip, D.sample_degradation(np.random.default_rng(seed), preset, 5))
        up = F.interpolate(lr.float() / 255, size=(128, 128), mode="bilinear")
        shifts.append(measured_shift(clip.mean(0), up.mean(0)))
    assert np.median(shifts) < 0.4  # a tenth of an LR pixel
