"""Make the screenshots in `docs/figures`: short real runs, shown in a headless Chromium.

    python tools/screenshots.py [--keep DIR] [--output DIR] [--only report|compared|many|live ...]

`many` is 18 runs of a sweep, for looking at: by default it is not made. Each page is captured 1280 and 400 pixels
wide, light and dark, cropped to its content and reduced to 128 colours.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image, ImageChops

FIGURES = Path(__file__).parents[1] / "docs/figures"
WIDTHS = {1280: 2300, 400: 3800}
"""Width in pixels, and the maximum height."""
LIVE_WIDTHS = {1280: 2150, 400: 1500}
LIVE_SECONDS, SETTLING_SECONDS = 180.0, 2.5
LIVE_SHARE = 0.06  # of the budget that the followed run has used, so that there is something to see
SCHEMES = {"light": "1", "dark": "0"}
PAGES = ("report", "compared", "many", "live")
SHOWN = ("report", "compared", "live")  # in the documentation
MOST_BYTES = 250_000
COMMON = ["--dataset", "fashion-mnist-sample", "--runs", "runs"]
FAULTS = """
[[fault]]
kind = "crash"
worker = 2
at = 1
restart_after = 1

[[fault]]
kind = "crash"
worker = 1
at = 3
"""


def chromium() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        found = shutil.which(name)
        if found is not None:
            return found
    sys.exit("tools/screenshots.py needs Chromium: 'apt-get install chromium' brings one")


def paceline(folder: Path, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "paceline", *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def make_runs(folder: Path) -> None:
    """Make a real run with two crashes, and simulated sync and async runs of 1 to 8 workers."""
    folder.mkdir(parents=True)
    (folder / "faults.toml").write_text(FAULTS)
    crashes = ["--workers", "3", "--epochs", "8", "--eval-every", "0.25", "--eval-train", "--faults", "faults.toml"]
    paceline(folder, "train", *COMMON, *crashes, "--strategy", "async", "--schedule", "cosine", "--name", "async-3")
    cluster = ["--speeds", "lognormal:30ms,.4", "--link", "1gbit,0.2ms", "--epochs", "1", "--eval-every", "0.125"]
    for strategy in ("sync", "async"):
        for workers in ("1", "2", "4", "8"):
            place = ["--strategy", strategy, "--workers", workers, "--name", f"{strategy}-{workers}"]
            paceline(folder, "simulate", *COMMON[:2], "--runs", "compared", *cluster, *place)


def make_many(folder: Path) -> None:
    """Make 18 simulated runs with long names, of three settings."""
    cluster = ["--speeds", "lognormal:30ms,.4", "--link", "1gbit,0.2ms", "--epochs", "0.5", "--eval-every", "0.125"]
    for strategy in ("sync", "async"):
        for workers in ("2", "4", "8"):
            for lr in ("0.005", "0.01", "0.02"):
                place = ["--strategy", strategy, "--workers", workers, "--lr", lr]
                name = ["--name", f"study-{strategy}-w{workers}-lr{lr}-seed0"]
                paceline(folder, "simulate", *COMMON[:2], "--runs", "many", *cluster, *place, *name)


def photograph(address: str, width: int, height: int, scheme: str, folder: Path) -> Image.Image:
    """Capture a page in a frame of this width (a window cannot be as narrow) and crop the empty space below."""
    frame, picture = folder / "frame.html", folder / "picture.png"
    style = f"border:0;display:block;width:{width}px;height:{height}px"
    frame.write_text(f'<!doctype html><body style="margin:0"><iframe style="{style}" src="{address}"></iframe>')
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=4000"]
    look = [f"--window-size={max(width, 600)},{height}", f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"]
    where = [f"--user-data-dir={folder}", f"--screenshot={picture}", frame.as_uri()]
    subprocess.run([chromium(), *flags, *look, *where], check=True, capture_output=True, timeout=120)
    image = Image.open(picture).convert("RGB").crop((0, 0, width, height))
    ground = Image.new("RGB", image.size, image.getpixel((0, height - 1)))
    box = ImageChops.difference(image, ground).getbbox()
    return image.crop((0, 0, width, min(height, (box[3] if box else height) + 40)))


def save(image: Image.Image, path: Path) -> None:
    """Save a PNG with a reduced palette."""
    for colours in (128, 64, 32, 16):
        stream = io.BytesIO()
        image.quantize(colours, dither=Image.Dither.NONE).save(stream, "PNG", optimize=True)
        if stream.tell() <= MOST_BYTES:
            break
    path.write_bytes(stream.getvalue())
    print(f"{path}: {image.width} x {image.height}, {stream.tell() / 1000:.0f} kB, {colours} colours")


def photograph_all(name: str, address: str, output: Path) -> None:
    """Write NAME-WIDTH-SCHEME.png for each width and colour scheme."""
    for width, height in WIDTHS.items():
        for scheme in SCHEMES:
            with tempfile.TemporaryDirectory() as profile:
                picture = photograph(address, width, height, scheme, Path(profile))
                save(picture, output / f"{name}-{width}-{scheme}.png")


def photograph_live(folder: Path, output: Path) -> None:
    """A real run with a slow worker while it goes on, beside one that has ended, in a browser that follows them."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.support.browser import Browser

    chromium()
    program, runs = [sys.executable, "-m", "paceline"], str(folder / "watched")
    brief = ["--strategy", "sync", "--workers", "2", "--epochs", "3", "--eval-every", "0.5", "--name", "sync-2"]
    endless = ["--strategy", "async", "--workers", "4", "--delay", "20ms@2", "--epochs", "400", "--eval-every", "0.5"]
    shutil.rmtree(runs, ignore_errors=True)
    paceline(folder, "train", *COMMON[:2], "--runs", runs, *brief)
    command = [*program, "train", *COMMON[:2], "--runs", runs, *endless, "--name", "async-4"]
    training = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    watching = subprocess.Popen([*program, "watch", runs, "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True)
    try:
        assert watching.stdout is not None
        address = watching.stdout.readline().split()[-1]
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, Browser(Path(profile)) as browser:
            browser.open(address)
            browser.wait_for(f"document.querySelector('progress').value > {LIVE_SHARE}", LIVE_SECONDS)
            for width, height in LIVE_WIDTHS.items():
                for scheme in SCHEMES:
                    browser.show(width, height, dark=scheme == "dark")
                    time.sleep(SETTLING_SECONDS)
                    picture = Path(profile) / "picture.png"
                    browser.picture(picture)
                    save(Image.open(picture).convert("RGB"), output / f"live-{width}-{scheme}.png")
    finally:
        for process in (watching, training):
            process.terminate()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", metavar="DIR", help="keep the runs in DIR, and use those already there")
    parser.add_argument("--only", nargs="+", choices=PAGES, default=SHOWN, help="which pages [report compared live]")
    parser.add_argument("--output", metavar="DIR", default=FIGURES, type=Path, help="where [docs/figures]")
    asked = parser.parse_args()
    asked.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(asked.keep or f"{temporary}/made").resolve()
        if not folder.exists() and {"report", "compared"} & set(asked.only):
            make_runs(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if "many" in asked.only and not (folder / "many").exists():
            make_many(folder)
        for name, runs in (("report", "runs/async-3"), ("compared", "compared"), ("many", "many")):
            if name in asked.only:
                page = Path(temporary) / f"{name}.html"
                paceline(folder, "report", runs, "-o", str(page))
                photograph_all(name, page.as_uri(), asked.output)
        if "live" in asked.only:
            photograph_live(folder, asked.output)


if __name__ == "__main__":
    main()
