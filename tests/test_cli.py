import inspect
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import soundfile

from separator import Separator, cli
from separator.cli import build_parser, main


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
    heavy = ("torch", "numpy", "scipy", "soundfile", "matplotlib", "librosa")
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
    for name, parameters in [
        ("name_or_dir", load),
        ("device", load),
        ("n_slots", separate),
        ("min_existence", separate),
        ("n_slots", to_files),
        ("min_existence", to_files),
        ("output_dir", to_files),
        ("overwrite", to_files),
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
    assert (status, err) == (0, [])
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
    assert err == [f"separate: error: {tmp_path / 'missing.wav'} does not exist; check the path"]
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


def test_two_inputs_of_one_name_do_not_overwrite_each_other(run, mix, tmp_path):
    (tmp_path / "b").mkdir()
    soundfile.write(tmp_path / "b" / "mix.wav", np.zeros(100), 8000)
    status, _, err = run(mix, tmp_path / "b" / "mix.wav", "--overwrite")
    assert status == 1
    assert len(err) == 1
    assert f"{tmp_path / 'b' / 'mix.wav'} has the same name as {mix}" in err[0]
    assert soundfile.info(tmp_path / "out" / "mix" / "residual.wav").frames == 8000


def test_existing_results_are_kept_unless_overwriting_is_asked_for(run, mix, tmp_path):
    assert run(mix, "--slots", 3)[0] == 0
    before = (tmp_path / "out" / "mix" / "source1.wav").read_bytes()
    status, _, err = run(mix, "--slots", 1)
    assert status == 1
    assert "overwrite them (--overwrite)" in err[0]
    assert (tmp_path / "out" / "mix" / "source1.wav").read_bytes() == before
    assert run(mix, "--slots", 1, "--overwrite")[0] == 0
    assert not (tmp_path / "out" / "mix" / "source2.wav").exists()


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
        ["mix.wav", "--slots", "x"],
        ["mix.wav", "--min-existence", "2"],
        ["--nope"],
    ],
)
def test_a_wrong_call_exits_with_two_and_says_how_to_call(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: separate")


def test_a_gain_is_named_in_table_and_json(run, tmp_path, band_separator, monkeypatch):
    monkeypatch.setattr(Separator, "load", lambda *arguments: band_separator)
    square = 0.999 * np.sign(np.sin(2 * np.pi * 400 * np.arange(16_000) / 16_000))
    soundfile.write(tmp_path / "square.wav", square, 16_000, subtype="PCM_16")
    _, out, _ = run(tmp_path / "square.wav", "--json")
    gain_db = json.loads(out)["gain_db"]
    assert -3 < gain_db < -1
    _, out, _ = run(tmp_path / "square.wav", "--overwrite")
    assert f"gain of all stems {gain_db:.2f} dB" in out


def test_progress_is_shown_on_a_terminal_only(capsys, monkeypatch, tmp_path):
    cli._Progress(tmp_path / "mix.wav")(0.5)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    progress = cli._Progress(tmp_path / "mix.wav")
    progress(0.501)
    progress(0.502)
    progress.clear()
    assert capsys.readouterr().err == "\r\033[Kmix.wav  50 %\r\033[K"
