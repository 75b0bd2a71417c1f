import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from separator.errors import SeparatorError
from separator.naming import FORMATS, TEMPLATE, StemNames, check_template

ODD_NAMES = [
    *("..wav", "...wav", ".wav", ".hidden.wav", "a b.c.wav", "-x.wav", "%s{0}{source}.WAV", 'it\'s "so".wav'),
    *(
        "é" * 80 + ".wav",
        "no extension",
        "x" * 216 + ".wav",
        "x" * 220,
        "{stem}.wav",
        "a\nb.wav",
        "\udce9.wav",
    ),
]


def touch(*files: Path) -> None:
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def test_stems_lie_in_a_folder_of_the_inputs_name_and_the_picture_beside_them():
    names = StemNames("music/mix.wav", "out")
    assert names.source(0) == Path("out/mix/source1.wav")
    assert names.source(11) == Path("out/mix/source12.wav")
    assert names.residual == Path("out/mix/residual.wav")
    assert names.picture == Path("out/mix/separation.png")


@pytest.mark.parametrize(
    ("filename", "expected"),
    [
        ("{stem}/{source}", "out/mix/source1.flac"),
        ("{folder}/{stem}/{source}", "out/a/b/mix/source1.flac"),
        ("{name}/{source}", "out/mix.wav/source1.flac"),
        ("{source}/{stem}", "out/source1/mix.flac"),
        ("./{stem} - {source}", "out/mix - source1.flac"),
        ("{{{stem}}}/{source}", "out/{mix}/source1.flac"),
        ("{stem}/{source}.{source}", "out/mix/source1.source1.flac"),
    ],
)
def test_placeholders_are_replaced(filename, expected):
    assert StemNames("mix.wav", "out", filename, ".flac", "a/b").source(0) == Path(expected)


