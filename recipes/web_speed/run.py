"""Time and memory of the web page, as visitors and programs see it; fills results/ and README.md.

python recipes/web_speed/run.py
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import psutil
import soundfile
from gradio_client import Client, handle_file
from playwright.sync_api import sync_playwright

from separator import Separator
from separator.report import format_table, update_tables
from separator.script import exit_status
from separator.training import environment

HERE = Path(__file__).parent
SAMPLES = HERE.parents[1] / "data/samples"
CLIP = SAMPLES / "mix3.wav"  # 10 s
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
SHORT_SECONDS = 2  # where the length does not matter
REPEATS = 3
RUNS = (5, 50)  # separations before memory is read
VISITORS = 10
TIMEOUT_SECONDS = 300


def main() -> None:
    """Measure everything and write it down."""
    load = round(os.getloadavg()[0], 1)  # of what else the machine does
    with tempfile.TemporaryDirectory() as folder, serving() as (process, address, ready_seconds):
        paths = short_clips(Path(folder))
        record = {
            "environment": environment(),
            "date": time.strftime("%Y-%m-%d"),
            "load": load,
            "ready_seconds": ready_seconds,
            "memory_mib": memory_mib(process, address, paths),
            "clip_seconds": clip_seconds(address),
            "visitors": many_visitors(address, paths),
        }
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results/speed.json").write_text(json.dumps(record, indent=1) + "\n")
    update_tables(HERE / "README.md", {"speed": table(record)})


@contextmanager
def serving() -> Iterator[tuple[psutil.Process, str, float]]:
    """A server's process, its address, and seconds from its start to the page in a browser."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}/"
    command = [sys.executable, "-m", "separator.web_server", "--port", str(port)]
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(1000 * TIMEOUT_SECONDS)
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            process.stdout.readline()  # it says where it is once it answers
            page.goto(address)
            page.get_by_role("button", name="Separate", exact=True).wait_for()
            ready_seconds = round(time.perf_counter() - started, 2)
            browser.close()
            yield psutil.Process(process.pid), address, ready_seconds
        finally:
            process.terminate()
            process.wait()


def short_clips(folder: Path) -> list[Path]:
    """The first seconds of every sample."""
    paths = []
    for sample in sorted(SAMPLES.glob("*.wav")):
        rate = soundfile.info(sample).samplerate
        samples, _ = soundfile.read(sample, SHORT_SECONDS * rate, dtype="int16")
        paths.append(folder / sample.name)
        soundfile.write(paths[-1], samples, rate)
    return paths


def connect(address: str, folder: Path | str) -> Client:
    """A client that puts files into ``folder`` and waits as long as it takes."""
    options = {"timeout": TIMEOUT_SECONDS}
    return Client(address, verbose=False, download_files=str(folder), httpx_kwargs=options)


def separate(client: Client, path: Path) -> list[str]:
    """Files of a separation."""
    return client.predict(handle_file(str(path)), api_name="/separate")[1]


def clip_seconds(address: str) -> float:
    """Median seconds from the call with the 10 s clip to the files on disk, after one unmeasured call."""
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        client = connect(address, folder)
        for _ in range(REPEATS + 1):
            started = time.perf_counter()
            separate(client, CLIP)
            seconds.append(time.perf_counter() - started)
    return round(float(np.median(seconds[1:])), 2)


def many_visitors(address: str, clips: list[Path]) -> dict[str, float]:
    """Seconds until the last of ten who come at once has his files, and how many got the right ones."""
    paths = list(islice(cycle(clips), VISITORS))
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder) / str(k) for k in range(VISITORS)]
        clients = [connect(address, place) for place in places]
        started = time.perf_counter()
        with ThreadPoolExecutor(VISITORS) as pool:
            answers = list(pool.map(separate, clients, paths))
        seconds = time.perf_counter() - started
        expected = {path: stems(path, Path(folder) / "expected") for path in set(paths)}
        right = [
            [Path(file).read_bytes() for file in answer if file.endswith(".wav")] == expected[path]
            for path, answer in zip(paths, answers, strict=True)
        ]
    return {"seconds": round(seconds, 1), "right": sum(right)}


def stems(path: Path, folder: Path) -> list[bytes]:
    """The files that the API writes."""
    result = Separator.load(device="cpu").separate_file(path, folder)
    return [stem.file.read_bytes() for stem in (*result.sources, result.residual)]


def memory_mib(process: psutil.Process, address: str, clips: list[Path]) -> dict[str, int]:
    """Resident memory of the server after so many separations of the clips in turn."""
    memory = {}
    with tempfile.TemporaryDirectory() as folder:
        client = connect(address, folder)
        for count, path in enumerate(islice(cycle(clips), max(RUNS)), start=1):
            separate(client, path)
            if count in RUNS:
                memory[str(count)] = round(process.memory_info().rss / 2**20)
    return memory


def table(record: dict) -> str:
    """The README's table."""
    few, many = (record["memory_mib"][str(runs)] for runs in RUNS)
    visitors = record["visitors"]
    rows = [
        ["cold start of `separate-demo` to the page in a browser", f"{record['ready_seconds']:.1f} s"],
        ["a 10 s clip, upload and download included, once warm", f"{record['clip_seconds']:.1f} s"],
        [f"{VISITORS} visitors at once: until the last has the files", f"{visitors['seconds']:.0f} s"],
        ["of them with the files that the API writes, byte for byte", f"{visitors['right']}"],
        [f"memory of the server after {RUNS[0]} separations", f"{few} MiB"],
        [f"after {RUNS[1]}", f"{many} MiB, {100 * (many / few - 1):+.0f} %"],
    ]
    machine = f"{record['environment']['threads']} threads, load {record['load']} before, {record['date']}"
    return format_table([machine, ""], rows)


if __name__ == "__main__":
    sys.exit(exit_status(main, __file__))
