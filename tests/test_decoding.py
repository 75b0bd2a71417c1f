"""Every kind of file: what libsndfile reads, what FFmpeg reads, and what lies about itself."""

import struct
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
from test_recipes import load_script

from separator.audio import inspect_audio, read_audio, read_blocks
from separator.errors import SeparatorError

RATE = 48_000
encode = load_script("file_checks", "fuzz").encode
LOSSLESS = {"FLAC": "flac", "ALAC": "m4a", "WavPack": "wv", "TTA": "tta", "video with FLAC": "mkv"}
CODECS = {  # name, (codec, sample format, extension, rate, layout)
    "m4a": ("aac", "fltp", "m4a", 48_000, "stereo"),
    "mp4": ("aac", "fltp", "mp4", 44_100, "stereo"),
    "opus in webm": ("libopus", "flt", "webm", 48_000, "stereo"),
    "wma": ("wmav2", "fltp", "wma", 44_100, "stereo"),
    "ac3": ("ac3", "fltp", "mka", 48_000, "5.1"),
    "g722": ("g722", "s16", "g722", 16_000, "mono"),
    "mp2": ("mp2", "s16", "mpg", 48_000, "stereo"),
    "adts": ("aac", "fltp", "aac", 48_000, "stereo"),
}


def chord(sample_rate: int, channels: int, seconds: float = 1.0) -> np.ndarray:
    time = np.arange(round(seconds * sample_rate)) / sample_rate
    return np.stack([0.3 * np.sin(2 * np.pi * 440 * (1 + c / 4) * time) for c in range(channels)])


def warned(path: Path) -> tuple[np.ndarray, list[str]]:
    """All samples of a file and the warnings."""
    warnings: list[str] = []
    info = inspect_audio(path, warn=warnings.append)
    blocks = list(read_blocks(info, warn=warnings.append))
    return np.concatenate(blocks, 1), list(dict.fromkeys(warnings))


@pytest.mark.parametrize("kind", CODECS)
def test_lossy_files_that_libsndfile_does_not_know_are_read(tmp_path, kind):
    codec, form, extension, rate, layout = CODECS[kind]
    channels = {"mono": 1, "stereo": 2, "5.1": 6}[layout]
    samples = chord(rate, channels)
    path = encode(tmp_path / f"a.{extension}", codec, samples, rate, form=form, layout=layout)
    info = inspect_audio(path)
    found, warnings = warned(path)
    assert warnings == []
    assert (info.sample_rate, info.channels) == (rate, channels)
    assert abs(found.shape[1] - len(samples[0])) < 4000  # codecs pad to whole frames
    if kind != "ac3":  # its channels come in another order, and the fourth has no highs
        spectrum = np.abs(np.fft.rfft(found[0, 4000:-4000] * np.hanning(found.shape[1] - 8000)))
        assert np.argmax(spectrum) * rate / (found.shape[1] - 8000) == pytest.approx(440, abs=3)
        assert np.abs(found[0, 4000:-4000]).max() == pytest.approx(0.3, rel=0.5)


@pytest.mark.parametrize("kind", LOSSLESS)
@pytest.mark.parametrize("bits", [16, 24])
def test_lossless_files_are_read_to_the_bit_in_their_own_depth(tmp_path, kind, bits):
    if (kind, bits) == ("TTA", 24):
        pytest.skip("FFmpeg's encoder takes 24 bits in another format")
    values = np.random.default_rng(0).integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (2, 9000))
    container = (values << (16 if bits == 16 else 32) - bits).astype(np.int16 if bits == 16 else np.int32)
    codec = {"ALAC": "alac", "WavPack": "wavpack", "TTA": "tta"}.get(kind, "flac")
    form = ("s16" if bits == 16 else "s32") + ("p" if codec in ("alac", "wavpack") else "")
    path = encode(tmp_path / f"a.{LOSSLESS[kind]}", codec, container, RATE, form=form, layout="stereo")
    assert inspect_audio(path).subtype == f"PCM_{bits}"
    found, warnings = warned(path)
    np.testing.assert_array_equal(found * 2.0 ** (bits - 1), values)
    assert warnings == []


@pytest.mark.parametrize("name", ["a.wav", "a.raw", "a", "a.mp4.txt"])
def test_a_film_under_any_name_gives_its_sound(tmp_path, name):
    path = encode(tmp_path / "a.mp4", "aac", chord(RATE, 2), RATE, form="fltp", layout="stereo")
    path.rename(tmp_path / name)
    assert inspect_audio(tmp_path / name).format == "MOV"


def test_the_length_of_a_stream_that_does_not_say_is_counted(tmp_path):
    path = encode(tmp_path / "a.webm", "libopus", chord(RATE, 2), RATE, form="flt", layout="stereo")
    assert inspect_audio(path).length == warned(path)[0].shape[1] == RATE


