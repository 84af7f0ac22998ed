"""One scale of quality, checked against what was measured; HDR metadata in every encoder that writes it."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from media import make_clip, run_identity, times, video_stream
from recavsr.errors import InputError
from recavsr.video.clips import read_clip
from recavsr.video.color import HdrMetadata, hdr_metadata_of
from recavsr.video.encoders import HARDWARE, SOFTWARE, Encoder, opens, with_hdr_metadata

MEASURED = json.loads(
    (Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "quality_scale.json").read_text()
)


@pytest.mark.parametrize("codec", ["hevc", "av1", "vp9"])
def test_numbers_are_those_of_equal_psnr(codec: str) -> None:
    encoder = SOFTWARE[codec]
    for quality, number in MEASURED["number_of_equal_psnr"][codec].items():
        assert abs(encoder.number(int(quality)) - number) <= 1
    numbers = [encoder.number(quality) for quality in range(52)]
    assert numbers == sorted(numbers)
    assert (numbers[0], encoder.number(51)) == (0, {"hevc": 51}.get(codec, 63))


def test_prores_profiles_reach_the_psnr_of_their_quality() -> None:
    """Of every profile: the one below it would not do (x264's PSNR is at 12, 17, ... 32)."""
    of_profile = {row["profile"]: row["psnr_db"] for row in MEASURED["prores"]}
    for row in MEASURED["x264"]:
        profile = SOFTWARE["prores"].settings(row["crf"], None)["profile"]
        assert of_profile[profile] >= row["psnr_db"]
        smaller = [psnr for psnr in of_profile.values() if psnr < of_profile[profile]]
        assert all(psnr < row["psnr_db"] for psnr in smaller)
    assert SOFTWARE["prores"].settings(None, None)["profile"] == "hq"


@pytest.mark.parametrize("quality", [-1, 52, "best", ""])
def test_senseless_quality(quality: int | str) -> None:
    with pytest.raises(InputError, match=r"0 \(best\) to 51 or 'lossless', the same for every codec"):
        SOFTWARE["h264"].settings(quality, None)


@pytest.mark.parametrize("codec", ["h264", "hevc", "av1"])
def test_a_worse_quality_makes_a_smaller_file(tmp_path: Path, codec: str) -> None:
    source = make_clip(tmp_path / "in.mp4", 8, (72, 128))
    sizes = []
    for quality in (10, 35):
        out = tmp_path / f"{quality}.mkv"
        run_identity(source, out, codec=codec, quality=quality)
        sizes.append(out.stat().st_size)
    assert sizes[0] > 1.2 * sizes[1]


def test_an_encoder_without_a_format_says_what_it_has() -> None:
    assert SOFTWARE["av1"].holds("444", 12) == ("420", 10)
    assert SOFTWARE["prores"].holds("420", 8) == ("422", 10)
    assert SOFTWARE["ffv1"].pixel_format("rgb", 16) == "gbrp16le"
    assert Encoder("x", "y", bits=(8,)).holds("422", 8) == ("422", 8)


HDR = HdrMetadata(
    display_primaries=(
        (Fraction(34, 50), Fraction(32, 100)),
        (Fraction(265, 1000), Fraction(69, 100)),
        (Fraction(15, 100), Fraction(6, 100)),
    ),
    white_point=(Fraction(3127, 10000), Fraction(329, 1000)),
    min_luminance=Fraction(5, 1000),
    max_luminance=Fraction(1000),
    max_content_light=1000,
    max_average_light=400,
)


@pytest.mark.parametrize("codec", ["h264", "hevc", "av1"])
def test_hdr_metadata_comes_back(tmp_path: Path, codec: str) -> None:
    encoder, path = SOFTWARE[codec], tmp_path / "out.mkv"
    options = with_hdr_metadata(encoder, encoder.settings(None, None), HDR)
    assert options is not None
    with av.open(str(path), "w") as container:
        stream = container.add_stream(encoder.library, rate=25, options=options)
        stream.width, stream.height, stream.pix_fmt = 128, 72, "yuv420p10le"
        for number in range(3):
            grey = np.full((108, 128), 500, np.uint16)
            frame = av.VideoFrame.from_ndarray(grey, format="yuv420p10le")
            frame.pts, frame.time_base = number, Fraction(1, 25)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    with av.open(str(path)) as container:
        found = hdr_metadata_of(next(container.decode(video=0)))
    assert found is not None
    assert (found.max_content_light, found.max_average_light) == (1000, 400)
    assert found.display_primaries is not None
    assert found.white_point is not None
    pairs = zip((*found.display_primaries, found.white_point), (*HDR.display_primaries, HDR.white_point))
    assert all(abs(float(a - b)) < 1e-4 for ours, wanted in pairs for a, b in zip(ours, wanted))
    assert abs(float(found.max_luminance - 1000)) < 0.1
    assert abs(float(found.min_luminance) - 0.005) < 1e-4


def test_where_hdr_metadata_can_not_go_a_line_says_so() -> None:
    assert with_hdr_metadata(SOFTWARE["ffv1"], {}, HDR) is None
    assert with_hdr_metadata(SOFTWARE["prores"], {}, HDR) is None


@pytest.mark.parametrize("profile", ["standard", "lt"])
def test_prores_profile_in_the_file(tmp_path: Path, profile: str) -> None:
    out = tmp_path / "out.mov"
    quality = {"standard": 17, "lt": 24}[profile]
    run_identity(make_clip(tmp_path / "in.mp4", 2), out, codec="prores", quality=quality)
    assert video_stream(out)["codec_tag_string"] == {"standard": "apcn", "lt": "apcs"}[profile]


CARD_CODECS = ["h264", "hevc", "av1"]


def nvenc_opens(codec: str) -> bool:
    """Say whether this machine's card encodes so: data centre cards like the H100 have no encoder at all."""
    encoder = next(each for each in HARDWARE if each.library == f"{codec}_nvenc")
    return opens(encoder, "yuv420p", (288, 320), encoder.settings(None, None))


@pytest.mark.gpu
@pytest.mark.parametrize("codec", CARD_CODECS)
def test_a_card_encodes_every_frame(codec: str, tmp_path: Path) -> None:
    if not nvenc_opens(codec):
        pytest.skip(f"this card, its driver or PyAV has no {codec}_nvenc")
    source = make_clip(tmp_path / "in.mp4", 30, (144, 160))
    made, wanted = tmp_path / "card.mkv", tmp_path / "software.mkv"
    report = run_identity(source, made, codec=codec, encoder="hardware")
    assert not any("no graphics card" in line for line in report.warnings)
    run_identity(source, wanted, codec=codec)
    assert times(made) == times(wanted)
    with av.open(str(made)) as container:
        assert container.streams.video[0].codec_context.codec.canonical_name == codec
    error = read_clip(made).astype(float) - read_clip(wanted)
    assert 10 * np.log10(255**2 / (error**2).mean()) > 35


@pytest.mark.gpu
@pytest.mark.parametrize("codec", CARD_CODECS)
def test_a_card_without_an_encoder_leaves_it_to_the_software(codec: str, tmp_path: Path) -> None:
    if nvenc_opens(codec):
        pytest.skip("this card encodes it")
    source = make_clip(tmp_path / "in.mp4", 3, (144, 160))
    report = run_identity(source, tmp_path / "out.mkv", codec=codec, encoder="hardware", quality=20)
    assert any(line.startswith(f"no graphics card here encodes this {codec}") for line in report.warnings)
    assert len(times(tmp_path / "out.mkv")) == 3
    with pytest.raises(InputError, match=f"{codec}_nvenc can't be opened on this machine"):
        run_identity(source, tmp_path / "named.mkv", codec=f"{codec}_nvenc", quality=20)
