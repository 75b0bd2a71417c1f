"""The page: drop a recording, hear its sounds, see where the evidence went, take the files home.

`build_interface` lays the page out over `run_job` and `mix_sounds` and adds no separation logic. Players get
the written stems as files, since arrays would be normalised. The results of a run lie in a folder with a
random name, which is deleted with everything else after `Limits.keep_minutes`.
"""

import html
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import gradio as gr
from gradio.utils import get_upload_folder

from separator.checkpoint import available_models, check_model
from separator.errors import SeparatorError
from separator.separate import Separator
from separator.web_jobs import Job, Limits, check_limits, one_line, run_job, summarise
from separator.web_mix import (
    MAX_SOUNDS,
    PRESETS,
    mix_sounds,
    sample_sounds,
    samples_dir,
    score_stems,
    write_mixture,
)
from separator.web_pictures import (
    COLOURS,
    MAX_SOURCES,
    RESIDUAL_COLOUR,
    duration_text,
    level_text,
    show_evidence,
    show_headline,
    show_mixture,
    show_table,
)

QUEUE_SIZE = 50  # visitors that may wait; more are told to come back
VIEW_SECONDS = 120  # that a result waits for its page to fetch it
SWEEP_SECONDS = 60.0  # from one look for old files to the next
EXAMPLES = {
    "single.wav": "A bell",
    "mix3.wav": "River, clock, guitar",
    "mix4.wav": "Birds, voice, blast, cymbal",
    "stereo.wav": "Waterfall and boing, stereo",
}
NO_SOUND = "none"
SCORE_HEAD = ("sound", "level", "found as", "SI-SDR", "gain over mixture")

Update = dict[str, Any]
UNUSED: Update = gr.update(visible=False, value=None)  # a player without anything to play


def build_interface(limits: Limits | None = None, model: str | Path | None = None) -> gr.Blocks:
    """Lay out the page; ``model`` is a shipped model's name or a folder, None offers all that are shipped.

    Raises:
        SeparatorError: there is no such model, or its files are corrupt.
    """
    limits = limits or Limits()
    models = {name: name for name in available_models()} if model is None else {Path(model).name: model}
    for name_or_dir in models.values():
        check_model(name_or_dir)
    keep_seconds = 60 * limits.keep_minutes
    page = gr.Blocks(
        title="Separator: hear the sounds in a recording",
        analytics_enabled=False,
        delete_cache=(min(SWEEP_SECONDS, keep_seconds), keep_seconds),  # type: ignore[arg-type] # any number
    )
    with page:
        gr.HTML(
            "<h1>Take a recording apart</h1><p>Drop in a sound. The page finds the sounds it is made of, "
            "without being told how many, and lets you see and hear each one alone.</p>",
            elem_classes="intro",
        )
        with gr.Tab("Your recording"):
            _recording_tab(limits, models)
        if sample_sounds():
            with gr.Tab("Mix your own"):
                _mix_tab(models)
        gr.HTML(
            "<p>Nothing is kept: recordings and results are deleted after "
            f"{duration_text(keep_seconds)} and when the server stops.</p>",
            elem_classes="small",
        )
    page.queue(max_size=QUEUE_SIZE, default_concurrency_limit=1)
    return page


class _View(NamedTuple):
    """What a panel shows of a job, as small values."""

    headline: str
    mixture_picture: str
    evidence: str
    sources: list[tuple[str, str]]  # file, label
    residual: tuple[str, str]
    mixture: tuple[str, str]


def _recording_tab(limits: Limits, models: Mapping[str, str | Path]) -> None:
    """A recording in, its sounds out."""
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            recording = gr.Audio(
                label="Recording",
                sources=["upload", "microphone"],
                type="filepath",
                buttons=[],
                elem_id="recording",
            )
            gr.HTML(
                f"<p>wav, flac, mp3, ogg or m4a; up to {duration_text(limits.max_seconds)} and "
                f"{limits.max_megabytes:g} MB</p>",
                elem_classes="small",
            )
            examples = [path for name in EXAMPLES if (path := samples_dir() / name).is_file()]
            if examples:
                gr.Examples(
                    [[str(path)] for path in examples],
                    recording,
                    label="Or try one of these",
                    example_labels=[EXAMPLES[path.name] for path in examples],
                    api_visibility="private",
                )
            n_slots, model = _options(models)
            start = gr.Button("Separate", variant="primary", elem_id="separate")
        with gr.Column(scale=3, min_width=300):
            status = _status("Pick a recording and press <b>Separate</b>. The sounds appear here.")
            panel, archive = _panel()

    view, failure = gr.State(time_to_live=VIEW_SECONDS), gr.State({})
    summary, files = gr.JSON(label="summary", visible=False), _files()

    def separate(
        recording: str | None,
        n_slots: int,
        model: str,
        failure: dict[str, str],
        progress: gr.Progress = gr.Progress(),  # noqa: B008
    ) -> tuple[_View, dict[str, Any], list[str], str]:
        """Separate a recording into at most n_slots sounds.

        Returns a summary, the files (sources by falling energy, residual, picture) and a zip of all.
        """
        path = Path(recording or "")
        with _told(failure, path):
            if recording is None:
                raise SeparatorError("no recording; drop a file, record one or pick an example")
            job = _run(path, limits, models[model], n_slots, progress)
        shown = _view(job, path)
        return shown, summarise(job), [str(file) for file in job.files], str(job.archive)

    run = start.click(_cleared, None, [archive, status, *panel], **_PRIVATE).then(
        separate,
        [recording, n_slots, model, failure],
        [view, summary, files, archive],
        api_name="separate",
        show_progress_on=status,
        **_QUEUED,
    )
    run.success(lambda view: [None, *_shown(view)], view, [view, status, *panel], **_PRIVATE)
    run.failure(_failed, failure, status, **_PRIVATE)