@pytest.mark.parametrize(
    ("filename", "complaint"),
    [
        ("", "has no {source}"),
        ("{stem}", "has no {source}"),
        ("{{source}}", "has no {source}"),
        ("{title}/{source}", "placeholder 'title' that is not known"),
        ("{}/{source}", "placeholder '' that is not known"),
        ("{stem.parent}/{source}", "placeholder 'stem.parent'"),
        ("{stem!r}/{source}", "placeholder 'stem'"),
        ("{stem:>9}/{source}", "placeholder 'stem'"),
        ("{stem/{source}", "is no template"),
        ("{stem}}/{source}", "is no template"),
        ("/tmp/{stem}/{source}", "leaves the output folder"),
        ("../{stem}/{source}", "leaves the output folder"),
        ("{stem}/../{source}", "leaves the output folder"),
        ("{source}/", "ends in a folder"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(filename, complaint):
    with pytest.raises(SeparatorError) as caught:
        check_template(filename)
    assert complaint in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(SeparatorError):
        StemNames("mix.wav", "out", filename)


@pytest.mark.parametrize(
    ("filename", "folder"), [(TEMPLATE, "../x"), (TEMPLATE, "/x"), (".{folder}./{source}", "")]
)
def test_no_folder_leads_out_of_the_output_folder(filename, folder):
    with pytest.raises(SeparatorError, match="leaves the output folder"):
        StemNames("mix.wav", "out", filename, folder=folder)


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_give_a_folder_of_their_own_that_can_be_made(tmp_path, name):
    names = StemNames(name, tmp_path)
    names.check(overwrite=False)
    assert names.residual.parent.parent.resolve() == tmp_path.resolve()
    touch(names.source(0), names.residual, names.picture)
    assert names.present() == sorted([names.source(0), names.residual, names.picture])


@given(
    stem=st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=40),
    filename=st.sampled_from([TEMPLATE, "{stem}-{source}", "{name}/{source}", "{source}/{stem}"]),
)
def test_no_name_leaves_the_output_folder_or_meets_that_of_another_source(stem, filename):
    names = StemNames(f"{stem}.wav", "out", filename)
    files = [names.source(0), names.source(1), names.residual, names.picture]
    assert len(set(files)) == 4
    for file in files:
        assert Path(os.path.normpath(file)).parts[0] == "out"
        assert ".." not in file.parts


@pytest.mark.parametrize(
    "filename", ["{stem}/{source}", "{stem}-{source}", "{source}/{stem}", "{source}/{stem}-{source}"]
)
def test_stems_of_every_format_and_the_picture_are_found_and_nothing_else(tmp_path, filename):
    ours = [
        *(StemNames("a+b.wav", tmp_path, filename, f".{form}").source(11) for form in FORMATS),
        *(StemNames("a+b.wav", tmp_path, filename, f".{form}").residual for form in FORMATS),
        StemNames("a+b.wav", tmp_path, filename).picture,
    ]
    touch(
        *ours,
        StemNames("aab.wav", tmp_path, filename).source(0),
        StemNames("a+b.x", tmp_path, filename, ".txt").source(0),
    )
    for word in ("source0", "sources", "source 1", "residual2", "my residual"):
        touch(StemNames("a+b.wav", tmp_path, filename)._file(word, ".wav"))
    names = StemNames("a+b.wav", tmp_path, filename)
    assert names.present() == sorted(ours)


def test_nothing_is_present_before_the_first_run(tmp_path):
    assert StemNames("mix.wav", tmp_path / "new").present() == []
    StemNames("mix.wav", tmp_path / "new").check(overwrite=False)
    assert not (tmp_path / "new").exists()


def test_stems_of_an_earlier_run_are_refused_unless_they_may_be_overwritten(tmp_path):
    names = StemNames("mix.wav", tmp_path)
    touch(tmp_path / "mix" / "source2.flac", tmp_path / "mix" / "notes.txt")
    with pytest.raises(SeparatorError, match=r"mix holds source2\.flac; pass --overwrite to replace"):
        names.check(overwrite=False)
    names.check(overwrite=True)


@pytest.mark.parametrize("name", ["source1.wav", "source7.flac", "residual.ogg"])
def test_an_input_that_its_own_stems_would_replace_is_refused(tmp_path, name):
    path = tmp_path / Path(name).stem / name
    touch(path)
    with pytest.raises(SeparatorError, match="would replace it"):
        StemNames(path, tmp_path).check(overwrite=True)
    StemNames(path, tmp_path / "out").check(overwrite=False)


def test_a_link_out_of_the_output_folder_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mix").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SeparatorError, match="leads out of"):
        StemNames("mix.wav", tmp_path / "out").check(overwrite=True)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")  # the output folder itself may be one
    StemNames("mix.wav", tmp_path / "link").check(overwrite=False)


def test_a_file_in_place_of_a_folder_and_a_folder_in_place_of_a_stem_are_refused(tmp_path):
    touch(tmp_path / "mix")
    with pytest.raises(SeparatorError, match="mix is a file where the folder of stems would be"):
        StemNames("mix.wav", tmp_path).check(overwrite=True)
    (tmp_path / "a" / "source1.wav").mkdir(parents=True)
    with pytest.raises(SeparatorError, match=r"source1\.wav is a folder where a stem would be"):
        StemNames("a.wav", tmp_path).check(overwrite=True)


@pytest.mark.parametrize("name", ["x" * 250 + ".wav", "é" * 124 + ".wav"])
def test_a_name_too_long_for_the_file_system_is_refused(tmp_path, name):
    with pytest.raises(SeparatorError, match=r"has 2\d\d bytes, more than the 255 of a file system"):
        StemNames(name, tmp_path, "{stem}-{source}").check(overwrite=False)
    StemNames(name, tmp_path).check(overwrite=False)


def test_a_path_too_long_for_the_system_is_refused(tmp_path):
    with pytest.raises(SeparatorError, match="more than the 4095 of a file system"):
        StemNames("mix.wav", tmp_path / "/".join(["x" * 200] * 21)).check(overwrite=False)
