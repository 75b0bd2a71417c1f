"""Make a FUSS-like data set of any size from the soundscapes bank: dry mixtures and reverberant ones.

    python data/fuss/make_like.py --train 2000 --validation 100 --eval 300

The layout is that of FUSS: OUTPUT/ssdata and OUTPUT/ssdata_reverb, in each `{split}_example_list.txt`,
`{split}/exampleN.wav` and `{split}/exampleN_sources/{background0,foreground0..2}_sound.wav`. 10 s, 16 kHz,
16-bit; one background and 0 to 3 foregrounds at -5 to 25 dB to it; a mixture is the exact sum of its sources
as stored. Every example is drawn from (seed, split, number) alone: a larger set begins with the smaller one,
and a run that was stopped goes on. README.md beside this file says more.
"""

import argparse
import hashlib
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import joblib
import numpy as np
import soundfile
import torch
from scipy import signal

from separator.augmentation import SAMPLE_RATE, Samples, crop, loop, room_response, set_level
from separator.console import Counter
from separator.datasets import AMBIENCE, Bank, place_clips
from separator.errors import SeparatorError
from separator.script import Parser, exit_status, natural, positive

HERE = Path(__file__).resolve().parent
LENGTH = 10 * SAMPLE_RATE
SPLITS = {"train": "train", "validation": "validation", "eval": "evaluation"}  # ours to the bank's
DIGITS = {"train": 5, "validation": 4, "eval": 4}  # of an example's number
VERSIONS = ("ssdata", "ssdata_reverb")
MAX_FOREGROUNDS = 3
BACKGROUND_CLASSES = (AMBIENCE, "vehicles_mechanical")
LEVEL_RANGE_DB = (-5.0, 25.0)  # a foreground to the background, over the time it is active
MIXTURE_RMS_DB = (-30.0, -18.0)
MAX_PEAK = 0.9
CHUNK = 50  # examples a worker makes at a time
SETTINGS = "fuss_like.json"


def draw_sources(bank: Bank, rng: np.random.Generator) -> list[Samples]:
    """One background, then 0 to 3 foregrounds of other families, at their levels to it."""
    count = int(rng.integers(MAX_FOREGROUNDS + 1))
    sources: list[Samples] = []
    used: set[str] = set()
    for _ in range(1000):
        if not sources:
            clip = bank.draw_background(rng, BACKGROUND_CLASSES)
            family, level_db = clip.family, 0.0
            source = loop(crop(bank.read(clip), LENGTH, rng), LENGTH)
        else:
            clips = bank.draw_family(rng, bank.draw_class(rng, AMBIENCE))
            family, level_db = clips[0].family, float(rng.uniform(*LEVEL_RANGE_DB))
            source = place_clips(bank, clips, LENGTH, rng)
        source = set_level(source, level_db)
        if family not in used and np.abs(source).max() > 0.01:  # a stretch of a clip may be silent
            used.add(family)
            sources.append(source)
        if len(sources) == count + 1:
            return sources
    raise SeparatorError(f"no {count + 1} families of the bank sound together; prepare it from all packages")


def reverberate(sources: Sequence[Samples], responses: Sequence[Samples]) -> list[Samples]:
    """Each source through its own response, at the level it had."""
    wet = []
    for source, response in zip(sources, responses, strict=True):
        filtered = signal.fftconvolve(source, response)[:LENGTH]
        wet.append(np.asarray(filtered * (_rms(source) / _rms(filtered)), np.float32))
    return wet


def draw_responses(
    count: int, rng: np.random.Generator, measured: Sequence[tuple[Samples, ...]]
) -> list[Samples]:
    """As many responses: of one measured room, or simulated where there is no measured one."""
    if not measured:
        return [room_response(rng) for _ in range(count)]
    room = measured[int(rng.integers(len(measured)))]
    return [room[k] for k in rng.choice(len(room), count, replace=len(room) < count)]


