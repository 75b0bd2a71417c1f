from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from separator import fuss
from separator.errors import SeparatorError
from separator.fuss import check_fuss_split, read_fuss_examples

LENGTH = 800
SOURCES = ("background0_sound", "foreground0_sound", "foreground1_sound", "foreground2_sound")


def write_split(root: Path, counts: list[int], *, zero_files: bool = True, listing: bool = True) -> None:
    """A split ``test`` with one mixture for each count; source k has the constant value (k + 1) / 16."""
    lines = []
    for number, count in enumerate(counts):
        name = f"test/example{number:04d}"
        (root / f"{name}_sources").mkdir(parents=True)
        names = [f"{name}.wav"]
        for k in range(4 if zero_files else count):
            value = (k + 1) / 16 if k < count else 0.0
            names.append(f"{name}_sources/{SOURCES[k]}.wav")
            write(root / names[-1], value)
        write(root / names[0], sum((k + 1) / 16 for k in range(count)))
        lines.append("\t".join(names))
    if listing:
        (root / "test_example_list.txt").write_text("\n".join(lines) + "\n")


def write(path: Path, value: float, length: int = LENGTH, rate: int = 16_000) -> None:
    soundfile.write(path, np.full(length, value, np.float32), rate, subtype="PCM_16")


@pytest.mark.parametrize("zero_files", [True, False])
@pytest.mark.parametrize("listing", [True, False])
def test_sources_are_counted_by_energy_not_by_files(tmp_path: Path, zero_files: bool, listing: bool) -> None:
    write_split(tmp_path, [1, 3, 4], zero_files=zero_files, listing=listing)
    examples = read_fuss_examples(tmp_path, "test")
    assert [example.sources.shape for example in examples] == [(1, LENGTH), (3, LENGTH), (4, LENGTH)]
    assert examples[1].sources[:, 0].tolist() == [1 / 16, 2 / 16, 3 / 16]
    assert examples[1].mixture[0].item() == 6 / 16
    assert (examples[1].name, examples[1].sample_rate) == ("example0001", 16_000)


def test_an_example_may_have_no_sound_at_all(tmp_path: Path) -> None:
    write_split(tmp_path, [0])
    (example,) = read_fuss_examples(tmp_path, "test")
    assert example.sources.shape == (0, LENGTH)
    assert not example.mixture.any()


def test_sources_sum_to_the_mixture_file(tmp_path: Path) -> None:
    write_split(tmp_path, [2])
    (example,) = read_fuss_examples(tmp_path, "test")
    assert torch.equal(example.sources.sum(0), example.mixture)


def test_a_slice_is_a_part_of_the_split(tmp_path: Path) -> None:
    write_split(tmp_path, [1, 2, 3])
    part = read_fuss_examples(tmp_path, "test")[1:]
    assert len(part) == 2
    assert [len(example.sources) for example in part] == [2, 3]


def test_the_optional_table_marks_held_out_packages(tmp_path: Path) -> None:
    write_split(tmp_path, [1, 2, 1])
    assert [example.package_heldout for example in read_fuss_examples(tmp_path, "test")] == [None] * 3
    rows = "mixture,n_sources,package_heldout\ntest/example0000.wav,1,1\nexample0001.wav,2,False\n"
    (tmp_path / "test_examples.csv").write_text(rows)
    flags = [example.package_heldout for example in read_fuss_examples(tmp_path, "test")]
    assert flags == [True, False, None]


def test_a_table_without_the_column_marks_nothing(tmp_path: Path) -> None:
    write_split(tmp_path, [1])
    (tmp_path / "test_examples.csv").write_text("mixture,n_sources\ntest/example0000.wav,1\n")
    assert read_fuss_examples(tmp_path, "test")[0].package_heldout is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,package_heldout\n", "no 'mixture'"),
        ("mixture,package_heldout\ntest/example0000.wav,maybe\n", "package_heldout='maybe'"),
        ("mixture,package_heldout\ntest/example0000.wav\n", "package_heldout=''"),
    ],
)
def test_an_unusable_table_is_refused(tmp_path: Path, text: str, message: str) -> None:
    write_split(tmp_path, [1])
    (tmp_path / "test_examples.csv").write_text(text)
    with pytest.raises(SeparatorError, match=message):
        read_fuss_examples(tmp_path, "test")


def test_a_missing_folder_or_split_is_named(tmp_path: Path) -> None:
    with pytest.raises(SeparatorError, match=r"no folder .*nowhere"):
        read_fuss_examples(tmp_path / "nowhere", "test")
    with pytest.raises(SeparatorError, match=r"split='validation' in .* has no examples"):
        read_fuss_examples(tmp_path, "validation")


def test_a_listed_file_that_does_not_exist_is_named_with_its_line(tmp_path: Path) -> None:
    write_split(tmp_path, [1, 2])
    (tmp_path / "test/example0001_sources/foreground0_sound.wav").unlink()
    with pytest.raises(SeparatorError, match=r"example0001_sources/foreground0_sound.wav', line 2"):
        read_fuss_examples(tmp_path, "test")


def test_a_source_of_another_length_or_rate_is_refused(tmp_path: Path) -> None:
    write_split(tmp_path, [1])
    source = tmp_path / "test/example0000_sources/background0_sound.wav"
    write(source, 0.1, length=LENGTH - 1)
    with pytest.raises(SeparatorError, match=r"background0_sound.wav of example0000.wav has 799 samples"):
        read_fuss_examples(tmp_path, "test")[0]
    write(source, 0.1, rate=8000)
    with pytest.raises(SeparatorError, match="at 8000 Hz"):
        read_fuss_examples(tmp_path, "test")[0]


