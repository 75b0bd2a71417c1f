import inspect
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import soundfile

import separator
from separator import Separator
from separator.cli import OPTIONS, build_parser, main
from separator.naming import MAX_SLOTS


@pytest.fixture
def mix(tmp_path):
    """A second of noise in stereo, and the test runs in its folder."""
    samples = np.random.default_rng(0).normal(0, 0.1, (8000, 2))
    soundfile.write(tmp_path / "mix.wav", samples, 8000)
    return tmp_path / "mix.wav"


@pytest.fixture
def run(random_model, tmp_path, capsys):
    """Run the command with the random model; return its status, stdout and the lines on stderr."""

    def call(*arguments, model=random_model, output=tmp_path / "out"):
        status = main([*map(str, arguments), "--model", str(model), "--output", str(output)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err.splitlines()

    return call


@pytest.fixture
def no_model(monkeypatch):
    """Fail the test if a model is loaded."""

    def load(*arguments):
        pytest.fail("a model was loaded")

    monkeypatch.setattr(Separator, "load", load)


def in_a_process(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_help_imports_nothing_heavy():
    heavy = ("torch", "numpy", "scipy", "soundfile", "av", "matplotlib", "librosa", "joblib", "distributed")
    code = (
        "import sys, atexit\n"
        f"atexit.register(lambda: print('heavy:', [name for name in {heavy} if name in sys.modules]))\n"
        "from separator.cli import main\nmain(['--help'])"
    )
    done = in_a_process(code)
    assert done.returncode == 0
    assert "--min-existence" in done.stdout
    assert "heavy: []" in done.stdout


def test_refusing_bad_input_imports_no_torch(tmp_path):
    (tmp_path / "empty.wav").touch()
    code = (
        "import sys\nfrom separator.cli import main\n"
        f"print(main([{str(tmp_path / 'empty.wav')!r}]), 'torch' in sys.modules)"
    )
    done = in_a_process(code)
    assert done.stdout.split() == ["1", "False"]
    assert done.stderr.splitlines() == [
        f"separate: error: {tmp_path / 'empty.wav'} is empty (0 bytes); pass a file with audio in it"
    ]


def test_the_command_and_the_api_have_the_same_names_and_defaults():
    arguments = vars(build_parser().parse_args(["mix.wav"]))
    load = inspect.signature(Separator.load).parameters
    separate = inspect.signature(Separator.separate).parameters
    to_files = inspect.signature(Separator.separate_file).parameters
    assert set(to_files) - {"self", "path", "folder", "progress", "warn"} == {*OPTIONS, "overwrite"}
    for name, parameters in [
        ("name_or_dir", load),
        ("device", load),
        ("n_slots", separate),
        ("min_existence", separate),
        *((name, to_files) for name in (*OPTIONS, "overwrite")),
    ]:
        assert arguments[name] == parameters[name].default, name


def test_the_defaults_are_those_of_the_manual():
    arguments = vars(build_parser().parse_args(["mix.wav"]))
    del arguments["inputs"]
    assert arguments == {
        "n_slots": 4,
        "min_existence": None,
        "name_or_dir": "soundscapes",
        "output_dir": "separated",
        "json": False,
        "plot": False,
        "device": "auto",
        "overwrite": False,
        "skip_existing": False,
        "filename": "{folder}/{stem}/{source}",
        "format": "wav",
        "subtype": None,
        "start": 0.0,
        "duration": None,
        "repair": False,
        "recursive": False,
        "n_jobs": 1,
        "scheduler": None,
        "quiet": False,
        "verbose": False,
        "list_models": False,
    }


def test_the_table_names_every_stem_with_existence_level_and_share(run, mix, tmp_path):
    status, out, err = run(mix, "--slots", 2)
    assert (status, err) == (0, [])
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["file", "existence", "level", "share", "of", "energy"]
    assert [row[0] for row in rows[1:]] == [
        str(tmp_path / "out" / "mix" / f"{name}.wav") for name in ("source1", "source2", "residual")
    ]
    assert sum(float(row[-2]) for row in rows[1:]) == pytest.approx(100, abs=0.2)
    level_db = 10 * np.log10(np.square(soundfile.read(rows[1][0])[0]).mean())
    assert float(rows[1][2]) == pytest.approx(level_db, abs=0.06)


def test_json_is_one_object_an_input_and_nothing_else(run, mix, tmp_path):
    soundfile.write(tmp_path / "silence.flac", np.zeros(500), 16_000)
    status, out, err = run(mix, tmp_path / "silence.flac", "--slots", 2, "--json")
    assert (status, err) == (0, ["separate: 2 done, 0 failed, 0 skipped"])
    first, second = map(json.loads, out.splitlines())
    assert list(first) == ["input", "sample_rate", "channels", "seconds", "gain_db", "sources", "residual"]
    assert (first["input"], first["sample_rate"], first["channels"], first["seconds"]) == (
        str(mix),
        8000,
        2,
        1.0,
    )
    assert first["gain_db"] == 0
    assert [list(source) for source in first["sources"]] == [["file", "existence", "level_db"]] * 2
    assert all(0 <= source["existence"] <= 1 for source in first["sources"])
    levels = [source["level_db"] for source in first["sources"]]
    assert levels == sorted(levels, reverse=True)
    assert list(first["residual"]) == ["file", "level_db"]
    assert second["residual"]["level_db"] is None


def test_a_picture_is_saved_on_request_and_goes_with_its_stems(run, mix, tmp_path):
    picture = tmp_path / "out" / "mix" / "separation.png"
    _, out, _ = run(mix, "--plot", "--json")
    assert json.loads(out)["picture"] == str(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    run(mix, "--overwrite")
    assert not picture.exists()


def test_one_bad_input_does_not_stop_the_others(run, mix, tmp_path):
    status, out, err = run(tmp_path / "missing.wav", mix)
    assert status == 1
    assert err == [
        f"separate: error: {tmp_path / 'missing.wav'} does not exist; check the path",
        "separate: 1 done, 1 failed, 0 skipped",
    ]
    assert "residual.wav" in out
    assert (tmp_path / "out" / "mix" / "residual.wav").exists()


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("missing.wav", None, "does not exist; check the path"),
        ("empty.wav", b"", "is empty (0 bytes); pass a file with audio in it"),
        (
            "text.wav",
            b"plain words, no sound\n" * 20,
            "is not audio that can be read (Format not recognised)",
        ),
    ],
)
def test_a_file_that_is_no_audio_is_one_line_before_any_model_runs(
    run, no_model, tmp_path, name, content, complaint
):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    status, out, err = run(tmp_path / name)
    assert (status, out, len(err)) == (1, "", 1)
    assert err[0].startswith(f"separate: error: {tmp_path / name} {complaint}")


def test_a_file_without_samples_is_one_line_before_any_model_runs(run, no_model, tmp_path):
    soundfile.write(tmp_path / "none.wav", np.zeros(0), 16_000)
    status, out, err = run(tmp_path / "none.wav")
    assert (status, out, len(err)) == (1, "", 1)
    assert "has no samples" in err[0]


def test_an_output_folder_that_cannot_be_written_is_one_line_before_any_model_runs(
    run, no_model, mix, tmp_path
):
    (tmp_path / "taken").touch()
    status, out, err = run(mix, output=tmp_path / "taken")
    assert (status, out) == (1, "")
    assert err == [
        f"separate: error: output folder {tmp_path / 'taken'} cannot be written (File exists)"
        "; pass another one"
    ]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_output_folder_is_one_line_before_any_model_runs(run, no_model, mix, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o555)
    status, _, err = run(mix, output=tmp_path / "locked")
    assert (status, len(err)) == (1, 1)
    assert "Permission denied" in err[0]


def test_corrupt_weights_are_one_line_before_any_model_runs(run, no_model, mix, random_model, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.toml").write_bytes((random_model / "config.toml").read_bytes())
    (broken / "model.safetensors").write_bytes((random_model / "model.safetensors").read_bytes()[:-1])
    status, out, err = run(mix, model=broken)
    assert (status, out, len(err)) == (1, "", 1)
    assert "model.safetensors has sha256" in err[0]
    assert err[0].endswith("restore it")


def test_an_unknown_model_is_one_line(run, no_model, mix):
    status, _, err = run(mix, model="nope")
    assert (status, len(err)) == (1, 1)
    assert "no model 'nope'; shipped models are" in err[0]


def test_existing_results_are_kept_unless_overwriting_is_asked_for(run, mix, tmp_path):
    assert run(mix, "--slots", 3)[0] == 0
    before = (tmp_path / "out" / "mix" / "source1.wav").read_bytes()
    status, _, err = run(mix, "--slots", 1)
    assert status == 1
    assert "pass --overwrite to replace" in err[0]
    assert (tmp_path / "out" / "mix" / "source1.wav").read_bytes() == before
    assert run(mix, "--slots", 1, "--overwrite")[0] == 0
    assert not (tmp_path / "out" / "mix" / "source2.wav").exists()


def test_overwriting_leaves_what_is_no_sound_file_with_a_warning(run, mix, tmp_path):
    folder = tmp_path / "out" / "mix"
    assert run(mix, "--slots", 3)[0] == 0
    for name in ("source3.wav", "source9.wav", "residual.flac", "separation.png"):
        (folder / name).write_text("my own notes")
    (folder / "source8.wav").write_bytes((folder / "source2.wav").read_bytes())
    stay = [
        f"separate: warning: {folder / name} is no {kind} file, so it stays beside the new stems"
        for name, kind in [
            ("residual.flac", "flac"),
            ("separation.png", "png"),
            ("source3.wav", "wav"),
            ("source9.wav", "wav"),
        ]
    ]
    gone = f"separate: warning: {folder}: source2.wav, source8.wav of an earlier run removed"
    for options, said in (([], [*stay, gone]), (["--quiet"], stay)):
        status, _, err = run(mix, "--slots", 1, "--overwrite", *options)
        assert (status, err) == (0, said)
        assert (folder / "source9.wav").read_text() == "my own notes"
    assert not (folder / "source2.wav").exists()
    assert not (folder / "source8.wav").exists()


@pytest.mark.parametrize("name", ["residual.wav", "source1.wav", "source2.wav", "separation.png"])
def test_overwriting_refuses_to_replace_what_is_no_sound_file_before_any_model_runs(
    run, no_model, mix, tmp_path, name
):
    file = tmp_path / "out" / "mix" / name
    file.parent.mkdir(parents=True)
    file.write_text("my own notes")
    status, out, err = run(mix, "--slots", 2, "--overwrite", "--plot")
    assert (status, out, file.read_text()) == (1, "", "my own notes")
    assert err == [
        f"separate: error: {file} is no {file.suffix[1:]} file, so it is not replaced; "
        "move it, or pass another output folder"
    ]


def test_digital_silence_has_no_sources_and_exit_status_zero(run, random_model, tmp_path):
    soundfile.write(tmp_path / "silence.wav", np.zeros((16_000, 2)), 16_000)
    status, out, _ = run(tmp_path / "silence.wav", "--min-existence", 0.3)
    assert status == 0
    assert [line.split()[-2:] for line in out.splitlines()[1:]] == [["silent", "-"]]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["mix.wav", "--slots", "0"],
        ["mix.wav", "--slots", "-3"],
        ["mix.wav", "--slots", "65"],
        ["mix.wav", "--slots", "x"],
        ["mix.wav", "--min-existence", "2"],
        ["mix.wav", "--min-existence", "nan"],
        ["mix.wav", "--start", "-1"],
        ["mix.wav", "--start", "nan"],
        ["mix.wav", "--duration", "0"],
        ["mix.wav", "--duration", "-2"],
        ["mix.wav", "--duration", "inf"],
        ["mix.wav", "--format", "doc"],
        ["mix.wav", "--subtype", "PCM_99"],
        ["mix.wav", "--format", "ogg", "--subtype", "PCM_24"],
        ["mix.wav", "--output", ""],
        ["mix.wav", "--filename", "{stem}"],
        ["mix.wav", "--filename", "../{source}"],
        ["mix.wav", "--filename", "{nope}/{source}"],
        ["mix.wav", "--jobs", "0"],
        ["mix.wav", "--scheduler", "somewhere"],
        ["mix.wav", "--jobs", "2", "--scheduler", "tcp://localhost:1"],
        ["mix.wav", "--overwrite", "--skip-existing"],
        ["mix.wav", "--quiet", "--verbose"],
        ["--json"],
        ["mix.wav", "--over"],
        ["--nope"],
        ["mix.wav", "--in\ntwo"],
    ],
)
def test_a_wrong_call_exits_with_two_and_one_line(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("separate: error: ")
    assert line.endswith("; see separate --help")


@pytest.mark.parametrize("option", ["--start", "--duration", "--min-existence"])
def test_what_is_no_number_is_told_so(option, capsys):
    with pytest.raises(SystemExit):
        main(["mix.wav", option, "1s"])
    assert f"argument {option}: '1s' is not a number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("count", "reason"),
    [
        ("0", "0 is not from 1 to 64"),
        ("65", "65 is not from 1 to 64"),
        ("1000000000", "1000000000 is not from 1 to 64"),
        ("1e9", "'1e9' is not a whole number"),
        ("abc", "'abc' is not a whole number"),
        ("2.5", "'2.5' is"),
    ],
)
def test_a_wrong_number_of_slots_is_told_what_it_lacks(count, reason, capsys):
    with pytest.raises(SystemExit):
        main(["mix.wav", "--slots", count])
    assert f"argument --slots: {reason}" in capsys.readouterr().err.splitlines()[-1]


def test_as_many_slots_as_there_may_be_make_as_many_sources(run, mix):
    status, out, err = run(mix, "--slots", MAX_SLOTS, "--min-existence", 0, "--json")
    assert (status, err) == (0, [])
    assert len(json.loads(out)["sources"]) == MAX_SLOTS


def test_the_manual_names_the_largest_number_of_slots():
    manual = (Path(__file__).parents[1] / "README.md").read_text()
    assert f"| `--slots 4` | how many sources there may be at most, 1 to {MAX_SLOTS};" in manual


def test_a_gain_is_a_warning_and_in_the_json(run, tmp_path, band_separator, monkeypatch):
    monkeypatch.setattr(Separator, "load", lambda *arguments: band_separator)
    square = 0.999 * np.sign(np.sin(2 * np.pi * 400 * np.arange(16_000) / 16_000))
    soundfile.write(tmp_path / "square.wav", square, 16_000, subtype="PCM_16")
    _, out, err = run(tmp_path / "square.wav", "--json")
    gain_db = json.loads(out)["gain_db"]
    assert -3 < gain_db < -1
    warning = (
        f"separate: warning: {tmp_path / 'square.wav'}: all stems are {-gain_db:.2f} dB quieter "
        "than the input, so that none clips and they still add up"
    )
    assert err == [warning]
    assert run(tmp_path / "square.wav", "--overwrite")[2] == [warning]
    assert run(tmp_path / "square.wav", "--overwrite", "--quiet") == (0, "", [warning])


def test_skipping_existing_results_counts_them(run, mix, tmp_path):
    soundfile.write(tmp_path / "other.wav", np.zeros(500), 16_000)
    assert run(mix)[0] == 0
    before = (tmp_path / "out" / "mix" / "source1.wav").stat().st_mtime_ns
    status, out, err = run(mix, tmp_path / "other.wav", "--skip-existing", "--json")
    assert (status, err) == (0, ["separate: 1 done, 0 failed, 1 skipped (1 done already)"])
    assert [json.loads(line)["input"] for line in out.splitlines()] == [str(tmp_path / "other.wav")]
    assert (tmp_path / "out" / "mix" / "source1.wav").stat().st_mtime_ns == before


def test_stems_without_a_residual_are_made_again_and_what_goes_is_named(run, mix, tmp_path):
    folder = tmp_path / "out" / "mix"
    folder.mkdir(parents=True)
    soundfile.write(folder / "source9.wav", np.zeros(500), 16_000)
    refused = run(mix)[2]
    assert len(refused) == 1
    assert "--overwrite" in refused[0]
    assert "--skip-existing" not in refused[0]
    status, _, err = run(mix, "--skip-existing", "--quiet")
    assert status == 0
    assert err == [
        f"separate: warning: {mix} has stems without a residual, as a run broken off leaves them; made again",
        f"separate: warning: {folder}: source9.wav of an earlier run removed",
    ]
    assert not (folder / "source9.wav").exists()


def test_nothing_to_do_loads_no_model_and_is_no_failure(run, mix, no_model, tmp_path):
    (tmp_path / "out" / "mix").mkdir(parents=True)
    (tmp_path / "out" / "mix" / "residual.wav").touch()
    assert run(mix, "--skip-existing")[0] == 0


def test_the_shipped_models_are_listed(capsys):
    assert main(["--list-models"]) == 0
    assert capsys.readouterr() == ("soundscapes\n", "")


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"separate {separator.__version__}\n"


def test_names_of_stems_follow_the_template(run, mix, tmp_path):
    _, out, _ = run(mix, "--slots", 1, "--filename", "{parent}/{name} {source}", "--json", "--plot")
    folder = tmp_path / "out" / tmp_path.name
    value = json.loads(out)
    assert value["sources"][0]["file"] == str(folder / "mix.wav source1.wav")
    assert value["residual"]["file"] == str(folder / "mix.wav residual.wav")
    assert value["picture"] == str(folder / "mix.wav separation.png")
    assert sorted(item.name for item in folder.iterdir()) == [
        "mix.wav residual.wav",
        "mix.wav separation.png",
        "mix.wav source1.wav",
    ]


def test_format_coding_and_part_are_those_asked_for(run, mix, tmp_path):
    _, out, _ = run(
        mix, "--format", "flac", "--subtype", "PCM_24", "--start", 0.25, "--duration", 0.5, "--json"
    )
    value = json.loads(out)
    assert value["seconds"] == 0.5
    info = soundfile.info(value["residual"]["file"])
    assert (info.format, info.subtype, info.frames, info.samplerate) == ("FLAC", "PCM_24", 4000, 8000)


def test_samples_that_are_no_numbers_are_repaired_with_a_warning(run, tmp_path):
    samples = np.full(4000, 0.1, np.float32)
    samples[17] = np.nan
    soundfile.write(tmp_path / "bad.wav", samples, 8000, subtype="FLOAT")
    status, _, err = run(tmp_path / "bad.wav")
    assert (status, len(err)) == (1, 1)
    assert "at sample 17" in err[0]
    status, _, err = run(tmp_path / "bad.wav", "--repair")
    assert status == 0
    assert len(err) == 1
    assert err[0].startswith("separate: warning: ")
    assert "sample 17" in err[0]


def test_quiet_says_errors_and_still_prints_json(run, mix, tmp_path):
    status, out, err = run(mix, tmp_path / "missing.wav", "--quiet")
    assert (status, out, len(err)) == (1, "", 1)
    status, out, err = run(mix, "--quiet", "--overwrite", "--json")
    assert (status, err) == (0, [])
    assert json.loads(out)["input"] == str(mix)


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    ("case", "options", "warning"),
    [
        ("broken off", [], "the file holds 4000"),
        ("repaired", ["--repair"], "1 sample of NaN or inf taken as 0"),
        ("lossy", ["--format", "ogg"], "ogg is lossy"),
    ],
)
def test_quiet_says_what_is_other_than_expected(run, tmp_path, case, options, warning, as_json):
    path = tmp_path / "odd.wav"
    samples = np.full(8000, 0.1, np.float32)
    samples[17] = np.nan if case == "repaired" else 0.1
    soundfile.write(path, samples, 8000, subtype="FLOAT")
    if case == "broken off":
        path.write_bytes(path.read_bytes()[: -4 * 4000])
    status, out, err = run(path, "--quiet", *options, *["--json"] * as_json)
    assert (status, len(err)) == (0, 1)
    assert err[0].startswith(f"separate: warning: {path}: ")
    assert warning in err[0]
    assert [json.loads(line)["input"] for line in out.splitlines()] == [str(path)] * as_json


