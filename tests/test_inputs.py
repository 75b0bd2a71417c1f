import io
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile

from separator.audio import inspect_audio
from separator.inputs import EXISTING, HIDDEN, NO_AUDIO, STEMS, Input, choose, find_inputs
from separator.naming import StemNames


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The test runs in an empty folder; paths are relative to it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(*names: str, seconds: float = 0.01) -> None:
    """Noise in wav files, whatever their names."""
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        samples = np.random.default_rng(0).normal(0, 0.1, round(8000 * seconds))
        soundfile.write(name, samples, 8000, format="WAV", subtype="PCM_16")


def find(*arguments: str, **options):
    return find_inputs(arguments, check=inspect_audio, **options)


def paths(selection) -> list[str]:
    return [str(item.path) for item in selection.inputs]


def touch(*files: Path) -> None:
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def test_files_keep_their_order_and_are_taken_once(here):
    write("b.wav", "a.wav", "c/d.wav")
    found = find("b.wav", "a.wav", "./b.wav", str(here / "a.wav"), "c/../a.wav", "c/d.wav")
    assert paths(found) == ["b.wav", "a.wav", "c/d.wav"]
    assert found.errors == []


def test_a_folder_gives_its_own_files_and_recursively_those_below_in_natural_order(here):
    write("m/take 10.wav", "m/take 2.wav", "m/Take 1.wav", "m/sub 2/x.wav", "m/sub 10/deep/x.wav")
    assert paths(find("m")) == ["m/Take 1.wav", "m/take 2.wav", "m/take 10.wav"]
    found = find("m", recursive=True)
    assert paths(found) == [
        *("m/sub 2/x.wav", "m/sub 10/deep/x.wav", "m/Take 1.wav", "m/take 2.wav", "m/take 10.wav"),
    ]
    assert [item.folder for item in found.inputs] == ["sub 2", "sub 10/deep", "", "", ""]


def test_a_file_named_and_found_in_its_folder_is_taken_once(here):
    write("m/a.wav", "m/b.wav")
    assert paths(find("m/b.wav", "m", "m/a.wav")) == ["m/b.wav", "m/a.wav"]


def test_the_content_decides_what_is_audio_in_a_folder(here):
    write("m/good.wav", "m/no extension", "m/LOUD.WAV", "m/music.txt")
    Path("m/notes.txt").write_text("words, ünïcode too\n" * 200)
    Path("m/empty").touch()
    Path("m/.hidden.wav").touch()
    Path("m/noise.bin").write_bytes(bytes(range(256)) * 8)
    Path("m/cover.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0" * 64)
    found = find("m")
    assert paths(found) == ["m/good.wav", "m/LOUD.WAV", "m/music.txt", "m/no extension"]
    assert found.errors == []
    assert found.left_out == {NO_AUDIO: 4, HIDDEN: 1}


@pytest.mark.parametrize("content", [b"", b"<html>not found</html>", b"RIFF\x24\0\0\0WAVE"])
def test_a_broken_file_with_the_extension_of_audio_is_a_failed_input(here, content):
    write("m/good.wav")
    Path("m/bad.FLAC").write_bytes(content)
    found = find("m")
    assert paths(found) == ["m/good.wav"]
    assert [str(error).split()[0] for error in found.errors] == ["m/bad.FLAC"]
    assert found.left_out.total() == 0


def test_a_broken_link_to_audio_is_a_failed_input(here):
    write("m/good.wav")
    Path("m/gone.wav").symlink_to("nowhere.wav")
    found = find("m")
    assert (paths(found), len(found.errors)) == (["m/good.wav"], 1)
    assert "m/gone.wav does not exist" in str(found.errors[0])


def test_a_pipe_in_a_folder_is_left_out_and_a_named_one_refused_without_waiting(here):
    write("m/good.wav")
    os.mkfifo("m/pipe.wav")
    assert paths(find("m")) == ["m/good.wav"]
    found = find("m/pipe.wav")
    assert found.inputs == []
    assert len(found.errors) == 1


