import time
from pathlib import Path

import numpy as np
import pytest
import soundfile

from separator.audio import AudioInfo
from separator.errors import SeparatorError
from separator.formats import Coding
from separator.naming import StemNames
from separator.stems import StemSet, check_writable
from separator.writing import write_audio


def info(subtype: str, channels: int = 2, length: int = 1000) -> AudioInfo:
    return AudioInfo(Path("mix.wav"), 16_000, channels, length, "WAV", subtype)


def stem_set(folder: Path, n_sources: int, of: AudioInfo, format: str = "wav", **options) -> StemSet:
    """Stems that go to ``folder/sourceN.wav``."""
    names = StemNames(Path("mix.wav"), folder, "{source}", f".{format}")
    return StemSet(names, n_sources, of, Coding(format, of.subtype), **options)


def written(folder: Path, n_sources: int, dtype: str) -> list[np.ndarray]:
    names = [f"source{k + 1}.wav" for k in range(n_sources)] + ["residual.wav"]
    return [soundfile.read(folder / name, dtype=dtype, always_2d=True)[0].T for name in names]


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32"])
def test_integer_stems_add_up_to_the_input_to_the_bit(tmp_path, subtype):
    rng = np.random.default_rng(0)
    bits = int(subtype.strip("PCMU_"))
    mixture = rng.integers(-(2 ** (bits - 2)), 2 ** (bits - 2), (2, 1000)) / 2.0 ** (bits - 1)
    shares = rng.dirichlet([1, 1, 1, 1], (2, 1000)).transpose(2, 0, 1)[:3]
    with stem_set(tmp_path / "mix", 3, info(subtype)) as stems:
        stems.write(mixture[:, :400], (shares * mixture)[..., :400])
        stems.write(mixture[:, 400:], (shares * mixture)[..., 400:])
        assert stems.fitting_gain == 1
        stems.publish()
    assert soundfile.info(tmp_path / "mix" / "source1.wav").subtype == subtype
    np.testing.assert_array_equal(sum(written(tmp_path / "mix", 3, "float64")), mixture)


def test_float_stems_are_never_scaled(tmp_path):
    mixture = np.array([[1.8, -1.8, 0.5]])
    with stem_set(tmp_path / "mix", 1, info("FLOAT", channels=1)) as stems:
        stems.write(mixture, 1.5 * mixture[None])
        assert stems.fitting_gain == 1
        stems.publish()
    source, residual = written(tmp_path / "mix", 1, "float64")
    np.testing.assert_allclose(source, 1.5 * mixture, rtol=1e-7)
    np.testing.assert_allclose(source + residual, mixture, atol=1e-7)


def test_one_gain_for_all_makes_clipping_stems_fit(tmp_path):
    mixture = np.array([[0.9, -0.9, 0.5, 0.1]])
    estimates = np.array([[[1.35, -1.35, 0.2, 0.1]], [[-0.4, 0.3, 0.2, 0.0]]])
    with stem_set(tmp_path / "mix", 2, info("PCM_16", channels=1)) as stems:
        stems.write(mixture, estimates)
        gain = stems.fitting_gain
    assert gain == pytest.approx(1 / 1.35, rel=1e-3)
    with stem_set(tmp_path / "mix", 2, info("PCM_16", channels=1), gain=gain) as stems:
        stems.write(mixture, estimates)
        assert stems.fitting_gain == gain
        stems.publish()
    sources_and_residual = written(tmp_path / "mix", 2, "float64")
    np.testing.assert_allclose(sources_and_residual[0], gain * estimates[0], atol=2**-15)
    np.testing.assert_allclose(sum(sources_and_residual), gain * mixture, atol=2**-15)


def test_sources_are_numbered_by_falling_energy_and_levels_are_those_of_the_files(tmp_path):
    constants = np.array([0.1, 0.4, 0.2])[:, None, None] * np.ones((3, 2, 50))
    with stem_set(tmp_path / "mix", 3, info("FLOAT")) as stems:
        stems.write(constants.sum(0), constants)
        order, sources, residual = stems.publish()
    assert order == [1, 2, 0]
    assert [stem.file.name for stem in sources] == ["source1.wav", "source2.wav", "source3.wav"]
    assert [stem.level_db for stem in sources] == pytest.approx([20 * np.log10(x) for x in (0.4, 0.2, 0.1)])
    assert sources[0].energy == pytest.approx(0.16 * 100)
    assert residual.level_db is None or residual.level_db < -140
    assert [float(stem[0, 0]) for stem in written(tmp_path / "mix", 3, "float64")[:3]] == pytest.approx(
        [0.4, 0.2, 0.1]
    )