def _mix_tab(models: Mapping[str, str | Path]) -> None:
    """Known sounds at chosen levels in, their sounds and SI-SDR against the truth out."""
    sounds = list(sample_sounds())
    first = next(iter(PRESETS))
    with gr.Row():
        with gr.Column(scale=2, min_width=300):
            preset = gr.Radio(list(PRESETS), value=first, label="Start from", elem_id="preset")
            note = gr.HTML(f"<p>{PRESETS[first][1]}</p>", elem_classes="result")
            rows = []
            for k, (sound, level_db) in enumerate(_padded(first)):
                with gr.Row():
                    rows += [
                        gr.Dropdown([*sounds, NO_SOUND], value=sound, label=f"Sound {k + 1}", min_width=120),
                        gr.Slider(-30, 0, value=level_db, step=1, label="dB", min_width=140),
                    ]
            n_slots, model = _options(models)
            start = gr.Button("Mix and separate", variant="primary", elem_id="mix")
        with gr.Column(scale=3, min_width=300):
            status = _status("Pick two to four sounds and their levels, and see how well they come apart.")
            scores = gr.HTML(visible=False, elem_classes="result")
            panel, archive = _panel()

    def choose(name: str) -> list[Any]:
        return [f"<p>{PRESETS[name][1]}</p>", *(value for part in _padded(name) for value in part)]

    failure, files = gr.State({}), _files()

    def separate_mixture(
        failure: dict[str, str],
        n_slots: int,
        model: str,
        *values: Any,
        progress: gr.Progress = gr.Progress(),  # noqa: B008
    ) -> list[Any]:
        parts = [
            (sound, level_db)
            for sound, level_db in zip(values[::2], values[1::2], strict=True)
            if sound != NO_SOUND
        ]
        path = _new_folder() / "your mix.wav"
        with _told(failure, path):
            sources = mix_sounds(parts)
            write_mixture(sources, path)
            job = _run(path, Limits(), models[model], n_slots, progress)
        table = show_table("Against the truth", SCORE_HEAD, score_stems(parts, sources, job.result.sources))
        legend = (
            "<p>SI-SDR: how clean the stem is, in dB; the gain is what separating brought over the mixture "
            "as it was.</p>"
        )
        scores = gr.update(value=table + legend, visible=True)
        return [[str(file) for file in job.files], scores, str(job.archive), *_shown(_view(job, path))]

    preset.change(choose, preset, [note, *rows], **_PRIVATE)
    hide = [gr.update(visible=False, value="")]
    run = start.click(lambda: hide + _cleared(), None, [scores, archive, status, *panel], **_PRIVATE).then(
        separate_mixture,
        [failure, n_slots, model, *rows],
        [files, scores, archive, status, *panel],
        api_visibility="private",
        show_progress_on=status,
        **_QUEUED,
    )
    run.failure(_failed, failure, status, **_PRIVATE)


_PRIVATE: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
_QUEUED: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "separation"}


def _options(models: Mapping[str, str | Path]) -> tuple[gr.Slider, gr.Dropdown]:
    """How many sounds to look for, and with which model."""
    n_slots = gr.Slider(
        1,
        MAX_SOURCES,
        value=4,
        step=1,
        label="Look for at most",
        info="sounds; fewer are found if there are fewer",
    )
    names = list(models)
    return n_slots, gr.Dropdown(names, value=names[0], label="Model", visible=len(names) > 1)


def _files() -> gr.File:
    """All files of a result: a program gets them, and Gradio deletes them in time."""
    return gr.File(label="files", file_count="multiple", visible=False)


