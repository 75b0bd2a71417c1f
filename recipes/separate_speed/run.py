"""Time and memory of `separate`, beside librosa's HPSS in the same run; fills results/ and README.md.

python recipes/separate_speed/run.py
python recipes/separate_speed/run.py --tables    # only README.md, from the results there are
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import librosa
import numpy as np
import soundfile

from separator import Separator
from separator.report import format_table, update_tables
from separator.script import Parser, exit_status
from separator.training import environment

HERE = Path(__file__).parent
SAMPLE = HERE.parents[1] / "data/samples/mix3.wav"
REPEATS = 3
COMMAND = "import sys; from separator.cli import main; sys.exit(main())"
# a small parent: until it runs its program, a new process counts as large as the one it came from
MEASURE = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, capture_output=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def main() -> None:
    """Measure everything and write it down."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", action="store_true", help="measure nothing, write the tables")
    if not parser.parse_args().tables:
        measure_all()
    update_tables(HERE / "README.md", tables())


def tables() -> dict[str, str]:
    """The README's tables, from results/."""
    record, long_files, parts = (
        json.loads((HERE / f"results/{name}.json").read_text()) for name in ("speed", "long", "parts")
    )
    return {"speed": table(record), "long": long_table(long_files), "parts": parts_table(parts)}


def measure_all() -> None:
    """Fill results/speed.json."""
    mixture, sample_rate = soundfile.read(SAMPLE, dtype="float32")
    minute = np.tile(mixture, 6)
    separator = Separator.load(device="cpu")
    record = {
        "environment": environment(),
        "date": time.strftime("%Y-%m-%d"),
        "command_seconds": median_seconds(lambda: run_command(SAMPLE)),
        "minute_seconds": median_seconds(lambda: separator.separate(minute[None], sample_rate)),
        "hpss_minute_seconds": median_seconds(lambda: librosa.effects.hpss(minute)),
        "ten_minutes_stereo": ten_minutes_stereo(minute, sample_rate),
    }
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results/speed.json").write_text(json.dumps(record, indent=1) + "\n")


def median_seconds(work: Callable[[], object]) -> float:
    """Median wall time after one unmeasured call."""
    seconds = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return round(float(np.median(seconds[1:])), 3)


def run_command(path: Path) -> float:
    """The command as a user calls it, start-up included; its peak memory in MiB."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", COMMAND, str(path), "--output", folder]
        measured = [sys.executable, "-c", MEASURE, *command]
        done = subprocess.run(measured, check=True, capture_output=True, text=True)
    return int(done.stdout) / 1024


def ten_minutes_stereo(minute: np.ndarray, sample_rate: int) -> dict[str, float]:
    """Seconds and peak memory of the command on ten minutes of 44.1 kHz stereo."""
    wide = librosa.resample(minute, orig_sr=sample_rate, target_sr=44_100)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ten.wav"
        with soundfile.SoundFile(path, "w", 44_100, 2, "PCM_16") as file:
            for gain in np.linspace(0.5, 1.0, 10):
                file.write(np.stack([wide, gain * wide], 1))
        started = time.perf_counter()
        peak = run_command(path)
        seconds = time.perf_counter() - started
    return {"seconds": round(seconds, 1), "peak_memory_mib": round(peak)}


def table(record: dict) -> str:
    """The README's table."""
    ten = record["ten_minutes_stereo"]
    speed, peer = 60 / record["minute_seconds"], 60 / record["hpss_minute_seconds"]
    rows = [
        ["`separate` on the 10 s sample, start-up included", f"{record['command_seconds']:.1f} s"],
        [
            "60 s at 16 kHz, without start-up",
            f"{record['minute_seconds']:.1f} s, {speed:.0f} times real time",
        ],
        [
            "librosa's HPSS on the same 60 s",
            f"{record['hpss_minute_seconds']:.1f} s, {peer:.0f} times real time",
        ],
        ["time of `separate` over that of HPSS", f"{peer / speed:.2f}"],
        [
            "10 minutes of 44.1 kHz stereo, start-up included",
            f"{ten['seconds']:.0f} s, {600 / ten['seconds']:.0f} times",
        ],
        ["its peak memory", f"{ten['peak_memory_mib']:.0f} MiB"],
    ]
    return format_table([f"{record['environment']['threads']} threads, {record['date']}", ""], rows)


def long_table(record: dict) -> str:
    """One row a long file, in the order of kind and length."""
    rows = []
    for case in sorted(record, key=lambda name: (name.split(":")[0], float(name.split(":")[1]))):
        kind, minutes = case.split(":")
        found = record[case]
        rows.append(
            [
                f"{'mono 16 kHz' if kind == 'mono' else 'stereo 44.1 kHz'}, {minutes} min",
                f"{found['seconds']:.0f} s",
                f"{found['processor_seconds'] / float(minutes):.2f} s",
                f"{found['peak_memory_mib']} MiB",
                f"{found['spool_mib']} MiB",
                found["date"],
            ]
        )
    columns = ["file", "time", "processor time a minute", "peak memory", "masks on disk", "date"]
    return format_table(columns, rows)


def parts_table(record: dict) -> str:
    """One row a mixture, then the mean of the differences with its spread."""
    rows = []
    differences = []
    for found in record["mixtures"]:
        difference = found["whole_db"] - found["parts_db"]
        differences.append(difference)
        called = f"{found['whole_called']}, {found['parts_called']:.1f}"
        levels = [f"{found[name]:.2f}" for name in ("whole_db", "parts_db")]
        rows.append([found["example"], str(found["n_sources"]), called, *levels, f"{difference:+.2f}"])
    mean, spread, middle = np.mean(differences), np.std(differences, ddof=1), np.median(differences)
    rows.append(
        [f"mean ± standard deviation, {record['date']}", "", "", "", "", f"{mean:+.2f} ± {spread:.2f}"]
    )
    rows.append(["median", "", "", "", "", f"{middle:+.2f}"])
    columns = ["mixture", "sources", "stems of the whole, the parts", "whole", "parts", "whole - parts, dB"]
    return format_table(columns, rows)


if __name__ == "__main__":
    sys.exit(exit_status(main, __file__))