def test_a_run_that_fails_leaves_nothing_behind(tmp_path):
    with pytest.raises(RuntimeError), stem_set(tmp_path / "mix", 2, info("PCM_16")) as stems:
        stems.write(np.zeros((2, 10)), np.zeros((2, 2, 10)))
        assert len(list((tmp_path / "mix").iterdir())) == 3
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_stems_of_an_earlier_run_are_kept_until_the_new_ones_are_whole_and_then_replaced(tmp_path):
    folder = tmp_path / "mix"
    for n_sources, value in ((3, 0.1), (1, 0.3)):
        with stem_set(folder, n_sources, info("FLOAT"), overwrite=True) as stems:
            stems.write(np.full((2, 10), value), np.full((n_sources, 2, 10), value))
            if n_sources == 1:
                assert soundfile.read(folder / "source3.wav")[0][0, 0] == pytest.approx(0.1)
            stems.publish()
    (folder / "source notes.txt").write_text("mine")
    assert sorted(item.name for item in folder.iterdir()) == [
        "residual.wav",
        "source notes.txt",
        "source1.wav",
    ]
    assert soundfile.read(folder / "source1.wav")[0][0, 0] == pytest.approx(0.3)


def test_an_output_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SeparatorError, match=r"file cannot be written \(File exists\); pass another"):
        check_writable(tmp_path / "file")
    with pytest.raises(SeparatorError, match=r"below cannot be written \(Not a directory\)"):
        check_writable(tmp_path / "file" / "below")


def test_a_written_waveform_reads_back_and_is_not_overwritten(tmp_path):
    waveform = np.random.default_rng(0).uniform(-0.9, 0.9, (2, 100)).astype(np.float32)
    write_audio(tmp_path / "a.wav", waveform, 8000)
    np.testing.assert_array_equal(soundfile.read(tmp_path / "a.wav", dtype="float32")[0].T, waveform)
    with pytest.raises(SeparatorError, match=r"a\.wav exists already"):
        write_audio(tmp_path / "a.wav", waveform, 8000)
    stem = write_audio(tmp_path / "a.wav", waveform, 8000, subtype="PCM_16", overwrite=True)
    np.testing.assert_allclose(soundfile.read(tmp_path / "a.wav")[0].T, waveform, atol=2**-16 + 1e-9)
    assert stem.energy == pytest.approx(float(np.square(waveform).sum()), rel=1e-3)


def test_a_waveform_too_loud_for_integers_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(SeparatorError, match=r"peak=1\.2000 does not fit PCM_16"):
        write_audio(tmp_path / "a.wav", np.array([[0.0, -1.2]]), 8000, subtype="PCM_16")
    assert list(tmp_path.iterdir()) == []


def test_full_scale_samples_do_not_wrap_around(tmp_path):
    write_audio(tmp_path / "a.wav", np.array([[-1.0, 1 - 2**-15]]), 8000, subtype="PCM_16")
    assert soundfile.read(tmp_path / "a.wav", dtype="int16")[0].tolist() == [-32768, 32767]


@pytest.mark.parametrize("subtype", ["FLOAT", "DOUBLE", "PCM_16"])
def test_files_written_at_another_time_have_the_same_bytes(tmp_path: Path, subtype: str) -> None:
    samples = np.random.default_rng(0).uniform(-0.5, 0.5, (2, 1000)).astype(np.float32)
    for name in ("first.wav", "second.wav"):
        write_audio(tmp_path / name, samples, 16_000, subtype=subtype)
        time.sleep(1.1 if subtype == "FLOAT" and name == "first.wav" else 0)  # the time has whole seconds
    assert (tmp_path / "first.wav").read_bytes() == (tmp_path / "second.wav").read_bytes()
    assert soundfile.read(tmp_path / "first.wav")[0].shape == (1000, 2)


def test_a_file_that_is_no_stem_is_not_replaced_though_it_comes_meanwhile(tmp_path):
    with stem_set(tmp_path / "mix", 1, info("FLOAT"), overwrite=True) as stems:
        stems.write(np.zeros((2, 10)), np.zeros((1, 2, 10)))
        (tmp_path / "mix" / "source1.wav").write_text("mine")
        with pytest.raises(
            SeparatorError, match=r"source1\.wav is no wav file, so it is not replaced; move it"
        ):
            stems.publish()
    assert [path.name for path in (tmp_path / "mix").iterdir()] == ["source1.wav"]
    assert (tmp_path / "mix" / "source1.wav").read_text() == "mine"
