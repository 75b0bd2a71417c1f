"""Mutated files: none may end in a traceback, hang, or leave a stem that is not whole; fills results/.

python recipes/file_checks/fuzz.py --files 10000

Real files of many formats are made, their first bytes changed, their ends cut, other bytes put in; each is
separated by a small network with random weights. The separation runs in processes of their own, so that a
crash in a decoder and a hang are seen and counted like any other failure.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, Queue
from typing import IO

import av
import numpy as np
import soundfile
import torch

from separator import Separator, SeparatorError
from separator.network import NetworkConfig, SeparationNetwork
from separator.script import Parser, exit_status, positive
from separator.training import environment

HERE = Path(__file__).parent
SECONDS = 0.15  # of every file
HEADER = 200  # bytes that are changed most often
PATIENCE = 30  # seconds for one file; it takes about a hundredth of that
EXTREMES = [bytes(4), b"\xff" * 4, b"\xff\xff\xff\x7f", b"\x7f\xff\xff\xff", b"\0\0\0\x80", b"\x01\0\0\0"]
PLAIN = [  # container and coding, written by libsndfile
    *(("WAV", s) for s in ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "IMA_ADPCM")),
    *(("WAVEX", "PCM_24"), ("RF64", "PCM_16"), ("W64", "PCM_16"), ("AIFF", "PCM_16"), ("AIFF", "FLOAT")),
    *(("AU", "PCM_16"), ("CAF", "PCM_16"), ("CAF", "ALAC_16"), ("FLAC", "PCM_16"), ("FLAC", "PCM_24")),
    *(("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III")),
]
CODED = {  # extension: codec and sample format, written by FFmpeg
    **{"m4a": ("aac", "fltp"), "aac": ("aac", "fltp"), "mp4": ("alac", "s16p"), "webm": ("libopus", "flt")},
    **{"wma": ("wmav2", "fltp"), "wv": ("wavpack", "s16p"), "tta": ("tta", "s16"), "mkv": ("flac", "s16")},
    "mka": ("ac3", "fltp"),
}


def encode(path: Path, codec: str, samples: np.ndarray, rate: int, *, form: str, layout: str) -> Path:
    """Write (channel, time) by FFmpeg's encoder: floats in [-1, 1], int16 or int32."""
    source = {"f4": "fltp", "f8": "fltp", "i2": "s16p", "i4": "s32p"}[samples.dtype.str[1:]]
    values = samples.astype(np.float32) if source == "fltp" else samples
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.layout, stream.format = layout, form
        if codec not in ("flac", "alac", "wavpack", "tta", "g722"):
            stream.bit_rate = 128_000
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(values), format=source, layout=layout)
        frame.sample_rate, frame.pts = rate, 0
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def write_real_files(folder: Path) -> list[Path]:
    """One short stereo file of every kind."""
    time_ = np.arange(round(SECONDS * 48_000)) / 48_000
    samples = 0.3 * np.sin(2 * np.pi * np.outer((440.0, 1320.0), time_))
    paths = []
    for container, subtype in PLAIN:
        paths.append(folder / f"{container}-{subtype}.bin")
        soundfile.write(paths[-1], samples.T, 48_000, format=container, subtype=subtype)
    for extension, (codec, form) in CODED.items():
        path = folder / f"coded.{extension}"
        paths.append(encode(path, codec, samples, 48_000, form=form, layout="stereo"))
    return paths


def mutate(content: bytes, seed: int) -> bytes:
    """Change, cut, repeat or remove bytes, mostly of the header."""
    draw = random.Random(seed)
    data = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 4, 8))):
        reach = len(data) if draw.random() < 0.2 else min(HEADER, len(data))
        at = draw.randrange(max(1, reach))
        match draw.randrange(7):
            case 0 | 1:
                data[at : at + 1] = bytes([draw.randrange(256)])
            case 2 | 3:
                data[at : at + 4] = draw.choice(EXTREMES)
            case 4:
                del data[at : at + draw.choice((1, 2, 4, 30))]
            case 5:
                data[at:at] = data[at : at + draw.choice((1, 2, 4, 30))]
            case _:
                del data[draw.randrange(max(1, len(data))) :]
    return bytes(data)


