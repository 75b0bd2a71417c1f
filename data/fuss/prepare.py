"""Download FUSS (Zenodo record 3743844), check it, unpack it and count its examples.

    python data/fuss/prepare.py                    both versions, into data/fuss/ssdata and ssdata_reverb
    python data/fuss/prepare.py --versions ssdata  the dry one alone
    python data/fuss/prepare.py --check            look at what is there, download nothing

A run that was stopped goes on where it was. README.md beside this file says more.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from separator.console import Counter
from separator.downloads import RemoteFile, bytes_to_fetch, check_space, fetch, read_zenodo_record, unpack
from separator.fuss import FUSS_SPLITS, check_fuss_split
from separator.script import Parser, counted, exit_status

HERE = Path(__file__).resolve().parent
RECORD = "https://zenodo.org/api/records/3743844"
ARCHIVES = {"ssdata": "FUSS_ssdata.tar.gz", "ssdata_reverb": "FUSS_ssdata_reverb.tar.gz"}
FILES_PER_EXAMPLE = 5  # at most: a mixture and four sources
FILE_BYTES = 320_044  # 10 s at 16 kHz, 16 bits, and a header
MEGABYTE = 10**6
SHOWN_PROBLEMS = 20


def obtain(record: str, versions: Sequence[str], output: Path, download: Path, *, keep: bool) -> None:
    """Download and unpack the versions that are not there."""
    missing = [version for version in versions if not (output / version).exists()]
    if not missing:
        return
    files = dict(zip(missing, read_zenodo_record(record, [ARCHIVES[v] for v in missing]), strict=True))
    unpacked = sum(FUSS_SPLITS.values()) * FILES_PER_EXAMPLE * FILE_BYTES  # of a version, at most
    _check_disks(list(files.values()), unpacked * len(missing), output, download)
    for version, file in files.items():
        archive = fetch(file, download, progress=_megabytes(f"{file.name}, MB"))
        check_space(output, unpacked)
        unpack(archive, version, output, progress=_megabytes(f"unpacking {file.name}, MB"))
        if not keep:
            archive.unlink()


def check(versions: Sequence[str], output: Path) -> list[str]:
    """One line for everything that is missing, left over or of the wrong rate or length."""
    problems = []
    for version in versions:
        for split, n_examples in FUSS_SPLITS.items():
            found = check_fuss_split(output / version, split, n_examples=n_examples)
            problems += [f"{version}: {line}" for line in found]
            said = counted(len(found), "problem") if found else "no problems"
            print(f"{version}/{split}: {said}", file=sys.stderr, flush=True)
    return problems


def _check_disks(files: Sequence[RemoteFile], unpacked: int, output: Path, download: Path) -> None:
    to_fetch = sum(bytes_to_fetch(file, download) for file in files)
    for file in files:
        print(f"{file.name}: {file.size / 1e9:.2f} GB, MD5 {file.md5}", file=sys.stderr)
    output.mkdir(parents=True, exist_ok=True)
    download.mkdir(parents=True, exist_ok=True)
    if output.stat().st_dev == download.stat().st_dev:
        check_space(output, to_fetch + unpacked)
    else:
        check_space(output, unpacked)
        check_space(download, to_fetch)


def _megabytes(label: str):
    counter = Counter(label)
    return lambda done, total: counter(-(-done // MEGABYTE), -(-total // MEGABYTE))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare the data; 0 when all of it is there, 1 with what is not on stderr."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", nargs="+", choices=list(ARCHIVES), default=list(ARCHIVES))
    parser.add_argument("--output", type=Path, default=HERE, help="where ssdata/ and ssdata_reverb/ go")
    parser.add_argument("--download", type=Path, default=HERE / "download", help="folder of the archives")
    parser.add_argument("--keep-archives", action="store_true", help="do not remove them once unpacked")
    parser.add_argument("--record", default=RECORD, help="address of the record that lists the archives")
    parser.add_argument("--check", action="store_true", help="only check what is there")
    options = parser.parse_args(arguments)
    return exit_status(lambda: _prepare(options), __file__, resumes=True)


def _prepare(options: argparse.Namespace) -> int:
    """Obtain what is missing, unless it is only to be checked, and tell what is wrong; the exit status."""
    if not options.check:
        obtain(options.record, options.versions, options.output, options.download, keep=options.keep_archives)
    problems = check(options.versions, options.output)
    for line in problems[:SHOWN_PROBLEMS]:
        print(line, file=sys.stderr)
    if len(problems) > SHOWN_PROBLEMS:
        print(f"and {len(problems) - SHOWN_PROBLEMS} more", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