def test_verbose_says_what_was_read_and_how_long_it_took(run, tmp_path):
    soundfile.write(tmp_path / "long.wav", np.zeros((8000 * 11, 2)), 8000, subtype="PCM_24")
    _, _, err = run(tmp_path / "long.wav", "--verbose")
    assert len(err) == 1
    assert err[0].startswith(
        f"separate: {tmp_path / 'long.wav'}: WAV PCM_24, 8000 Hz, 2 channels, 11.000 s, 2 segments; took "
    )


def test_one_channel_and_one_segment_are_singular(run, tmp_path):
    soundfile.write(tmp_path / "short.wav", np.zeros(8000), 8000, subtype="PCM_16")
    _, _, err = run(tmp_path / "short.wav", "--verbose")
    assert "8000 Hz, 1 channel, 1.000 s, 1 segment; took " in err[0]


def test_an_error_nobody_foresaw_is_one_line_and_the_others_go_on(run, mix, tmp_path, monkeypatch):
    soundfile.write(tmp_path / "b.wav", np.zeros(500), 16_000)
    real = Separator.separate_file

    def failing(self, path, *arguments, **options):
        if path == mix:
            raise KeyError("odd")
        return real(self, path, *arguments, **options)

    monkeypatch.setattr(Separator, "separate_file", failing)
    status, out, err = run(mix, tmp_path / "b.wav")
    assert status == 1
    assert err[0].startswith(f"separate: error: {mix}: KeyError: 'odd'; call again with --verbose")
    assert err[1:] == ["separate: 1 done, 1 failed, 0 skipped"]
    assert "residual.wav" in out
    _, _, err = run(mix, "--verbose")
    assert err[1] == "Traceback (most recent call last):"


