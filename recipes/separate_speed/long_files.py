"""Time, peak memory and room on disk of long files; adds to results/long.json, then run.py --tables.

python recipes/separate_speed/long_files.py mono:1 mono:10 mono:60        # time grows with the length
python recipes/separate_speed/long_files.py mono:90 mono:180 stereo:12.5 stereo:25    # memory does not

A case is mono (16 kHz) or stereo (44.1 kHz) and minutes. The sample mix3.wav is repeated with a gain that
changes, so that no two segments are alike. Cases measured before are kept, unless measured again.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import librosa
import numpy as np
import soundfile

from separator.script import Parser, exit_status

HERE = Path(__file__).parent
SAMPLE = HERE.parents[1] / "data/samples/mix3.wav"
KINDS = {"mono": (16_000, 1), "stereo": (44_100, 2)}


def main() -> None:
    """Measure cases, each in a process of its own."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="KIND:MINUTES")
    parser.add_argument("--separate", nargs=2, metavar=("FILE", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.separate:
        print(json.dumps(separate(*arguments.separate)))
        return
    path = HERE / "results/long.json"
    record = json.loads(path.read_text()) if path.exists() else {}
    for case in arguments.cases:
        kind, minutes = case.split(":")
        record[f"{kind}:{float(minutes):g}"] = measure(kind, float(minutes))
        print(case, record[f"{kind}:{float(minutes):g}"], flush=True)
        path.write_text(json.dumps(record, indent=1) + "\n")


def measure(kind: str, minutes: float) -> dict[str, float | str]:
    """Make a file and separate it."""
    sample_rate, channels = KINDS[kind]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "long.wav"
        length = write_long(file, sample_rate, channels, minutes)
        command = [sys.executable, __file__, "--separate", str(file), f"{folder}/out"]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        stems = list(Path(folder).glob("out/long/*.wav"))
        whole = len(stems) > 1 and {soundfile.info(stem).frames for stem in stems} == {length}
    return {**json.loads(done.stdout), "stems": len(stems), "whole": whole, "date": time.strftime("%Y-%m-%d")}


def write_long(path: Path, sample_rate: int, channels: int, minutes: float) -> int:
    """Write the sample over and over; return the number of samples a channel."""
    sample, rate = soundfile.read(SAMPLE, dtype="float32")
    sample = librosa.resample(sample, orig_sr=rate, target_sr=sample_rate)
    length = round(60 * minutes * sample_rate)
    with soundfile.SoundFile(path, "w", sample_rate, channels, "PCM_16") as file:
        for index, start in enumerate(range(0, length, len(sample))):
            gains = 0.5 + 0.4 * np.sin(index + np.arange(channels))
            file.write((sample[: length - start, None] * gains).astype(np.float32))
    return length


def separate(file: str, folder: str) -> dict[str, float]:
    """Separate in this process; wall and processor seconds, peak memory, most bytes in nameless files."""
    from separator import Separator

    separator = Separator.load(device="cpu")
    room = Room()
    room.start()
    before = os.times()
    started = time.perf_counter()
    separator.separate_file(file, folder)
    seconds = time.perf_counter() - started
    after = os.times()
    room.stop.set()
    room.join()
    # the peak of this program alone; what getrusage says includes the process that started it
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "seconds": round(seconds, 2),
        "processor_seconds": round(after.user + after.system - before.user - before.system, 2),
        "peak_memory_mib": round(int(status["VmHWM"].split()[0]) / 1024),
        "spool_mib": round(room.most / 2**20),
    }


class Room(threading.Thread):
    """Watches how large the files without a name become that this process has open."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.stop = threading.Event()
        self.most = 0

    def run(self) -> None:
        while not self.stop.wait(0.2):
            size = 0
            for entry in Path("/proc/self/fd").iterdir():
                try:
                    if os.readlink(entry).endswith("(deleted)"):
                        size += os.stat(entry).st_size
                except OSError:  # closed meanwhile
                    continue
            self.most = max(self.most, size)


if __name__ == "__main__":
    sys.exit(exit_status(main, __file__))
