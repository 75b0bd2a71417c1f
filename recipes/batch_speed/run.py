"""Time of a folder of short files with one job, two jobs and a Dask cluster of two workers on this machine.

python recipes/batch_speed/run.py [--files 200] [--repeats 3] [--turns 9]

Every way is repeated until enough of its runs were quiet (see QUIET), but no more than --turns times; the
quietest count.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import dask
import numpy as np
import psutil
import soundfile
from distributed import LocalCluster

from separator.report import format_table, update_tables
from separator.script import Parser, exit_status, positive
from separator.training import environment

HERE = Path(__file__).parent
SAMPLE = HERE.parents[1] / "data/samples/mix3.wav"
SECONDS = 4
QUIET = 0.03  # share of the processors that others may take during a run
ENVIRONMENT = dict(os.environ)  # a local cluster adds to it what its workers need
COMMAND = [sys.executable, "-c", "import sys; from separator.cli import main; sys.exit(main())"]
TRIM = "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_"
ALL_THREADS, ONE_THREAD = "one job, all threads", "one job, one thread"
STARTED = ("one process, started before", "two processes, started before")
# what jobs do, without starting: files k, k + n, ... in one thread; begins when told, says when it is done
SHARE = """
import sys
from pathlib import Path
from separator import Separator
separator = Separator.load(device="cpu")
files = sorted(Path(sys.argv[1]).iterdir())[int(sys.argv[3])::int(sys.argv[4])]
separator.separate_file(files[0], sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for file in files:
    separator.separate_file(file, sys.argv[2], overwrite=True)
print("done", flush=True)
"""

Way = Callable[[Path, Path], float]


def main() -> None:
    """Measure and write it down."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=positive, default=200)
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--turns", type=positive, default=9)
    parser.add_argument("--tables", action="store_true", help="measure nothing, write the table")
    arguments = parser.parse_args()
    path = HERE / "results/batch.json"
    if not arguments.tables:
        record = measure(arguments.files, arguments.repeats, arguments.turns)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")
    update_tables(HERE / "README.md", {"batch": table(json.loads(path.read_text()))})


def measure(n_files: int, repeats: int, turns: int) -> dict:
    """Median seconds of each way, and whether all with one thread gave the same stems.

    The ways take turns, so that a busy spell of the machine does not meet one of them only.
    """
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}  # share of others, seconds
    digests = set()
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "in"
        make_files(files, n_files)
        for _ in range(turns):
            for name, way in WAYS.items():
                if sum(others <= QUIET for others, _ in runs[name]) >= repeats:
                    continue
                with tempfile.TemporaryDirectory(dir=folder) as output:
                    busy, started = busy_seconds(), time.perf_counter()
                    seconds = way(files, Path(output))
                    share = (busy_seconds() - busy) / (time.perf_counter() - started) / os.cpu_count()
                    runs[name].append((round(max(0.0, share), 3), round(seconds, 2)))
                    print(name, *runs[name][-1], file=sys.stderr, flush=True)
                    if name != ALL_THREADS:  # sums in another order, so other last digits
                        digests.add(digest(Path(output)))
    kept = {name: sorted(found)[:repeats] for name, found in runs.items()}
    return {
        "environment": environment(),
        "cores": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
        "files": n_files,
        "seconds_per_file": SECONDS,
        "repeats": repeats,
        "largest_share_of_others": max(share for found in kept.values() for share, _ in found),
        "seconds": {name: float(np.median([s for _, s in found])) for name, found in kept.items()},
        "runs": runs,
        "same_stems": len(digests) == 1,
    }


def command(*options: str, **variables: str) -> Way:
    """The command, start-up included."""

    def way(files: Path, output: Path) -> float:
        started = time.perf_counter()
        call = [*COMMAND, str(files), "--output", str(output), "--quiet", *options]
        subprocess.run(call, check=True, env={**ENVIRONMENT, **variables})
        return time.perf_counter() - started

    return way


def on_cluster(settings: dict[str, object]) -> Way:
    """The command with a new cluster, whose workers have imported nothing yet."""

    def way(files: Path, output: Path) -> float:
        with (
            patch.dict(os.environ),
            dask.config.set(settings),
            LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        ):
            return command("--scheduler", cluster.scheduler_address)(files, output)

    return way


def without_start(n_processes: int) -> Way:
    """Processes that have loaded the model and know nothing of each other: what this machine can do."""

    def way(files: Path, output: Path) -> float:
        with shares(files, output, n_processes) as processes:
            for process in processes:
                process.stdout.readline()
            started = time.perf_counter()
            for process in processes:
                process.stdin.write("go\n")
                process.stdin.flush()
            for process in processes:
                assert process.stdout.readline() == "done\n"
            return time.perf_counter() - started

    return way


@contextmanager
def shares(files: Path, output: Path, count: int) -> Iterator[list[subprocess.Popen]]:
    """Processes with a share of the files each."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    one_thread = {**ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SHARE, str(files), str(output), str(k), str(count)],
            env=one_thread,
            **pipes,
        )
        for k in range(count)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.communicate()


WAYS: dict[str, Way] = {
    ALL_THREADS: command("--jobs", "1"),
    ONE_THREAD: command("--jobs", "1", OMP_NUM_THREADS="1"),
    "two jobs": command("--jobs", "2"),
    "Dask, two workers": on_cluster({}),
    "Dask, two workers that keep their memory": on_cluster({TRIM: None}),
    STARTED[0]: without_start(1),
    STARTED[1]: without_start(2),
}


def busy_seconds() -> float:
    """Processor seconds so far of all that runs on this machine but this program and its children."""
    times = psutil.cpu_times()
    everything = times.user + times.nice + times.system + times.irq + times.softirq + times.steal
    own = sum(os.times()[:4])
    for child in psutil.Process().children(recursive=True):
        try:
            own += sum(child.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return everything - own


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
    found = record["seconds"]
    rows = []
    for name, seconds in found.items():
        against = found[STARTED[0] if name in STARTED else ONE_THREAD] / seconds
        default = "" if name in STARTED else f"{found[ALL_THREADS] / seconds:.2f}"
        rows.append([name, f"{seconds:.1f} s", f"{against:.2f}", default])
    rows.append(
        ["same stems of all but the first, to the bit", "yes" if record["same_stems"] else "no", "", ""]
    )
    others = f"others took at most {100 * record['largest_share_of_others']:.0f} %"
    where = f"{record['files']} files of {record['seconds_per_file']} s; {record['cores']} cores, {others}"
    columns = [f"{where}; {record['date']}", "time", "times one thread", "times one job, all threads"]
    return format_table(columns, rows)


if __name__ == "__main__":
    sys.exit(exit_status(main, __file__))