def read_responses(directory: Path) -> list[tuple[Samples, ...]]:
    """Measured impulse responses by room, a room being a folder of sound files; each channel is a response.

    They are brought to 16 kHz, to a peak of 1, and to start with their direct sound.

    Raises:
        SeparatorError: there is none, or one cannot be read or is silent.
    """
    rooms: dict[Path, list[Samples]] = {}
    for path in sorted(directory.rglob("*")):
        if path.suffix.lower() not in (".wav", ".flac", ".aif", ".aiff"):
            continue
        try:
            audio, rate = soundfile.read(path, dtype="float64", always_2d=True)
        except soundfile.LibsndfileError as error:
            raise SeparatorError(f"{path} cannot be read as an impulse response: {error}") from error
        divisor = int(np.gcd(rate, SAMPLE_RATE))
        audio = signal.resample_poly(audio, SAMPLE_RATE // divisor, rate // divisor, axis=0)
        for channel in audio.T:
            peak = int(np.abs(channel).argmax()) if channel.size else 0
            if not channel.size or channel[peak] == 0:
                raise SeparatorError(f"{path} is silent; an impulse response has a peak")
            rooms.setdefault(path.parent, []).append((channel[peak:] / channel[peak]).astype(np.float32))
    if not rooms:
        raise SeparatorError(f"no .wav, .flac or .aiff file under {directory}; pass a folder of responses")
    return [tuple(room) for room in rooms.values()]


def mix(sources: Sequence[Samples], level_db: float) -> tuple[Samples, list[Samples]]:
    """Scale the sources so that their sum has that RMS, round to 16 bits; the mixture is the exact sum."""
    total = np.sum(sources, axis=0, dtype=np.float64)
    gain = 10 ** (level_db / 20) / _rms(total)
    gain = min(gain, (MAX_PEAK - 0.001) / max(float(np.abs(x).max()) for x in (total, *sources)))
    rounded = [np.round(source * gain * 32768).astype(np.int16) for source in sources]
    return np.sum(rounded, axis=0, dtype=np.int32).astype(np.int16), rounded


def make_example(
    bank: Bank,
    output: Path,
    versions: Sequence[str],
    key: tuple[int, str, int],
    measured: Sequence[tuple[Samples, ...]],
) -> None:
    """Write the versions of the example of ``key`` (seed, split, number) that are not complete yet."""
    seed, split, number = key
    wanted = [version for version in versions if not _mixture_path(output / version, split, number).exists()]
    if not wanted:
        return
    place = (seed, list(SPLITS).index(split), number)
    rng = np.random.default_rng([*place, 0])
    sources = draw_sources(bank, rng)
    level_db = float(rng.uniform(*MIXTURE_RMS_DB))
    for version in wanted:
        stems = sources
        if version == "ssdata_reverb":
            rng = np.random.default_rng([*place, 1])
            stems = reverberate(sources, draw_responses(len(sources), rng, measured))
        _write(_mixture_path(output / version, split, number), *mix(stems, level_db))


def make_like(
    bank: Path,
    output: Path,
    counts: dict[str, int],
    *,
    seed: int,
    versions: Sequence[str] = VERSIONS,
    responses: Path | None = None,
    n_jobs: int = 1,
) -> None:
    """Write the set; ``counts`` are the examples of each split.

    Raises:
        SeparatorError: no bank, no responses, or the folder holds a set of other settings.
    """
    for split in counts:
        Bank(bank, SPLITS[split])
    measured = [] if responses is None else read_responses(responses)
    _check_settings(output, _settings(bank, seed, responses))
    chunks = [
        (split, range(start, min(start + CHUNK, count)))
        for split, count in counts.items()
        for start in range(0, count, CHUNK)
    ]
    work = joblib.delayed(_make_chunk)
    parallel = joblib.Parallel(n_jobs=n_jobs, return_as="generator_unordered")
    progress, done = Counter("examples"), 0
    for made in parallel(work(bank, output, versions, seed, *chunk, measured) for chunk in chunks):
        done += made
        progress(done, sum(counts.values()))
    for version in versions:
        for split in counts:
            lines = list(_list_lines(output / version, split))
            (output / version / f"{split}_example_list.txt").write_text("\n".join(lines) + "\n")


def _make_chunk(
    bank: Path,
    output: Path,
    versions: Sequence[str],
    seed: int,
    split: str,
    numbers: range,
    measured: Sequence[tuple[Samples, ...]],
) -> int:
    torch.set_num_threads(1)
    clips = Bank(bank, SPLITS[split])
    for number in numbers:
        make_example(clips, output, versions, (seed, split, number), measured)
    return len(numbers)


def _mixture_path(root: Path, split: str, number: int) -> Path:
    return root / split / f"example{number:0{DIGITS[split]}d}.wav"


def _write(mixture_path: Path, mixture: Samples, stems: Sequence[Samples]) -> None:
    """Write the sources, then the mixture under its name at the end: it stands for a complete example."""
    folder = mixture_path.with_name(f"{mixture_path.stem}_sources")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for k, stem in enumerate(stems):
        name = f"foreground{k - 1}_sound.wav" if k else "background0_sound.wav"
        soundfile.write(folder / name, stem, SAMPLE_RATE, subtype="PCM_16")
    part = mixture_path.with_suffix(".part")
    soundfile.write(part, mixture, SAMPLE_RATE, subtype="PCM_16", format="WAV")
    part.replace(mixture_path)


def _list_lines(root: Path, split: str) -> Iterator[str]:
    """Lines of the example list: all that are there, also those of an earlier, larger run."""
    for mixture in sorted((root / split).glob("example*.wav")):
        stems = sorted(mixture.with_name(f"{mixture.stem}_sources").iterdir())
        yield "\t".join(path.relative_to(root).as_posix() for path in (mixture, *stems))


def _settings(bank: Path, seed: int, responses: Path | None) -> dict[str, object]:
    files = [bank / "clips.csv"]
    if responses is not None:
        files += sorted(path for path in responses.rglob("*") if path.is_file())
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    return {"seed": seed, "reverberation": "measured" if responses else "simulated", "sha256": digest}


def _check_settings(output: Path, settings: dict[str, object]) -> None:
    path = output / SETTINGS
    if not path.exists():
        output.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings) + "\n")
        return
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise SeparatorError(f"{path} is broken ({error}); remove {output} and make the set anew") from error
    if found != settings:
        raise SeparatorError(
            f"{output} holds a set made with {found}, not {settings}; remove it or pass another --output"
        )


