"""Takes the screenshots of README.md from a running page: python demo/screenshots.py http://127.0.0.1:7860/"""

import io
import os
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

HERE = Path(__file__).parent
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
COLOURS = 256  # of a picture's palette, so that it stays small


def main(address: str) -> None:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        desk, phone = {"width": 1200, "height": 1080}, {"width": 390, "height": 844}
        for name, viewport, scheme in [
            ("desktop", desk, "light"),
            ("dark", desk, "dark"),
            ("phone", phone, "light"),
        ]:
            page = browser.new_page(viewport=viewport, color_scheme=scheme)
            page.goto(address)
            if name == "dark":
                mix(page)
            else:
                example(page)
            page.wait_for_timeout(2000)  # for the waveforms
            if name == "phone":
                page.get_by_role("heading", name="found in").scroll_into_view_if_needed()
                page.evaluate("scrollBy(0, innerHeight - 140)")
                page.wait_for_timeout(500)
            save(page.screenshot(), HERE / f"{name}.png")
        browser.close()


def example(page: Page) -> None:
    """Separate the river, the clock and the guitar."""
    page.get_by_role("button", name="River, clock, guitar").click()
    page.locator("#recording").get_by_label("Clear").wait_for()
    page.get_by_role("button", name="Separate", exact=True).click()
    page.get_by_role("heading", name="found in").wait_for()


def mix(page: Page) -> None:
    """Mix birds and a guitar."""
    page.get_by_role("tab", name="Mix your own").click()
    page.get_by_role("button", name="Mix and separate").click()
    page.get_by_role("heading", name="found in").wait_for()


def save(png: bytes, path: Path) -> None:
    """Save with a palette."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    image.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