def small_separator() -> Separator:
    """A network with random weights whose slots all count as sources."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = NetworkConfig(widths=(4, 4, 4, 8), n_context=1, embedding=4, min_existence=0.0)
    return Separator(SeparationNetwork(config).eval())


def try_file(separator: Separator, path: Path, folder: Path) -> str:
    """Separate a mutated file; return what became of it, an unforeseen error by its name."""
    output = folder / "out"
    shutil.rmtree(output, ignore_errors=True)
    try:
        result = separator.separate_file(path, output, n_slots=2, warn=lambda message: None)
    except SeparatorError as error:
        whole = not any(path.is_file() for path in output.rglob("*")) and "\n" not in str(error)
        return "refused in one line" if whole else f"stems left by an error ({error})"
    except Exception as error:
        return f"unforeseen {type(error).__name__}: {error}"
    stems = [*result.sources, result.residual]
    lengths = {soundfile.info(stem.file).frames for stem in stems}
    if len(lengths) > 1 or len(list(output.rglob("*.*"))) != len(stems):
        return f"stems that are not whole ({sorted(lengths)})"
    return "separated"


def work(folder: Path, first: int, last: int) -> None:
    """Try files and say after each what became of it, one line."""
    separator = small_separator()
    originals = sorted((folder / "real").iterdir())
    for seed in range(first, last):
        original = originals[seed % len(originals)]
        path = folder / f"mutated{original.suffix}"
        path.write_bytes(mutate(original.read_bytes(), seed))
        print(json.dumps([seed, original.name, try_file(separator, path, folder)]), flush=True)


def outcomes(folder: Path, n_files: int) -> Iterator[tuple[int, str, str]]:
    """Seed, file and outcome of every mutated file; a new process takes over after a crash or a hang."""
    (folder / "real").mkdir()
    names = [path.name for path in sorted(write_real_files(folder / "real"))]
    seed = 0
    while seed < n_files:
        command = [sys.executable, __file__, "--work", str(folder), str(seed), str(n_files)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert process.stdout is not None
        lines: Queue[str | None] = Queue()
        threading.Thread(target=_forward, args=(process.stdout, lines), daemon=True).start()
        patience = 3 * PATIENCE  # until the first line the process has to start
        while seed < n_files:
            try:
                line = lines.get(timeout=patience)
            except Empty:
                line = "hang"
            if line is None or line == "hang":
                process.kill()
                what = "hang" if line else f"crash ({process.wait()})"
                yield seed, names[seed % len(names)], what
                seed += 1
                break
            patience = PATIENCE
            _, name, outcome = json.loads(line)
            yield seed, name, outcome
            seed += 1
        process.kill()
        process.wait()


def _forward(stream: IO[str], lines: "Queue[str | None]") -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def main() -> None:
    """Try mutated files and write down what became of them."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=positive, default=10_000)
    parser.add_argument("--work", nargs=3, metavar=("FOLDER", "FIRST", "LAST"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        folder, first, last = arguments.work
        work(Path(folder), int(first), int(last))
        return
    started = time.perf_counter()
    counts: Counter[str] = Counter()
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        for seed, name, outcome in outcomes(Path(folder), arguments.files):
            usual = outcome in ("separated", "refused in one line")
            counts[outcome if usual else "failed"] += 1
            if not usual:
                failures.append({"seed": seed, "file": name, "outcome": outcome})
                print(seed, name, outcome, flush=True)
    record = {
        "environment": environment(),
        "date": time.strftime("%Y-%m-%d"),
        "kinds": len(PLAIN) + len(CODED),
        "counts": {key: counts[key] for key in ("separated", "refused in one line", "failed")},
        "failures": failures,
        "seconds": round(time.perf_counter() - started, 1),
    }
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results/fuzz.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(exit_status(main, __file__))