def _rms(waveform: Samples) -> float:
    return float(np.sqrt(np.mean(np.square(waveform, dtype=np.float64))))


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the set; 0 when it is complete, 1 with one line on stderr when it is not."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=natural, default=2000, metavar="N", help="examples of the split")
    parser.add_argument("--validation", type=natural, default=100, metavar="N")
    parser.add_argument("--eval", type=natural, default=300, metavar="N")
    parser.add_argument("--seed", type=natural, default=0)
    parser.add_argument("--versions", nargs="+", choices=VERSIONS, default=VERSIONS)
    parser.add_argument("--responses", type=Path, metavar="DIR", help="measured responses, a folder a room")
    parser.add_argument("--bank", type=Path, default=HERE.parent / "soundscapes/bank")
    parser.add_argument("--output", type=Path, default=HERE / "like")
    parser.add_argument("--jobs", type=positive, default=1, help="processes")
    options = parser.parse_args(arguments)
    counts = {split: getattr(options, split) for split in SPLITS if getattr(options, split) > 0}
    settings = {"seed": options.seed, "versions": options.versions, "responses": options.responses}
    return exit_status(
        lambda: make_like(options.bank, options.output, counts, n_jobs=options.jobs, **settings), __file__
    )


if __name__ == "__main__":
    sys.exit(main())