def test_a_broken_or_stereo_file_is_refused(tmp_path: Path) -> None:
    write_split(tmp_path, [1])
    mixture = tmp_path / "test/example0000.wav"
    mixture.write_text("this is no audio")
    with pytest.raises(SeparatorError, match=r"example0000.wav"):
        read_fuss_examples(tmp_path, "test")[0]
    soundfile.write(mixture, np.zeros((LENGTH, 2)), 16_000)
    with pytest.raises(SeparatorError, match="2 channels; the FUSS layout is mono"):
        read_fuss_examples(tmp_path, "test")[0]


def test_folders_are_read_by_number_whatever_its_digits(tmp_path: Path) -> None:
    write_split(tmp_path, [1, 1, 1], listing=False)
    for old, new in ((0, "example0002"), (1, "example00010"), (2, "example0001")):
        (tmp_path / f"test/example000{old}.wav").rename(tmp_path / f"test/new_{new}.wav")
        (tmp_path / f"test/example000{old}_sources").rename(tmp_path / f"test/new_{new}_sources")
    names = [example.name for example in read_fuss_examples(tmp_path, "test")]
    assert names == ["new_example0001", "new_example0002", "new_example00010"]


def test_sources_without_sound_are_dropped_and_counted(tmp_path: Path) -> None:
    write_split(tmp_path, [1, 4, 0])
    assert [example.n_silent for example in read_fuss_examples(tmp_path, "test")] == [3, 0, 4]


def test_a_mixture_without_a_folder_of_sources_is_named(tmp_path: Path) -> None:
    write_split(tmp_path, [1, 1], listing=False)
    (tmp_path / "test/example0001_sources").rename(tmp_path / "test/elsewhere")
    with pytest.raises(SeparatorError, match=r"example0001.wav has no folder example0001_sources/"):
        read_fuss_examples(tmp_path, "test")


def test_another_rate_or_length_than_asked_for_is_refused(tmp_path: Path) -> None:
    write_split(tmp_path, [1])
    assert len(read_fuss_examples(tmp_path, "test", sample_rate=16_000, n_samples=LENGTH)[:1][0].sources) == 1
    for wanted in ({"sample_rate": 8000}, {"n_samples": LENGTH + 1}):
        examples = read_fuss_examples(tmp_path, "test", **wanted)
        with pytest.raises(SeparatorError, match=r"0000.wav has 800 samples at 16000 Hz, not 80[01] at"):
            examples[0]


def test_audio_is_read_when_an_example_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_split(tmp_path, [1, 2, 3])
    asked: list[str] = []
    real = fuss.read_audio
    monkeypatch.setattr(fuss, "read_audio", lambda path: asked.append(path.name) or real(path))
    examples = read_fuss_examples(tmp_path, "test")
    assert (len(examples), asked) == (3, [])
    assert len(examples[2].sources) == 3
    assert asked[0] == "example0002.wav" and len(asked) == 5


def check(root: Path, n_examples: int | None = None) -> list[str]:
    return check_fuss_split(root, "test", n_examples=n_examples, n_samples=LENGTH)


@pytest.mark.parametrize("zero_files", [True, False])
def test_nothing_is_wrong_with_a_whole_split(tmp_path: Path, zero_files: bool) -> None:
    write_split(tmp_path, [1, 2, 4], zero_files=zero_files)
    assert check(tmp_path, 3) == []


def test_every_missing_and_left_over_file_is_one_line(tmp_path: Path) -> None:
    write_split(tmp_path, [1, 2, 1])
    (tmp_path / "test/example0000.wav").unlink()
    (tmp_path / "test/example0001_sources/foreground1_sound.wav").unlink()
    write(tmp_path / "test/example0002_sources/foreground3_sound.wav", 0.1)
    write(tmp_path / "test/example0009.wav", 0.1)
    assert check(tmp_path, 5) == [
        "test/example0000.wav is missing",
        "test/example0001_sources/foreground1_sound.wav is missing",
        "test/example0002_sources/foreground3_sound.wav is not in test_example_list.txt",
        "test/example0009.wav is not in test_example_list.txt",
        "test/example0000_sources/ has no mixture",
        "test has 3 of 5 examples; without number 0, 3, 4",
    ]


def test_files_of_another_kind_are_one_line_each(tmp_path: Path) -> None:
    write_split(tmp_path, [1, 1, 1, 1])
    sources = [tmp_path / f"test/example000{k}_sources/background0_sound.wav" for k in range(4)]
    write(sources[0], 0.1, length=LENGTH - 1)
    write(sources[1], 0.1, rate=8000)
    soundfile.write(sources[2], np.zeros((LENGTH, 2)), 16_000)
    sources[3].write_text("this is no audio")
    found = check(tmp_path)
    assert [line.startswith(str(path)) for line, path in zip(found, sources, strict=True)] == [True] * 4
    for line, part in zip(found, ("799 samples", "8000 Hz", "2 channels", "cannot be read"), strict=True):
        assert part in line


def test_a_missing_split_or_list_is_one_line(tmp_path: Path) -> None:
    assert check(tmp_path) == [f"test/ is missing in {tmp_path}"]
    write_split(tmp_path, [1], listing=False)
    assert check(tmp_path) == ["test_example_list.txt is missing or empty"]
