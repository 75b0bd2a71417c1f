"""Time of a folder of short files with one job, two jobs and a Dask cluster of two workers on this machine.

python recipes/batch_speed/run.py [--files 200] [--repeats 3]
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import soundfile
from distributed import LocalCluster

from separator.report import format_table, update_tables
from separator.training import environment

HERE = Path(__file__).parent
SAMPLE = HERE.parents[1] / "data/samples/mix3.wav"
SECONDS = 4
COMMAND = [sys.executable, "-c", "import sys; from separator.cli import main; sys.exit(main())"]


def main() -> None:
    """Measure and write it down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    record = measure(arguments.files, arguments.repeats)
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results/batch.json").write_text(json.dumps(record, indent=1) + "\n")
    update_tables(HERE / "README.md", {"batch": table(record)})


def measure(n_files: int, repeats: int) -> dict:
    """Median seconds of each way, start-up included, and whether all gave the same stems.

    The ways take turns, so that a busy spell of the machine does not meet one of them only.
    """
    clean = dict(os.environ)  # a local cluster sets what its workers need in the parent's environment too
    one_thread = {"OMP_NUM_THREADS": "1"}
    seconds: dict[str, list[float]] = {}
    digests = set()
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
    ):
        make_files(Path(folder) / "in", n_files)
        ways = {
            "one job, all threads": (["--jobs", "1"], {}),
            "one job, one thread": (["--jobs", "1"], one_thread),
            "two jobs": (["--jobs", "2"], {}),
            "Dask cluster of two workers": (["--scheduler", cluster.scheduler_address], {}),
        }
        for _ in range(repeats):
            for name, (options, variables) in ways.items():
                with tempfile.TemporaryDirectory(dir=folder) as output:
                    command = [*COMMAND, f"{folder}/in", "--output", output, "--quiet", *options]
                    started = time.perf_counter()
                    subprocess.run(command, check=True, env={**clean, **variables})
                    seconds.setdefault(name, []).append(time.perf_counter() - started)
                    if name != "one job, all threads":  # sums in another order, so other last digits
                        digests.add(digest(Path(output)))
    return {
        "environment": environment(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[1], 1),
        "date": time.strftime("%Y-%m-%d"),
        "files": n_files,
        "seconds_per_file": SECONDS,
        "repeats": repeats,
        "seconds": {name: round(float(np.median(values)), 2) for name, values in seconds.items()},
        "same_stems": len(digests) == 1,
    }


def make_files(folder: Path, count: int) -> None:
    """Cut ``count`` pieces out of the sample."""
    mixture, sample_rate = soundfile.read(SAMPLE)
    length = SECONDS * sample_rate
    folder.mkdir()
    for k, start in enumerate(np.linspace(0, len(mixture) - length, count).astype(int)):
        soundfile.write(folder / f"piece {k}.wav", mixture[start : start + length], sample_rate)


def digest(folder: Path) -> str:
    """Hash of names and bytes of all files in a folder."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*.wav")):
        total.update(f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def table(record: dict) -> str:
    """The README's table."""
    reference = record["seconds"]["one job, one thread"]
    rows = [
        [name, f"{seconds:.1f} s", f"{reference / seconds:.2f}"]
        for name, seconds in record["seconds"].items()
    ]
    rows.append(["same stems of the last three, to the bit", "yes" if record["same_stems"] else "no", ""])
    files = f"{record['files']} files of {record['seconds_per_file']} s"
    where = f"{record['cores']} cores, load {record['load']}, {record['date']}"
    return format_table([f"{files}; {where}", "time", "times one job, one thread"], rows)


if __name__ == "__main__":
    main()