def test_every_pass_over_a_coded_file_gives_the_same_samples(tmp_path):
    path = encode(tmp_path / "a.m4a", "aac", chord(RATE, 2), RATE, form="fltp", layout="stereo")
    np.testing.assert_array_equal(warned(path)[0], warned(path)[0])


def test_a_playlist_does_not_make_ffmpeg_open_other_files(tmp_path):
    encode(tmp_path / "secret.aac", "aac", chord(RATE, 2), RATE, form="fltp", layout="stereo")
    (tmp_path / "list.m3u8").write_text(
        "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nsecret.aac\n#EXT-X-ENDLIST\n"
    )
    (tmp_path / "list.txt").write_text("ffconcat version 1.0\nfile secret.aac\n")
    for name in ("list.m3u8", "list.txt"):
        with pytest.raises(SeparatorError, match="is not audio that can be read"):
            inspect_audio(tmp_path / name)


def test_a_film_without_sound_is_refused(tmp_path):
    with av.open(str(tmp_path / "mute.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=25)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        for _ in range(5):
            frame = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    with pytest.raises(SeparatorError, match=r"mute\.mp4 is not audio that can be read"):
        inspect_audio(tmp_path / "mute.mp4")


@pytest.mark.parametrize("subtype", ["ULAW", "ALAW"])
def test_companded_files_are_read(tmp_path, subtype):
    samples = chord(8000, 1)
    soundfile.write(tmp_path / "a.wav", samples.T, 8000, subtype=subtype)
    np.testing.assert_allclose(read_audio(tmp_path / "a.wav").waveform, samples, atol=0.01)


@pytest.mark.parametrize("container", ["WAV", "WAVEX", "RF64", "W64", "AIFF", "CAF", "AU"])
@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_24", "PCM_32", "FLOAT"])
def test_every_container_of_plain_samples_is_read_without_a_warning(tmp_path, container, subtype):
    samples = np.random.default_rng(0).uniform(-0.9, 0.9, (1001, 3))
    soundfile.write(tmp_path / "a", samples, 44_100, subtype=subtype, format=container)
    expected = soundfile.read(tmp_path / "a", always_2d=True)[0].T
    found, warnings = warned(tmp_path / "a")
    np.testing.assert_array_equal(found, expected)
    assert warnings == []


SIZES = {
    "zero": (0, 0),
    "all ones": (0xFFFFFFFF, 0xFFFFFFFF),
    "only the data's all ones": (None, 0xFFFFFFFF),
    "longer": (99_999, 99_999),
    "shorter": (1036, 1000),
    "modulo 4 GB": (None, 4),
}


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "FLOAT", "ULAW"])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_wav_with_a_wrong_size_is_read_to_its_end_with_one_warning(tmp_path, sizes, subtype):
    samples = np.random.default_rng(0).uniform(-0.9, 0.9, (4000, 2))
    soundfile.write(tmp_path / "a.wav", samples, 8000, subtype=subtype)
    expected = soundfile.read(tmp_path / "a.wav", always_2d=True)[0].T
    content = bytearray((tmp_path / "a.wav").read_bytes())
    place = content.find(b"data") + 4
    for at, size in zip((4, place), SIZES[sizes], strict=True):
        if size is not None:
            content[at : at + 4] = struct.pack("<I", size)
    (tmp_path / "a.wav").write_bytes(content)
    found, warnings = warned(tmp_path / "a.wav")
    np.testing.assert_array_equal(found, expected)
    assert len(warnings) == 1
    assert "the file holds 4000; what the file holds is read" in warnings[0]


@pytest.mark.parametrize("container", ["AIFF", "W64", "RF64"])
@pytest.mark.parametrize("stated", [0, 1000])
def test_other_containers_with_a_wrong_size_are_read_to_their_end(tmp_path, container, stated):
    samples = np.random.default_rng(0).uniform(-0.9, 0.9, (4000, 1))
    soundfile.write(tmp_path / "a", samples, 8000, subtype="PCM_16", format=container)
    expected = soundfile.read(tmp_path / "a", always_2d=True)[0].T
    content = bytearray((tmp_path / "a").read_bytes())
    if container == "AIFF":
        place = content.find(b"SSND") + 4
        content[place : place + 4] = struct.pack(">I", stated + 8)
    elif container == "RF64":
        place = content.find(b"ds64") + 16
        content[place : place + 8] = struct.pack("<Q", stated)
    else:
        place = content.find(b"data") + 16
        content[place : place + 8] = struct.pack("<Q", stated + 24)
    (tmp_path / "a").write_bytes(content)
    found, warnings = warned(tmp_path / "a")
    np.testing.assert_array_equal(found, expected)
    assert len(warnings) == 1