def test_links_to_folders_are_not_followed_so_there_is_no_endless_loop(here):
    write("m/sub/good.wav")
    Path("m/sub/up").symlink_to("..")
    assert paths(find("m", recursive=True)) == ["m/sub/good.wav"]


def test_a_folder_without_audio_is_an_error(here):
    Path("m/sub").mkdir(parents=True)
    Path("m/notes.txt").write_text("words")
    for recursive in (False, True):
        found = find("m", recursive=recursive)
        assert found.inputs == []
        assert "m is a folder without audio; pass another folder" in str(found.errors[0])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_an_error(here):
    Path("m").mkdir(mode=0o000)
    assert "m cannot be read (Permission denied)" in str(find("m").errors[0])


@pytest.mark.parametrize("argument", ["", "nope.wav", "x" * 300, "nope/", "*.flac", "a\0b"])
def test_an_argument_that_names_nothing_is_one_line(here, argument):
    found = find(argument)
    assert found.inputs == []
    assert len(found.errors) == 1
    assert len(str(found.errors[0]).splitlines()) == 1


def test_a_pattern_is_expanded_unless_there_is_a_file_of_that_name(here):
    write("a1.wav", "a10.wav", "a2.wav", "sub/a3.wav", "[a1].wav")
    assert paths(find("a*.wav")) == ["a1.wav", "a2.wav", "a10.wav"]
    assert paths(find("**/a3.wav")) == ["sub/a3.wav"]
    assert paths(find("[a1].wav")) == ["[a1].wav"]


def test_a_list_of_paths_is_read_from_stdin_only_where_it_is_asked_for(here):
    write("a b.wav", "c.wav", "d.wav", "m/e.wav")
    shutil.copy("c.wav", "caf\udce9.wav")
    listed = io.BytesIO(b"a b.wav\nc.wav\r\n\nm\ncaf\xe9.wav\nd.wav")
    assert paths(find("d.wav", "-", stdin=listed)) == [
        *("d.wav", "a b.wav", "c.wav", "m/e.wav", "caf\udce9.wav"),
    ]
    untouched = io.BytesIO(b"c.wav\n")
    assert paths(find("d.wav", stdin=untouched)) == ["d.wav"]
    assert untouched.read() == b"c.wav\n"


@pytest.mark.parametrize("listed", [None, io.BytesIO(b""), io.BytesIO(b"\n\n")])
def test_an_empty_list_is_an_error(here, listed):
    found = find("-", stdin=listed)
    assert "- finds no paths on standard input" in str(found.errors[0])


@pytest.mark.parametrize("filename", ["{folder}/{stem}/{source}", "{stem}-{source}", "{source}/{stem}"])
@pytest.mark.parametrize("output", ["m/separated", "m", "."])
def test_stems_of_an_earlier_run_are_no_inputs(here, output, filename):
    write("m/mix.wav", "m/sub/song.wav")
    first = find("m", recursive=True, output_dir=output, filename=filename)
    assert paths(first) == ["m/mix.wav", "m/sub/song.wav"]
    for item in first.inputs:
        names = StemNames(item.path, output, filename, folder=item.folder)
        write(*map(str, [names.source(0), names.source(1), names.residual]))
    again = find("m", recursive=True, output_dir=output, filename=filename)
    assert paths(again) == ["m/mix.wav", "m/sub/song.wav"]
    assert again.left_out[STEMS] == (6 if output.startswith("m") else 0)


def test_stems_of_a_run_with_another_output_folder_are_no_inputs(here):
    write("m/mix.wav", "m/old/mix/source1.wav", "m/old/mix/residual.wav", "m/old/mix/more.wav")
    found = find("m", recursive=True, output_dir="new")
    assert paths(found) == ["m/mix.wav", "m/old/mix/more.wav"]
    assert found.left_out[STEMS] == 2


def test_stems_that_are_named_are_inputs(here):
    write("separated/mix/source1.wav", "separated/mix/residual.wav")
    assert paths(find("separated/mix")) == ["separated/mix/residual.wav", "separated/mix/source1.wav"]
    assert paths(find("separated/mix/source1.wav")) == ["separated/mix/source1.wav"]