def test_an_error_outside_of_any_input_is_one_line(run, mix, monkeypatch):
    def load(*arguments):
        raise RuntimeError("no driver")

    monkeypatch.setattr(Separator, "load", load)
    status, out, err = run(mix)
    assert (status, out, len(err)) == (1, "", 1)
    assert err[0].startswith("separate: error: RuntimeError: no driver; call again with --verbose")


def test_an_interrupt_is_one_line_and_status_130(run, mix, tmp_path, monkeypatch):
    real = Separator.separate_file

    def interrupted(self, *arguments, **options):
        def progress(share):
            raise KeyboardInterrupt

        return real(self, *arguments, **{**options, "progress": progress})

    monkeypatch.setattr(Separator, "separate_file", interrupted)
    status, out, err = run(mix)
    assert (status, out) == (130, "")
    assert err == ["separate: error: interrupted; what was not finished has left no stems"]
    assert [item for item in (tmp_path / "out").rglob("*") if item.is_file()] == []


def test_warnings_of_libraries_are_not_shown(run, mix, monkeypatch):
    real = Separator.separate_file

    def warning(self, *arguments, **options):
        warnings.warn("deep inside", stacklevel=1)
        options["warn"]("in two\nlines")
        return real(self, *arguments, **options)

    monkeypatch.setattr(Separator, "separate_file", warning)
    status, _, err = run(mix)
    assert (status, err) == (0, ["separate: warning: in two lines"])
