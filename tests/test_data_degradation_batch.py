"""Batched degradation: the reference's pixels where nothing is random, its statistics where something is."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from recavsr.data import degradation as D
from recavsr.data.degradation_batch import degrade_batch, hybrid_codec, resize_matrices, sample_records
from recavsr.errors import InputError

FRAMES = 3


def clip(seed: int, frames: int = FRAMES, size: int = 64) -> Tensor:
    """A sliding picture with edges and texture: [T, 3, S, S] in [0, 1]."""
    rng = np.random.default_rng(seed)
    y, x = torch.meshgrid(torch.arange(size) / 64, torch.arange(size) / 64, indexing="ij")
    a, b, c = rng.uniform(3, 9, 3)
    result = []
    for t in range(frames):
        s = x + 0.02 * t
        waves = torch.stack([torch.sin(a * s + b * y), torch.sin(b * s * y), torch.cos(c * y - a * s)])
        texture = 0.15 * torch.sin(40 * s) * torch.sin(31 * y) + 0.3 * ((s * 4).floor() % 2 - 0.5) * (y > 0.5)
        result.append(0.5 + 0.2 * waves + texture)
    return torch.stack(result).clamp(0, 1)


def without(record: D.DegradationRecord, *kinds: type) -> D.DegradationRecord:
    stages = tuple(stage for stage in record.stages if not isinstance(stage, kinds))
    return dataclasses.replace(record, stages=stages)


@pytest.mark.parametrize("preset", D.PRESETS)
def test_blur_and_resize_give_the_references_pixels(preset: str) -> None:
    """Within a grey level: the reference's blur may be half a level off the exact one."""
    clips = torch.stack([clip(seed) for seed in range(4)])
    records = [
        without(D.sample_degradation(np.random.default_rng(i), preset, FRAMES), D.Noise, D.Codec, D.Jpeg)
        for i in range(4)
    ]
    reference = torch.stack([D.apply_degradation(c, record) for c, record in zip(clips, records)])
    difference = (degrade_batch(clips, records).int() - reference.int()).abs()
    assert difference.max() <= 1
    assert difference.float().mean() < 0.1


def test_jpeg_and_real_codecs_give_the_references_pixels() -> None:
    clips = torch.stack([clip(seed, size=72) for seed in range(3)])
    walk = (1.0,) * FRAMES
    sizes = [D.Resize("area", walk, to_lr=True), D.Resize("bicubic", (0.5, 0.6, 0.7)), D.Resize("area", walk)]
    jpeg, codec = D.Jpeg((60.0, 70.0, 80.0)), D.Codec("libx264", 24.0, None)
    last = D.Resize("area", walk, to_lr=True)
    records = [D.DegradationRecord("none", 3, FRAMES, (size, jpeg, codec, last)) for size in sizes]
    reference = torch.stack([D.apply_degradation(c, record) for c, record in zip(clips, records)])
    difference = (degrade_batch(clips, records, codecs="real").int() - reference.int()).abs().float()
    assert difference.mean() < 0.3  # a last digit can change a level of JPEG's
    assert torch.equal(degrade_batch(clips, records[:1] * 3)[0], degrade_batch(clips[:1], records[:1])[0])


@pytest.mark.parametrize("name", D.FILTERS)
def test_resize_matrices_are_the_references(name: str) -> None:
    pairs = [(64, 16), (64, 64), (40, 62), (38, 10), (12, 64), (64, 22)]
    source, target = (torch.tensor(side) for side in zip(*pairs))
    matrices = resize_matrices(source, target, name, 64, 64)
    assert matrices.isfinite().all()
    for matrix, (width, wanted) in zip(matrices, pairs):
        expected = torch.from_numpy(D.resize_matrix(width, wanted, name)).float()
        torch.testing.assert_close(matrix[:wanted, :width], expected, rtol=0, atol=2e-4)
        assert (matrix[:wanted, width:] == 0).all()


@pytest.mark.parametrize(("kind", "level"), [("gaussian", 12.0), ("poisson", 1.0)])
@pytest.mark.parametrize("grey", [False, True])
def test_noise_has_the_references_distribution(kind: str, level: float, grey: bool) -> None:
    ramp = (torch.arange(256) / 255).repeat(3, 96, 1).reshape(1, 3, 96, 256).repeat(2, 1, 1, 1)
    stages = (D.Resize("area", (1.0,) * 2, to_lr=True), D.Noise(kind, grey, (level, level), 3))
    record = D.DegradationRecord("none", 1, 2, stages)
    generator = torch.Generator().manual_seed(1)
    ours = degrade_batch(torch.stack((ramp, ramp)), [record] * 2, generator).float() / 255 - ramp
    theirs = D.apply_degradation(ramp, record).float() / 255 - ramp
    middle = (ramp[0] > 0.4) & (ramp[0] < 0.6)
    for noise in ours.flatten(0, 1):
        assert noise[middle].std() == pytest.approx(float(theirs[:, middle].std()), rel=0.05)
        assert abs(float(noise[middle].mean())) < 0.005
        same = bool((noise[0] - noise[1])[16:-16].abs().mean() < 0.002)
        assert same is grey
    assert abs(float((ours[0, 0] * ours[1, 0])[middle].mean() / ours[0, 0][middle].var())) < 0.05
    again = degrade_batch(torch.stack((ramp, ramp)), [record] * 2, torch.Generator().manual_seed(1))
    torch.testing.assert_close(again.float() / 255 - ramp, ours)


