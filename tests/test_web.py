"""The page without a browser: limits, pictures, mixing, and the server as programs see it."""

import hashlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import soundfile
import torch
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError

from separator import Separator, SeparatorError, cli
from separator.results import FileSeparation, Overview
from separator.web import EXAMPLES
from separator.web_jobs import Limits, check_limits, one_line, run_job, summarise
from separator.web_mix import PRESETS, SAMPLE_RATE, mix_sounds, sample_sounds, score_stems
from separator.web_pictures import (
    COLOURS,
    colour_evidence,
    colour_mixture,
    show_evidence,
    show_headline,
    show_mixture,
    show_table,
)
from separator.web_server import build_parser, main, start
from separator.writing import Stem, write_audio

ROOT = Path(__file__).parents[1]
PATIENT = {"timeout": 240}  # s, for a very busy machine

# --- jobs


def noise(
    path: Path, seconds: float = 1.0, seed: int = 0, sample_rate: int = 8000, channels: int = 1
) -> Path:
    samples = np.random.default_rng(seed).normal(0, 0.1, (round(seconds * sample_rate), channels))
    soundfile.write(path, samples, sample_rate, subtype="PCM_16")
    return path


def test_what_is_too_long_or_too_large_is_refused_before_any_work(tmp_path):
    path = noise(tmp_path / "long.wav", seconds=3)
    with pytest.raises(SeparatorError, match=r"long.wav lasts 3.0 s; this page takes up to 2 s"):
        check_limits(path, Limits(max_seconds=2))
    with pytest.raises(SeparatorError, match=r"long.wav has 0.0 MB; this page takes up to 0.01 MB"):
        check_limits(path, Limits(max_megabytes=0.01))
    check_limits(path, Limits(max_seconds=3))


def test_a_recording_that_was_deleted_in_the_meantime_is_asked_for_again(tmp_path):
    with pytest.raises(SeparatorError, match=r"gone.wav has been deleted, its time was over"):
        check_limits(tmp_path / "gone.wav", Limits())


def test_an_error_is_the_command_s_own_line(tmp_path, capsys, monkeypatch, random_model):
    monkeypatch.chdir(tmp_path)
    Path("page.wav").write_text("<!doctype html><title>not a sound</title>")
    assert cli.main(["page.wav", "--model", str(random_model)]) == 1
    with pytest.raises(SeparatorError) as caught:
        check_limits(tmp_path / "page.wav", Limits())
    line = capsys.readouterr().err.strip()
    assert line == f"separate: error: {one_line(caught.value, tmp_path / 'page.wav')}"


def test_the_zip_holds_what_the_command_writes(tmp_path, random_model):
    path = noise(tmp_path / "a b.wav", sample_rate=44_100, channels=2)
    output = tmp_path / "command"
    assert cli.main([str(path), "--model", str(random_model), "--output", str(output), "--plot"]) == 0
    job = run_job(Separator.load(random_model), path, tmp_path / "page", 4)
    with zipfile.ZipFile(job.archive) as archive:
        unpacked = {name: archive.read(name) for name in archive.namelist()}
    written = {p.relative_to(output).as_posix(): p.read_bytes() for p in output.rglob("*") if p.is_file()}
    assert len(written) == 4 + 2
    assert unpacked == written


def test_a_job_that_fails_leaves_nothing(tmp_path, random_model, monkeypatch):
    def fail(*arguments):
        raise SeparatorError("the disk is full")

    monkeypatch.setattr("separator.plot.save_picture", fail)
    with pytest.raises(SeparatorError, match="the disk is full"):
        run_job(Separator.load(random_model), noise(tmp_path / "a.wav"), tmp_path / "page", 2)
    assert not (tmp_path / "page").exists()


def test_progress_names_its_steps_and_never_goes_back(tmp_path, random_model):
    said = []
    path = noise(tmp_path / "a.wav", seconds=25)
    run_job(Separator.load(random_model), path, tmp_path / "page", 2, lambda *report: said.append(report))
    shares = [share for share, _ in said]
    assert shares == sorted(shares)
    assert list(dict.fromkeys(step for _, step in said)) == ["listening", "writing the stems"]


# --- pictures


