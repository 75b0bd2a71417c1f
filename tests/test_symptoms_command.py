"""What users of tools of this kind report of the command, each as a test of that name."""

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from separator.cli import main

COMMAND = [sys.executable, "-c", "import sys; from separator.cli import main; sys.exit(main())"]


def write(path: Path, length: int = 600) -> bytes:
    """Write noise as a wav file, whatever the name; return its bytes."""
    plain = path.parent / "plain.tmp"
    plain.parent.mkdir(parents=True, exist_ok=True)
    samples = np.random.default_rng(length).normal(0, 0.1, length)
    soundfile.write(plain, samples, 8000, format="WAV", subtype="PCM_16")
    plain.rename(path)
    return path.read_bytes()


def samples(path: str) -> np.ndarray:
    """Samples of a 16-bit file, whose name soundfile might not be able to encode."""
    with open(path, "rb") as file:
        return soundfile.read(file, dtype="int16")[0].astype(int)


@pytest.fixture
def run(random_model, tmp_path, monkeypatch, capsys):
    """Run the command in an empty folder; return its status, its JSON objects and the lines on stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        status = main(["--model", str(random_model), "--json", *map(str, arguments)])
        captured = capsys.readouterr()
        return status, [json.loads(line) for line in captured.out.splitlines()], captured.err.splitlines()

    return call


ODD_NAMES = [
    *(
        "with space.wav",
        "many.dots.in.it.wav",
        "..wav",
        'it\'s "quoted".wav',
        "{stem}{0}{}.wav",
        "100%s %d.wav",
    ),
    *("Ünïcödé 音 🎵.wav", "-leading dash.wav", "--output", "UPPER.WAV", "no extension", "x" * 216 + ".wav"),
    *("new\nline.wav", "undecodable \udce9.wav", "* ? [a].wav", "~", "$HOME `id`.wav", "back\\slash.wav"),
]


def test_symptom_14_odd_names_are_separated_named_or_found(run, tmp_path):
    (tmp_path / "in").mkdir()
    for length, name in enumerate(ODD_NAMES, 500):
        write(tmp_path / "in" / name, length)
    os.chdir("in")
    status, values, err = run("--output", "../named", "--", *ODD_NAMES)
    assert (status, err) == (0, [f"separate: {len(ODD_NAMES)} done, 0 failed, 0 skipped"])
    assert [value["input"] for value in values] == ODD_NAMES
    for length, value in enumerate(values, 500):
        files = [source["file"] for source in value["sources"]] + [value["residual"]["file"]]
        assert len({Path(file).parent for file in files}) == 1
        total = sum(samples(file) for file in files)
        np.testing.assert_array_equal(total, samples(value["input"]))
        assert len(total) == length
    assert len({Path(value["residual"]["file"]).parent for value in values}) == len(ODD_NAMES)
    os.chdir("..")
    status, found, _ = run("in", "--output", "found")
    assert status == 0
    assert {value["input"] for value in found} == {f"in/{name}" for name in ODD_NAMES if name[0] != "."}


def test_symptom_15_two_inputs_of_one_name_in_two_folders_do_not_overwrite_each_other(run, tmp_path):
    for length, name in enumerate(["a/mix.wav", "b/mix.wav", "b/c/mix.wav"], 500):
        write(tmp_path / name, length)
    status, values, err = run("a/mix.wav", "b/mix.wav", "--overwrite")
    assert status == 1
    assert [value["input"] for value in values] == ["a/mix.wav"]
    assert "b/mix.wav and a/mix.wav would both be written to separated/mix" in err[0]
    assert soundfile.info("separated/mix/residual.wav").frames == 500
    template = err[0].split("--filename '")[1].split("'")[0]
    assert run("a/mix.wav", "b/mix.wav", "--filename", template, "--output", "both")[0] == 0
    assert soundfile.info("both/a/mix/residual.wav").frames == 500
    assert soundfile.info("both/b/mix/residual.wav").frames == 501
    assert run(".", "--recursive", "--output", "below")[0] == 0
    frames = {name: soundfile.info(f"below/{name}/mix/residual.wav").frames for name in ("a", "b", "b/c")}
    assert frames == {"a": 500, "b": 501, "b/c": 502}


def test_symptom_16_a_folder_with_text_hidden_files_and_one_broken_wav(run, tmp_path):
    folder = tmp_path / "music"
    good = write(folder / "good 2.wav")
    shutil.copy(folder / "good 2.wav", folder / "good 10")
    (folder / "notes.txt").write_text("words\n" * 99)
    (folder / ".DS_Store").write_bytes(b"\0\0\0\1Bud1" + bytes(99))
    (folder / "._good 2.wav").write_bytes(good)
    (folder / "broken.wav").write_bytes(b"<html>404</html>")
    status, values, err = run("music")
    assert status == 1
    assert [value["input"] for value in values] == ["music/good 2.wav", "music/good 10"]
    assert len(err) == 2
    assert err[0].startswith("separate: error: music/broken.wav is not audio that can be read")
    assert err[1] == "separate: 2 done, 1 failed, 3 skipped (2 hidden, 1 no audio)"
    status, values, err = run("music", "--skip-existing")  # the stems are not taken for recordings either
    assert (status, values) == (1, [])
    assert err[1] == "separate: 0 done, 1 failed, 5 skipped (2 hidden, 1 no audio, 2 done already)"


@pytest.mark.parametrize("output", ["taken", "taken/below", "/proc/nowhere", "locked"])
def test_symptom_17_an_output_folder_that_cannot_be_written_is_noticed_before_the_work(tmp_path, output):
    write(tmp_path / "mix.wav")
    (tmp_path / "taken").touch()
    (tmp_path / "locked").mkdir(mode=0o555)
    if output == "locked" and os.access(tmp_path / "locked", os.W_OK):
        pytest.skip("this user may write everywhere")
    code = (
        "import sys; from separator.cli import main\n"
        f"print(main(['mix.wav', '--output', {output!r}]), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split() == ["1", "False"]
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"separate: error: output folder {output} cannot be written (")


def test_symptom_18_the_exit_status_tells_that_one_of_many_failed(run, tmp_path):
    for name in ("a.wav", "b.wav", "c.wav"):
        write(tmp_path / name)
    assert run("a.wav", "b.wav", "--output", "first")[0] == 0
    (tmp_path / "b.wav").write_bytes(b"RIFF")
    for n_jobs in (1, 2):
        status, values, err = run("a.wav", "b.wav", "c.wav", "--jobs", n_jobs, "--output", f"jobs {n_jobs}")
        assert status == 1
        assert [value["input"] for value in values] == ["a.wav", "c.wav"]
        assert err[-1] == "separate: 2 done, 1 failed, 0 skipped"


def test_symptom_19_a_while_read_loop_keeps_its_input(random_model, tmp_path):
    for name in ("a.wav", "b.wav"):
        write(tmp_path / name)
    (tmp_path / "list").write_text("a.wav\nmissing.wav\nb.wav\n")
    loop = 'while read -r name; do "$@" "$name" >/dev/null 2>&1; echo "$name $?"; done < list'
    command = ["bash", "-c", loop, "loop", *COMMAND, "--model", str(random_model)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["a.wav 0", "missing.wav 1", "b.wav 0"]


def test_symptom_20_json_is_not_spoilt_by_progress_on_a_terminal(random_model, tmp_path):
    for name in ("a.wav", "b.wav"):
        write(tmp_path / name)
    terminal, stderr = pty.openpty()
    command = [*COMMAND, "a.wav", "missing.wav", "b.wav", "--json", "--model", str(random_model)]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=stderr, env={**os.environ, "TERM": "xterm"}
    ) as process:
        out = process.stdout.read()
        process.wait()
    os.close(stderr)
    shown = b""
    while chunk := _read(terminal):
        shown += chunk
    os.close(terminal)
    assert process.returncode == 1
    assert [json.loads(line)["input"] for line in out.splitlines()] == ["a.wav", "b.wav"]
    assert b"\r\033[Kfile 1 of 2,   0 %" in shown
    assert shown.endswith(b"separate: 2 done, 1 failed, 0 skipped\r\n")


def _read(terminal: int) -> bytes:
    """What a terminal shows; nothing once its other end is closed."""
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""


def test_symptom_20_a_reader_that_leaves_ends_the_command_quietly():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*COMMAND, "--list-models"], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_symptom_20_a_full_disk_behind_stdout_is_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, "--list-models"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "separate: error: results cannot be written to stdout (No space left on device)"
    ]


def test_symptom_23_two_processes_that_write_to_one_new_folder_leave_whole_stems(random_model, tmp_path):
    write(tmp_path / "mix.wav", 1000)
    write(tmp_path / "own1.wav", 700)
    write(tmp_path / "own2.wav", 700)
    processes = [
        subprocess.Popen(
            [*COMMAND, "mix.wav", own, "--model", str(random_model), "--output", "new/folder"],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for own in ("own1.wav", "own2.wav")
    ]
    complaints = [process.communicate()[1] for process in processes]
    # both may have found the folder empty; who came second may also have been told that there are stems
    assert {process.returncode for process in processes} <= {0, 1}
    assert 0 in {process.returncode for process in processes}
    assert "Traceback" not in "".join(complaints)
    folder = tmp_path / "new" / "folder"
    for name in ("mix", "own1", "own2"):
        stems = sorted((folder / name).iterdir())
        assert [stem.name for stem in stems] == ["residual.wav", *(f"source{k}.wav" for k in (1, 2, 3, 4))]
        total = sum(soundfile.read(stem, dtype="int16")[0].astype(int) for stem in stems)
        np.testing.assert_array_equal(total, soundfile.read(tmp_path / f"{name}.wav", dtype="int16")[0])
    assert sorted(item.name for item in folder.iterdir()) == ["mix", "own1", "own2"]