@pytest.mark.parametrize(
    "tail", [b"LIST\x04\0\0\0INFO", b"\0LIST\x04\0\0\0INFO", b"TAG" + b"x" * 125, bytes(500), b"x"]
)
def test_what_follows_the_samples_is_not_read_as_samples(tmp_path, tail):
    soundfile.write(tmp_path / "a.wav", np.full(4000, 0.5), 8000, subtype="PCM_16")
    with (tmp_path / "a.wav").open("ab") as file:
        file.write(tail)
    found, warnings = warned(tmp_path / "a.wav")
    assert found.shape == (1, 4000)
    assert warnings == []


@pytest.mark.parametrize("kind", ["WAV", "AIFF", "W64", "FLAC", "OGG", "MP3", "CAF", "m4a", "webm"])
def test_a_truncated_download_is_read_as_far_as_it_goes_or_refused_in_one_line(tmp_path, kind):
    samples = chord(RATE, 2, 3.0)
    if kind == "m4a":
        path = encode(tmp_path / "a.m4a", "aac", samples, RATE, form="fltp", layout="stereo")
    elif kind == "webm":
        path = encode(tmp_path / "a.webm", "libopus", samples, RATE, form="flt", layout="stereo")
    else:
        path = tmp_path / "a.bin"
        soundfile.write(path, samples.T, RATE, format=kind)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 6 // 10])
    if kind == "m4a":  # its index is at the end
        with pytest.raises(SeparatorError, match="is not audio that can be read"):
            warned(path)
        return
    found, warnings = warned(path)
    assert 0.3 * samples.shape[1] < found.shape[1] < 0.7 * samples.shape[1]
    assert len(warnings) == 1 or kind == "webm"  # a web stream does not say how long it is


def test_a_part_is_what_the_whole_has_there(tmp_path):
    samples = np.random.default_rng(0).uniform(-0.9, 0.9, (30_000, 2))
    for name in ("a.wav", "a.flac", "a.ogg"):
        soundfile.write(tmp_path / name, samples, 10_000 if name != "a.ogg" else 8000)
        whole, _ = warned(tmp_path / name)
        for start, duration in ((0.0, 0.5), (1.0, None), (1.2345, 1.0), (1.5, 99.0)):
            info = inspect_audio(tmp_path / name, start=start, duration=duration)
            first = round(start * info.sample_rate)
            last = None if duration is None else first + round(duration * info.sample_rate)
            part = np.concatenate(list(read_blocks(info, 777)), 1)
            np.testing.assert_array_equal(part, whole[:, first:last])
            assert info.length == part.shape[1]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"start": -1.0}, r"start=-1\.0 is no time in a file; pass seconds from 0"),
        ({"start": float("nan")}, "start=nan is no time"),
        ({"duration": 0.0}, r"duration=0\.0 is no duration"),
        ({"duration": float("inf")}, "duration=inf is no duration"),
        ({"start": 5.0}, r"no samples from start=5\.0 s on \(it has 1\.00 s\)"),
    ],
)
def test_a_part_that_cannot_be_is_refused(tmp_path, options, complaint):
    soundfile.write(tmp_path / "a.wav", np.zeros(8000), 8000)
    with pytest.raises(SeparatorError, match=complaint):
        inspect_audio(tmp_path / "a.wav", **options)


def test_repair_takes_what_is_no_number_as_zero_and_says_how_often(tmp_path):
    samples = np.full((300_000, 2), 0.25, np.float32)
    samples[290_000, 1], samples[299_000, 0], samples[3, 0] = np.nan, np.inf, -np.inf
    soundfile.write(tmp_path / "bad.wav", samples, 48_000, subtype="FLOAT")
    warnings: list[str] = []
    info = inspect_audio(tmp_path / "bad.wav", repair=True, warn=warnings.append)
    found = np.concatenate(list(read_blocks(info)), 1)
    np.testing.assert_array_equal(found, np.where(np.isfinite(samples.T), samples.T, 0))
    assert len(warnings) == 1
    assert "3 samples of NaN or inf taken as 0, first -inf at sample 3 of channel 1" in warnings[0]


@pytest.mark.parametrize(("rate", "channels"), [(10, 1), (2_000_000, 1), (8000, 65)])
def test_rates_and_channels_of_no_recording_are_refused(tmp_path, rate, channels):
    soundfile.write(tmp_path / "a.wav", np.zeros((100, channels)), rate)
    with pytest.raises(SeparatorError, match="pass a file of 1000 to 768000 Hz with at most 64 channels"):
        inspect_audio(tmp_path / "a.wav")