def planted_overview() -> Overview:
    """Low frequencies are source 1, high ones source 2, a column in the middle is nobody's."""
    mixture = np.ones((4, 6), np.float32)
    slots = np.zeros((2, 4, 6), np.float32)
    slots[0, :2], slots[1, 2:] = 1, 1
    slots[..., 3] = 0
    mixture[:, 5] = 1e-9
    evidence = np.stack([np.ones((2, 3)), np.full((2, 3), 0.25)]).astype(np.float32)
    return Overview(mixture, slots, evidence, 1.5, 16_000)


def test_every_point_has_the_colour_of_the_source_that_took_it():
    image = colour_mixture(planted_overview())
    orange, blue = (tuple(bytes.fromhex(colour[1:])) for colour in [*COLOURS.values()][:2])
    assert image.shape == (4, 6, 3)
    assert tuple(image[3, 0]) == tuple(image[2, 0]) == orange  # the last row is the lowest frequency
    assert tuple(image[0, 0]) == tuple(image[1, 0]) == blue
    assert len({*image[0, 3].tolist()}) == 3 and image[0, 3].max() - image[0, 3].min() < 32  # grey
    assert image[:, 5].max() == 0


def test_evidence_is_brighter_where_more_is_left():
    before, after = (colour_evidence(values).astype(int).sum() for values in planted_overview().evidence)
    assert before > 1.5 * after


def test_every_picture_has_an_alternative_text_that_is_escaped():
    page = show_mixture(planted_overview(), 'a "b" <c>.wav') + show_evidence(planted_overview())
    assert page.count("<img ") == page.count(' alt="') == 3
    assert "a &quot;b&quot; &lt;c&gt;.wav" in page
    assert "after slot 1: 25 %" in page
    assert show_evidence(Overview(np.ones((2, 2)), np.ones((0, 2, 2)), None, 1.0, 16_000)) == ""


@pytest.mark.parametrize(
    ("count", "gain_db", "said"),
    [
        (0, 0.0, "<h2>No sound found in &lt;a&gt;.wav</h2><p>1.5 s, 44.1 kHz, stereo. It is silent"),
        (
            1,
            0.0,
            "<h2>1 sound found in &lt;a&gt;.wav</h2><p>1.5 s, 44.1 kHz, stereo. The sounds and the residual",
        ),
        (
            2,
            -1.25,
            "2 sounds found in &lt;a&gt;.wav</h2><p>1.5 s, 44.1 kHz, stereo. All stems are 1.2 dB quieter",
        ),
    ],
)
def test_the_headline_says_what_was_found_and_whether_the_stems_add_up(count, gain_db, said):
    stem = Stem(Path("x.wav"), 1.0, -20.0)
    result = FileSeparation(
        Path("/folder/<a>.wav"),
        sample_rate=44_100,
        channels=2,
        seconds=1.5,
        gain_db=gain_db,
        sources=(stem,) * count,
        existence=(0.9,) * count,
        residual=stem,
        overview=planted_overview(),
    )
    assert said in show_headline(result)
    assert "/folder" not in show_headline(result)


def test_cells_of_a_table_are_escaped():
    table = show_table("a & b", ["x"], [["<script>", "1"]])
    assert "<script>" not in table
    assert "&lt;script&gt;" in table and "a &amp; b" in table


# --- mix your own


def test_a_mixture_has_the_levels_that_were_asked_for():
    sources = mix_sounds([("river", 0.0), ("birds", -12.0), ("bell", -3.0)])
    rms = sources.double().square().mean(-1).sqrt()
    bell = sources[2, : 5 * SAMPLE_RATE].double().square().mean().sqrt()  # the bell lasts half as long
    assert sources.shape == (3, 10 * SAMPLE_RATE)
    assert 20 * torch.log10(rms[1] / rms[0]) == pytest.approx(-12, abs=0.01)
    assert 20 * torch.log10(bell / rms[0]) == pytest.approx(-3, abs=0.01)
    assert sources.sum(0).abs().max() <= 0.9001


def test_the_mixture_is_the_sum_of_two_to_four_different_sounds():
    parts = [(name, 0.0) for name in sample_sounds()]
    for wrong in (parts[:1], parts[:5]):
        with pytest.raises(SeparatorError, match=rf"{len(wrong)} sounds? picked; pick 2 to 4"):
            mix_sounds(wrong)
    with pytest.raises(SeparatorError, match="river is picked more than once"):
        mix_sounds([("river", 0.0), ("bell", 0.0), ("river", -6.0)])
    with pytest.raises(SeparatorError, match="no sound 'whale'; pick from bell, "):
        mix_sounds([("river", 0.0), ("whale", 0.0)])