def _status(hint: str) -> gr.HTML:
    """The place where progress, place in the queue and hints are read."""
    return gr.HTML(f'<div class="hint" role="status">{hint}</div>', elem_classes="status", min_height=110)


def _panel() -> tuple[list[Any], gr.DownloadButton]:
    """A hidden result, its components in the order of `_shown`, and the button that hands over the zip."""
    with gr.Column(visible=False, elem_classes="panel") as column:
        headline = gr.HTML(elem_classes="result")
        archive = gr.DownloadButton("Download all stems (zip)", elem_classes="archive", size="md")
        mixture_picture = gr.HTML(elem_classes="result")
        players = [_player(k + 1, colour) for k, colour in enumerate(COLOURS.values())]
        residual = _player(MAX_SOURCES + 1, RESIDUAL_COLOUR)
        mixture = _player(MAX_SOURCES + 1, RESIDUAL_COLOUR)
        evidence = gr.HTML(elem_classes="result")
    return [column, headline, mixture_picture, evidence, *players, residual, mixture], archive


def _player(part: int, colour: str) -> gr.Audio:
    """A player with a waveform in the colour of its part of the picture."""
    return gr.Audio(
        visible=False,
        interactive=False,
        type="filepath",
        buttons=["download"],
        elem_classes=["player", f"part-{part}"],
        waveform_options=gr.WaveformOptions(waveform_color=f"{colour}99", waveform_progress_color=colour),
    )


def _cleared() -> list[Update]:
    """Zip, status and panel before a run: nothing of the run before is left."""
    status = gr.update(value='<div class="hint" role="status">&nbsp;</div>', visible=True)
    empty = [gr.update(value="")] * 3
    return [gr.update(value=None), status, gr.update(visible=False), *empty, *[UNUSED] * (MAX_SOURCES + 2)]


def _shown(view: _View) -> list[Any]:
    """Status and panel after a run."""
    labelled = [*view.sources, view.residual, view.mixture]
    *players, residual, mixture = [gr.update(value=f, label=label, visible=True) for f, label in labelled]
    players += [UNUSED] * (MAX_SOURCES - len(players))
    pictures = [view.headline, view.mixture_picture, view.evidence]
    return [gr.update(visible=False), gr.update(visible=True), *pictures, *players, residual, mixture]


def _run(path: Path, limits: Limits, model: str | Path, n_slots: int, progress: Callable[..., Any]) -> Job:
    """Run a job in a folder of its own."""
    progress(0.0, desc="reading")
    check_limits(path, limits)
    return run_job(
        _load(model), path, _new_folder(), int(n_slots), lambda share, step: progress(share, desc=step)
    )


@cache
def _load(model: str | Path) -> Separator:
    """The model, which stays in memory."""
    return Separator.load(model)


def _new_folder() -> Path:
    """Name of a folder that nobody can guess, under the one that is deleted."""
    return Path(get_upload_folder()) / secrets.token_hex(16)


@contextmanager
def _told(failure: dict[str, str], path: Path) -> Iterator[None]:
    """Turn an error about ``path`` into Gradio's, and leave its line for the page in ``failure``."""
    failure.clear()
    try:
        yield
    except SeparatorError as error:
        failure["line"] = one_line(error, path)
        raise gr.Error(failure["line"], visible=False, print_exception=False) from error


def _failed(failure: dict[str, str]) -> Update:
    """The line of the error in place of a result."""
    line = failure.get("line", "the server failed; try again, or use the command `separate`")
    return gr.update(value=f'<div class="alert" role="alert">{html.escape(line)}</div>', visible=True)


def _view(job: Job, path: Path) -> _View:
    """Words and pictures of a job."""
    result = job.result
    heard = bool(result.overview.mixture.any())  # of silence there is nothing to see
    likely = [f"{100 * existence:.0f} % sure" for existence in result.existence]
    return _View(
        headline=show_headline(result),
        mixture_picture=show_mixture(result.overview, path.name) if heard else "",
        evidence=show_evidence(result.overview) if heard else "",
        sources=[
            (str(stem.file), f"Source {k + 1}: {level_text(stem)}, {sure}")
            for k, (stem, sure) in enumerate(zip(result.sources, likely, strict=True))
        ],
        residual=(str(result.residual.file), f"Residual, what no source took: {level_text(result.residual)}"),
        mixture=(str(path), "The recording itself, to compare"),
    )


def _padded(preset: str) -> Sequence[tuple[str, float]]:
    """The sounds of a preset and as many empty rows as there is room for."""
    parts = PRESETS[preset][0]
    return [*parts, *[(NO_SOUND, 0.0)] * (MAX_SOUNDS - len(parts))]