def codec_damage(codec: D.Codec) -> tuple[np.ndarray, np.ndarray]:
    """Mean error, and mean error of frame differences, in grey levels: (stand-in, real) over three clips."""
    clips = torch.stack([clip(seed, frames=10, size=96) for seed in range(3)])
    area = 4 * 96 * 96
    fake = hybrid_codec(clips, np.full((3, 2), 96), [codec] * 3, area)
    real = torch.stack([torch.as_tensor(D._compress(c, codec, area)) for c in clips])
    errors = [[(r - clips).abs().mean(), (r - clips).diff(dim=1).abs().mean()] for r in (fake, real)]
    return tuple(np.array(pair) * 255 for pair in errors)  # type: ignore[return-value]


@pytest.mark.parametrize("crf", [16.0, 24.0, 32.0])
def test_stand_in_does_as_much_damage_as_x264_at_a_crf(crf: float) -> None:
    fake, real = codec_damage(D.Codec("libx264", crf, None))
    assert fake == pytest.approx(real, rel=0.3)


@pytest.mark.parametrize(("codec", "bits"), [("libx264", 2e4), ("libx264", 6e4), ("mpeg4", 6e4)])
def test_stand_in_keeps_a_budget(codec: str, bits: float) -> None:
    fake, real = codec_damage(D.Codec(codec, None, bits))
    assert fake == pytest.approx(real, rel=0.6)
    harsher, _ = codec_damage(D.Codec(codec, None, bits / 50))
    assert harsher[0] > 1.2 * fake[0]


@pytest.mark.parametrize("preset", ["medium", "heavy"])
def test_whole_pipelines_do_the_same_damage(preset: str) -> None:
    clips = torch.stack([clip(seed % 4) for seed in range(20)])
    generator = torch.Generator().manual_seed(5)
    records = sample_records(generator, preset, 20, FRAMES)
    ours = degrade_batch(clips, records, generator).float()
    theirs = torch.stack([D.apply_degradation(c, record) for c, record in zip(clips, records)]).float()
    clean = torch.nn.functional.avg_pool2d(clips.flatten(0, 1) * 255, 4).unflatten(0, (20, FRAMES))
    # Error, its flicker and its grain; a real H.264 smooths the last two more than the stand-in.
    for measure, tolerance in (
        (lambda x: x, 0.12),
        (lambda x: x.diff(dim=1), 0.3),
        (lambda x: x.diff(dim=-1), 0.3),
    ):
        errors = [measure(x - clean).abs().mean((1, 2, 3, 4)).numpy() for x in (ours, theirs)]
        assert errors[0].mean() == pytest.approx(errors[1].mean(), rel=tolerance)
        assert np.corrcoef(*errors)[0, 1] > 0.7  # record by record


def test_records_come_from_the_generator() -> None:
    first, second = (sample_records(torch.Generator().manual_seed(3), "heavy", 2, 4) for _ in range(2))
    assert first == second
    assert first[0] != first[1]
    generator = torch.Generator().manual_seed(3)
    assert sample_records(generator, "heavy", 1, 4) != sample_records(generator, "heavy", 1, 4)


def test_batches_that_do_not_fit_are_refused() -> None:
    clips = torch.stack([clip(0), clip(1)])
    records = [D.fixed_degradation("mild", FRAMES), D.fixed_degradation("mild", FRAMES, scale=2)]
    with pytest.raises(InputError, match=r"one scale, not \[2, 4\]"):
        degrade_batch(clips, records)
    with pytest.raises(InputError, match="2 clips of 3 frames"):
        degrade_batch(clips, records[:1])


@pytest.mark.gpu
def test_a_gpu_gives_the_cpus_pixels() -> None:
    clips = torch.stack([clip(seed) for seed in range(4)])
    records = [
        without(r, D.Noise) for r in sample_records(torch.Generator().manual_seed(0), "heavy", 4, FRAMES)
    ]
    difference = degrade_batch(clips.cuda(), records).cpu().int() - degrade_batch(clips, records).int()
    assert difference.abs().float().mean() < 1