def test_presets_are_mixtures():
    for parts, note in PRESETS.values():
        assert len(mix_sounds(parts)) == len(parts)
        assert note.endswith(".")


def test_scores_find_the_truth_and_say_what_is_missing(tmp_path):
    parts = [("birds", 0.0), ("guitar", -6.0), ("clock", -6.0)]
    sources = mix_sounds(parts)
    stems = [
        write_audio(tmp_path / f"{k}.wav", sources[k : k + 1].numpy(), SAMPLE_RATE, subtype="FLOAT")
        for k in (1, 0)
    ]
    birds, guitar, clock = score_stems(parts, sources, stems)
    assert birds[:3] == ["birds", "0 dB", "source 2"]
    assert guitar[:3] == ["guitar", "-6 dB", "source 1"]
    assert float(birds[3].split()[0]) > 90 and float(guitar[4].split()[0]) > 60
    assert clock == ["clock", "-6 dB", "not found", "-", "-"]
    assert [row[2] for row in score_stems(parts, sources, [])] == ["not found"] * 3


# --- the command


def test_the_command_s_defaults_are_the_limits():
    arguments = build_parser().parse_args([])
    assert Limits(arguments.max_seconds, arguments.max_megabytes, arguments.keep_minutes) == Limits()


@pytest.mark.parametrize("value", ["0", "-1", "inf", "nan", "x"])
def test_a_limit_is_a_number_above_0(value, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--max-seconds", value])
    assert caught.value.code == 2
    assert "--max-seconds" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "-1", "65536", "x"])