def test_inputs_of_one_name_in_two_folders_are_refused_with_a_template_that_keeps_both(here):
    write("a/mix.wav", "b/mix.wav", "b/other.wav")
    inputs = find("a/mix.wav", "b").inputs
    chosen = choose(inputs, output_dir="out")
    assert paths(chosen) == ["a/mix.wav", "b/other.wav"]
    assert len(chosen.errors) == 1
    message = str(chosen.errors[0])
    assert "b/mix.wav and a/mix.wav would both be written to out/mix" in message
    template = message.split("--filename '")[1].split("'")[0]
    assert paths(choose(inputs, output_dir="out", filename=template)) == [
        "a/mix.wav",
        "b/mix.wav",
        "b/other.wav",
    ]


def test_inputs_of_one_name_and_two_extensions_are_refused_with_a_template_that_keeps_both(here):
    write("mix.wav", "mix.flac")
    inputs = find("mix.wav", "mix.flac").inputs
    (error,) = choose(inputs, output_dir="out").errors
    assert "or pass --filename '{name}/{source}'" in str(error)
    assert len(choose(inputs, output_dir="out", filename="{name}/{source}").inputs) == 2


def test_inputs_of_one_name_below_one_folder_keep_their_sub_folders(here):
    write("m/mix.wav", "m/a/mix.wav", "m/a/b/mix.wav")
    chosen = choose(find("m", recursive=True).inputs, output_dir="out")
    assert chosen.errors == []
    written = {StemNames(i.path, "out", folder=i.folder).residual.as_posix() for i in chosen.inputs}
    assert written == {"out/mix/residual.wav", "out/a/mix/residual.wav", "out/a/b/mix/residual.wav"}


def test_existing_stems_are_refused_skipped_or_replaced(here):
    inputs = [Input(Path("a.wav")), Input(Path("b.wav"))]
    touch(Path("out/a/source1.wav"), Path("out/a/residual.wav"))
    refused = choose(inputs, output_dir="out")
    assert (paths(refused), len(refused.errors)) == (["b.wav"], 1)
    skipped = choose(inputs, output_dir="out", skip_existing=True)
    assert (paths(skipped), skipped.errors, skipped.left_out) == (["b.wav"], [], {EXISTING: 1})
    replaced = choose(inputs, output_dir="out", overwrite=True)
    assert (paths(replaced), replaced.errors) == (["a.wav", "b.wav"], [])


def test_stems_without_a_residual_are_of_a_killed_run_and_are_not_skipped(here):
    touch(Path("out/a/source1.wav"))
    chosen = choose([Input(Path("a.wav"))], output_dir="out", skip_existing=True)
    assert chosen.inputs == [Input(Path("a.wav"), overwrite=True)]


def test_skipping_does_not_hide_an_input_that_has_no_stems_of_its_own(here):
    touch(Path("out/mix/residual.wav"))
    chosen = choose(
        [Input(Path("a/mix.wav")), Input(Path("b/mix.wav"))], output_dir="out", skip_existing=True
    )
    assert chosen.left_out == {EXISTING: 1}
    assert len(chosen.errors) == 1


def test_an_input_that_stems_of_another_would_replace_is_kept(here):
    write("mix.wav", "mix/source1.wav")
    inputs = find("mix.wav", "mix/source1.wav").inputs
    chosen = choose(inputs, output_dir=".", overwrite=True)
    assert "stems of mix.wav would replace the input mix/source1.wav" in str(chosen.errors[0])
    assert paths(chosen) == ["mix/source1.wav"]


def test_ten_thousand_names_are_chosen_in_seconds(here):
    inputs = [Input(Path(f"take {k}.wav")) for k in range(10_000)]
    Path("out").mkdir()
    assert len(choose(inputs, output_dir="out", filename="{stem}-{source}").inputs) == 10_000


def test_a_folder_that_vanishes_is_an_error(here):
    write("m/a.wav")

    def vanish(path):
        shutil.rmtree("m", ignore_errors=True)
        return inspect_audio(path)

    found = find_inputs(["m"], check=vanish)
    assert "m/a.wav does not exist" in str(found.errors[0])
