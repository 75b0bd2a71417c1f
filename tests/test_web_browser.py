"""The page in a real browser: what a visitor does, and what he must never see."""

import io
import os
import re
import shutil
import socket
import zipfile
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import soundfile

from separator import cli
from separator.web_jobs import Limits
from separator.web_server import start

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
if CHROMIUM is None:
    pytest.skip(
        "no Chromium to open the page with; install the system's package chromium or set CHROMIUM",
        allow_module_level=True,
    )
playwright = pytest.importorskip("playwright.sync_api", reason="the extra dev has playwright")

SAMPLES = Path(__file__).parents[1] / "data/samples"
PATIENCE = 240_000  # ms, for a very busy machine
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A page over the shipped model that takes 30 s and 3 MB."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", str(tmp_path_factory.mktemp("server")))
        page = start(Limits(max_seconds=30, max_megabytes=3), port=port)
        yield page.local_url
        page.close(verbose=False)


@pytest.fixture(scope="module")
def browser():
    flags = ["--no-sandbox", "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, address):
    """Open the page; every request of the visit must go to the page's own host."""
    requests, contexts = [], []

    def open_page(**options):
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("request", lambda request: requests.append(request.url))
        page.goto(address)
        page.get_by_role("button", name="Separate", exact=True).wait_for()
        return page

    yield open_page
    for context in contexts:
        context.close()
    hosts = {urlsplit(url).netloc for url in requests if urlsplit(url).scheme not in ("data", "blob")}
    assert hosts == {urlsplit(address).netloc}


def upload(page, path: Path) -> None:
    """Hand the file to the recording's field and wait until the server has it."""
    if page.locator("#recording").get_by_label("Clear").is_visible():
        page.locator("#recording").get_by_label("Clear").click()
    with page.expect_response(re.compile("/upload")):
        page.locator("#recording input[type=file]").set_input_files(path)
    page.locator("#recording").get_by_label("Clear").wait_for()


def separate(page, name: str) -> list[str]:
    """Press the button, wait for the result of ``name`` and return the labels of the players."""
    page.get_by_role("button", name="Separate", exact=True).click()
    page.get_by_role("heading", name=re.compile(f"found in {re.escape(name)}$")).wait_for()
    page.locator(".player audio, .player #waveform").first.wait_for(state="attached")
    return labels(page)


def labels(page) -> list[str]:
    """Labels of the players that can be seen."""
    players = page.locator(".player").filter(visible=True)
    return [" ".join(text.split()) for text in players.locator("label").all_inner_texts()]


def alert(page) -> str:
    """The line of an error, once it is there."""
    line = page.get_by_role("alert").filter(visible=True)
    line.wait_for()
    return line.inner_text()


def download(page) -> dict[str, bytes]:
    """Names and contents of the zip."""
    with page.expect_download() as caught:
        page.get_by_role("button", name="Download all stems (zip)").filter(visible=True).click()
    data = Path(caught.value.path()).read_bytes()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def command(tmp_path: Path, path: Path, *options: str) -> dict[str, bytes]:
    """What the command writes for ``path``."""
    output = tmp_path / "command"
    assert cli.main([str(path), "--output", str(output), "--plot", *options]) == 0
    folder = output / path.stem
    return {f"{path.stem}/{file.name}": file.read_bytes() for file in folder.iterdir()}


def set_slots(page, count: int) -> None:
    field = page.get_by_role("spinbutton", name=re.compile("Look for at most")).first
    field.fill(str(count))
    field.press("Tab")


def test_a_visitor_hears_all_sounds_and_takes_home_what_the_command_writes(visit, tmp_path):
    page = visit()
    upload(page, SAMPLES / "stereo.wav")
    players = separate(page, "stereo.wav")
    written = command(tmp_path, SAMPLES / "stereo.wav")
    n_sources = sum("/source" in name for name in written)
    assert n_sources >= 2
    assert len(players) == n_sources + 2
    for k, label in enumerate(players[:n_sources]):
        assert re.fullmatch(rf"Source {k + 1}: -?\d+\.\d dB, \d+ % sure", label)
    levels = [float(re.search(r"(-?[\d.]+) dB", label)[1]) for label in players[:n_sources]]
    assert levels == sorted(levels, reverse=True)
    assert players[n_sources].startswith("Residual")
    assert players[-1].startswith("The recording itself")
    assert download(page) == written

    # the same page again, with one sound: no player, picture or legend of the run before is left
    upload(page, SAMPLES / "single.wav")
    set_slots(page, 1)
    players = separate(page, "single.wav")
    written = command(tmp_path, SAMPLES / "single.wav", "--slots", "1")
    assert [label.split(":")[0] for label in players] == [
        "Source 1",
        "Residual, what no source took",
        "The recording itself, to compare",
    ]
    assert page.locator(".legend li").filter(visible=True).all_inner_texts() == ["source 1", "residual"]
    assert page.locator(".evidence img").filter(visible=True).count() == 2
    assert download(page) == written


def test_every_picture_has_an_alternative_text(visit):
    page = visit()
    page.get_by_role("button", name="A bell").click()
    page.locator("#recording").get_by_label("Clear").wait_for()
    separate(page, "single.wav")
    images = page.locator("img").all()
    texts = [image.get_attribute("alt") for image in images]
    assert len(images) >= 1 + 5 and all(texts)
    assert all(image.evaluate("image => image.naturalWidth > 0") for image in images)
    assert texts[0].startswith("Spectrogram of single.wav: 5.0 s from left to right, 0 to 8 kHz")


def test_errors_are_one_line_on_the_page_and_take_the_old_result_away(visit, tmp_path):
    page = visit()
    button = page.get_by_role("button", name="Separate", exact=True)
    button.click()
    assert alert(page) == "no recording; drop a file, record one or pick an example"

    (tmp_path / "page.wav").write_text("<!doctype html><title>not a sound</title>")
    upload(page, tmp_path / "page.wav")
    button.click()
    page.get_by_text("page.wav is not audio that can be read").wait_for()
    assert re.fullmatch(r"page\.wav is not audio that can be read \(.+\); pass a .+ file", alert(page))

    soundfile.write(tmp_path / "silence.wav", np.zeros(8000), 8000)
    upload(page, tmp_path / "silence.wav")
    assert [label.split(":")[0] for label in separate(page, "silence.wav")] == [
        "Residual, what no source took",
        "The recording itself, to compare",
    ]
    assert page.get_by_role("heading", name="No sound found in silence.wav").is_visible()
    assert page.get_by_role("alert").filter(visible=True).count() == 0

    soundfile.write(tmp_path / "long.wav", np.zeros(8000 * 31), 8000)
    upload(page, tmp_path / "long.wav")
    button.click()
    page.get_by_text("long.wav lasts 31.0 s; this page takes up to 30 s").wait_for()
    assert labels(page) == []
    assert page.get_by_role("heading", name="found in").filter(visible=True).count() == 0


def test_a_file_over_the_size_cap_is_refused_while_it_is_sent(visit, tmp_path):
    page = visit()
    soundfile.write(tmp_path / "large.wav", np.zeros(44_100 * 40), 44_100)
    page.locator("#recording input[type=file]").set_input_files(tmp_path / "large.wav")
    message = page.get_by_test_id("toast-body")
    message.wait_for()
    assert "maximum" in message.inner_text().lower()


def test_a_recording_from_the_microphone_is_separated(visit):
    page = visit(permissions=["microphone"])
    field = page.locator("#recording")
    field.get_by_label("Record audio").click()
    field.get_by_role("button", name="Record", exact=True).click()
    stop = field.get_by_role("button", name="Stop", exact=True).filter(visible=True)
    stop.wait_for()
    page.wait_for_timeout(700)
    with page.expect_response(re.compile("/upload")):
        stop.click()
    field.get_by_label("Clear").wait_for()
    assert len(separate(page, "audio.wav")) >= 2


def test_mix_your_own_shows_scores_against_the_truth_and_the_known_limits(visit):
    page = visit()
    page.get_by_role("tab", name="Mix your own").click()
    page.get_by_role("radio", name="Same kind").check()
    page.get_by_text("A known limit: two sounds of one kind").wait_for()
    page.get_by_role("button", name="Mix and separate").click()
    page.get_by_role("heading", name="found in your mix.wav").wait_for()
    rows = page.locator(".scores tbody tr").filter(visible=True).all_inner_texts()
    assert [row.split()[0] for row in rows] == ["river", "waterfall"]

    page.get_by_role("radio", name="Different sounds").check()
    page.get_by_text("What the method is made for").wait_for()
    page.get_by_role("button", name="Mix and separate").click()
    page.locator(".scores").filter(visible=True).get_by_text("birds").wait_for()
    rows = [
        row.split("\t") for row in page.locator(".scores tbody tr").filter(visible=True).all_inner_texts()
    ]
    assert [row[:2] for row in rows] == [["birds", "0 dB"], ["guitar", "-6 dB"]]
    assert all(float(row[4].removesuffix(" dB")) > 3 for row in rows)
    assert len(labels(page)) >= 4


def test_the_page_fits_a_telephone_in_the_dark(visit):
    page = visit(viewport=PHONE, color_scheme="dark", has_touch=True)
    page.get_by_role("button", name="A bell").click()
    page.locator("#recording").get_by_label("Clear").wait_for()
    separate(page, "single.wav")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    page.get_by_role("tab", name="Mix your own").click()
    page.get_by_role("button", name="Mix and separate").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert contrast(page, ".intro p", "body") > 4.5


def test_text_and_buttons_can_be_read_in_the_light(visit):
    page = visit(color_scheme="light")
    assert contrast(page, ".intro p", "body") > 4.5
    assert contrast(page, ".hint", "body") > 4.5
    assert contrast(page, "#separate", "#separate") > 4.5


def test_the_page_works_by_keyboard(visit):
    page = visit()

    def tab_to(name: str) -> None:
        for _ in range(30):
            page.keyboard.press("Tab")
            if name == page.evaluate("document.activeElement.innerText?.trim()"):
                return
        pytest.fail(f"{name} cannot be reached by keyboard")

    tab_to("A bell")
    page.keyboard.press("Enter")
    page.locator("#recording").get_by_label("Clear").wait_for()
    tab_to("Separate")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="found in single.wav").wait_for()
    tab_to("Download all stems (zip)")
    with page.expect_download() as caught:
        page.keyboard.press("Enter")
    assert caught.value.suggested_filename == "single.zip"


def contrast(page, text: str, ground: str) -> float:
    """Contrast of the text's colour to the background's colour (WCAG 2.2, relative luminance)."""
    colours = page.evaluate(
        "([t, g]) => [getComputedStyle(document.querySelector(t)).color,"
        " getComputedStyle(document.querySelector(g)).backgroundColor]",
        [text, ground],
    )
    light = []
    for colour in colours:
        rgb = np.array([float(value) for value in re.findall(r"[\d.]+", colour)[:3]]) / 255
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        light.append(float(linear @ [0.2126, 0.7152, 0.0722]))
    return (max(light) + 0.05) / (min(light) + 0.05)