def test_a_port_is_a_number_that_can_be_listened_on(value, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--port", value])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("separate-demo: error: argument --port: ")


def test_help_comes_without_gradio_and_torch():
    code = (
        "import sys, atexit\n"
        "atexit.register(lambda: print('heavy:', [m for m in ('torch', 'gradio') if m in sys.modules]))\n"
        "from separator.web_server import main\nmain(['--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--keep-minutes" in done.stdout and "heavy: []" in done.stdout


def test_what_is_missing_is_said_in_one_line(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    assert main(["--model", "nothing"]) == 1
    assert capsys.readouterr().err.startswith("separate-demo: error: no model 'nothing'; shipped models are")
    monkeypatch.delitem(sys.modules, "separator.web")
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert main([]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "the page needs gradio, which is not installed" in lines[0]


WATCHED = """
import sys

def note(event, arguments):
    if event == "socket.getaddrinfo" or event == "socket.connect" and isinstance(arguments[1], tuple):
        host = arguments[0] if event == "socket.getaddrinfo" else arguments[1][0]
        print("contacted", host, file=sys.stderr, flush=True)

sys.addaudithook(note)
from separator.web_server import main
sys.exit(main(sys.argv[1:]))
"""


def test_the_command_serves_until_it_is_stopped_keeps_nothing_and_contacts_nobody(tmp_path, random_model):
    """A real process: a visitor's file and stems lie in its folder, and SIGTERM removes it."""
    port = free_port()
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", WATCHED, "--port", str(port), "--model", str(random_model)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        try:
            assert f"http://127.0.0.1:{port}" in process.stdout.readline()
            client = Client(
                f"http://127.0.0.1:{port}",
                verbose=False,
                httpx_kwargs=PATIENT,
                download_files=str(tmp_path / "here"),
            )
            path = noise(tmp_path / "a.wav")
            client.predict(handle_file(str(path)), 2, api_name="/separate")
            (folder,) = tmp_path.glob("separate-demo-*")
            assert len(list(folder.rglob("*.wav"))) >= 4  # the recording, two sources, the residual
        finally:
            process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=240)
    assert process.returncode == 0
    assert not folder.exists()
    hosts = set(re.findall(r"contacted (\S+)", said))
    assert hosts, "the hook saw not even the server itself"
    assert hosts <= {"127.0.0.1", "localhost", "None"}


# --- the server, from programs


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


LOOKED_UP: list[object] = []  # hosts that this process looked up while a server is tested


def note_lookups(event: str, arguments: tuple) -> None:
    if event == "socket.getaddrinfo":
        LOOKED_UP.append(arguments[0])


@pytest.fixture(scope="module")
def server(tmp_path_factory, random_model):
    """Address of a page with small limits, over the random model, and the folder it keeps files in."""
    folder = tmp_path_factory.mktemp("server")
    sys.addaudithook(note_lookups)  # cannot be removed; it only takes notes
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", str(folder))
        page = start(Limits(max_seconds=20, max_megabytes=2), random_model, port=free_port())
        yield page.local_url, folder
        page.close(verbose=False)


@pytest.fixture
def client(server, tmp_path):
    return Client(server[0], verbose=False, httpx_kwargs=PATIENT, download_files=str(tmp_path / "downloads"))


def test_a_program_gets_what_the_api_gives(client, tmp_path, random_model):
    path = noise(tmp_path / "mix.flac", sample_rate=44_100, channels=2)
    summary, files, archive = client.predict(handle_file(str(path)), n_slots=3, api_name="/separate")
    job = run_job(Separator.load(random_model), path, tmp_path / "here", 3)
    assert summary == summarise(job)
    names = ["source1.wav", "source2.wav", "source3.wav", "residual.wav", "separation.png"]
    assert [Path(f).name for f in files] == names
    assert [Path(f).read_bytes() for f in files] == [f.read_bytes() for f in job.files]
    assert Path(archive).name == "mix.zip"
    assert [info.filename for info in zipfile.ZipFile(archive).infolist()] == [
        f"mix/{name}" for name in names
    ]


def test_the_endpoint_is_the_only_one_and_its_arguments_are_named(client):
    endpoints = client.view_api(return_format="dict", print_info=False)
    assert list(endpoints["named_endpoints"]) == ["/separate"]
    assert endpoints["unnamed_endpoints"] == {}
    parameters = endpoints["named_endpoints"]["/separate"]["parameters"]
    assert [p["parameter_name"] for p in parameters] == ["recording", "n_slots", "model"]
    assert [p["parameter_default"] for p in parameters][1] == 4


def test_ten_programs_at_once_each_get_their_own_answer(server, tmp_path, random_model):
    paths = [noise(tmp_path / f"visitor{k}.wav", seconds=0.3 + 0.05 * k, seed=k) for k in range(10)]

    def ask(path: Path) -> list[bytes]:
        client = Client(
            server[0], verbose=False, httpx_kwargs=PATIENT, download_files=str(tmp_path / path.stem)
        )
        _, files, _ = client.predict(handle_file(str(path)), n_slots=2, api_name="/separate")
        return [Path(f).read_bytes() for f in files[:3]]

    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(ask, paths))
    separator = Separator.load(random_model)
    for path, answer in zip(paths, answers, strict=True):
        job = run_job(separator, path, tmp_path / "expected", 2)
        assert answer == [f.read_bytes() for f in job.files[:3]], path.name


def test_errors_reach_a_program_as_one_line(client, tmp_path):
    def told(path: Path | None, **options: object) -> str:
        with pytest.raises(AppError) as caught:
            client.predict(path and handle_file(str(path)), **options, api_name="/separate")
        return caught.value.args[0]

    (tmp_path / "page.wav").write_text("<!doctype html><title>not a sound</title>")
    assert told(None) == "no recording; drop a file, record one or pick an example"
    assert told(tmp_path / "page.wav").startswith("page.wav is not audio that can be read (")
    assert told(noise(tmp_path / "long.wav", 21)).startswith(
        "long.wav lasts 21.0 s; this page takes up to 20 s"
    )
    path = noise(tmp_path / "a.wav")
    assert "less than minimum" in told(path, n_slots=0)
    assert "greater than maximum" in told(path, n_slots=9)
    assert "not in the list" in told(path, model="../random").lower()


def test_an_upload_over_the_cap_is_refused(server, tmp_path):
    with noise(tmp_path / "large.wav", 130).open("rb") as file:
        answer = httpx.post(f"{server[0]}gradio_api/upload", files={"files": file})
    assert answer.status_code == 413
    assert "maximum allowed size" in answer.text


def test_silence_is_no_source(client, tmp_path):
    soundfile.write(tmp_path / "silence.wav", np.zeros(8000), 8000)
    summary, _, _ = client.predict(handle_file(str(tmp_path / "silence.wav")), api_name="/separate")
    assert summary["residual"]["level_db"] is None
    assert all(source["level_db"] is None for source in summary["sources"])


def test_no_file_of_the_machine_or_of_a_guess_can_be_read(server, client, tmp_path):
    address, folder = server
    path = noise(tmp_path / "mine.wav")
    client.predict(handle_file(str(path)), n_slots=1, api_name="/separate")
    (mine,) = [p for p in folder.rglob("source1.wav") if (p.parent.parent / "mine.zip").exists()]
    assert httpx.get(f"{address}gradio_api/file={mine}").status_code == 200  # who knows the name may have it
    assert len(mine.parent.parent.name) == 32  # and it cannot be guessed: 128 random bits
    hidden = [
        "/etc/passwd",
        str(folder),
        str(mine.parent),
        f"{folder}/../../../../../etc/passwd",
        str(folder / ("0" * 32) / "mine/source1.wav"),
        str(Path(__file__)),
        "http://example.org/a.wav",
        "HTTPS://example.org/a.wav",
    ]
    for name in hidden:
        assert httpx.get(f"{address}gradio_api/file={name}").status_code in (403, 404), name


def test_two_visitors_with_one_recording_get_different_folders(server, client, tmp_path):
    path = noise(tmp_path / "same.wav", seed=7)
    for _ in range(2):
        client.predict(handle_file(str(path)), n_slots=1, api_name="/separate")
    assert len(list(server[1].rglob("same.zip"))) == 2


def join(address: str, data: list) -> httpx.Response:
    """Ask for a separation as a browser does, with whatever data."""
    config = httpx.get(f"{address}config").json()
    index = next(d["id"] for d in config["dependencies"] if d["api_name"] == "separate")
    body = {"data": data, "fn_index": index, "session_hash": hashlib.sha1(repr(data).encode()).hexdigest()}
    answer = httpx.post(f"{address}gradio_api/queue/join", json=body)
    if answer.status_code != 200:
        return answer
    return httpx.get(
        f"{address}gradio_api/queue/data", params={"session_hash": body["session_hash"]}, timeout=240
    )


def test_a_path_or_an_address_is_not_taken_for_an_upload(server):
    def told(path: str) -> httpx.Response:
        return join(server[0], [{"path": path, "meta": {"_type": "gradio.FileData"}}, 2, "random", None])

    refused = told("/etc/passwd").text
    assert '"success":false' in refused.replace(" ", "") and "root:" not in refused
    for address in ("http://example.org/a.wav", " HTTPS://example.org/a.wav"):
        assert told(address).status_code == 403
    assert "example.org" not in LOOKED_UP


def files_of_visitors(folder: Path) -> list[Path]:
    """All but the copies of the page's own examples."""
    return [path for path in folder.rglob("*") if path.is_file() and path.name not in EXAMPLES]


def test_files_go_when_their_time_is_over(tmp_path, random_model, monkeypatch):
    folder = tmp_path / "server"
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(folder))
    page = start(Limits(keep_minutes=1 / 6), random_model, port=free_port())
    try:
        client = Client(page.local_url, verbose=False, httpx_kwargs=PATIENT, download_files=False)
        client.predict(handle_file(str(noise(tmp_path / "a.wav"))), n_slots=2, api_name="/separate")
        assert len(files_of_visitors(folder)) >= 5  # recording, two sources, residual, picture, zip
        deadline = time.monotonic() + 240
        while left := files_of_visitors(folder):
            assert time.monotonic() < deadline, left
            time.sleep(0.2)
    finally:
        page.close(verbose=False)


def test_the_space_installs_what_the_package_needs():
    """A Space installs demo/requirements.txt without the package, so it must say the same."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "demo/requirements.txt").read_text().splitlines()
    named = [line for line in lines if line and not line.startswith("#")]
    assert sorted(named) == sorted([*project["dependencies"], *project["optional-dependencies"]["demo"]])
    python = re.search(r'^python_version: "(.+)"$', (ROOT / "demo/README.md").read_text(), re.MULTILINE)
    assert python and f">={python[1]}" == project["requires-python"]
