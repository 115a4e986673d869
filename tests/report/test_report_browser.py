"""The report page in a real browser: it renders, its tables sort, and its policy holds."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from corp.cli.report import sweep_study
from corp.report.html import page
from tests.helpers.report_pages import EVIL, SWEEP, Page, evil_run, run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")


def browse(path: Path, profile: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Headless, with nothing of its own to do on the network."""
    assert CHROMIUM is not None
    quiet = ("--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-sync", *quiet]
    command += [f"--user-data-dir={profile}", "--virtual-time-budget=3000", "--enable-logging=stderr", "--v=0"]
    return subprocess.run([*command, *options, path.as_uri()], capture_output=True, text=True, timeout=50, check=True)


def test_a_browser_shows_it_without_complaint(tmp_path: Path) -> None:
    file, picture = tmp_path / "page.html", tmp_path / "page.png"
    file.write_text(page([evil_run()], [sweep_study(EVIL, SWEEP)]))
    shown = browse(file, tmp_path / "profile", "--dump-dom")
    assert "CONSOLE" not in shown.stderr
    dom = Page(shown.stdout)
    assert dom.all("html") == [{"lang": "en", "data-sortable": "2"}]  # and no data-error
    assert dom.text["button"][-4:] == ["rho²", "error", "not compensated", "unseen data"]

    browse(file, tmp_path / "profile2", f"--screenshot={picture}", "--window-size=390,844")
    colours = Image.open(picture).convert("RGB").getcolors(2**24)
    assert (0, 0x72, 0xB2) in {colour for _, colour in colours or ()}  # the bars are drawn


@pytest.mark.parametrize(("clicks", "order"), [(1, "ascending"), (2, "descending")])
def test_tables_sort_on_click(tmp_path: Path, clicks: int, order: str) -> None:
    # The page without its policy, which would stop the script that clicks for us.
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page([run()], [sweep_study("s", SWEEP)]))
    click = "document.querySelectorAll('table')[0].querySelector('button').click();"
    (tmp_path / "page.html").write_text(text.replace("</body>", f"<script>{click * clicks}</script></body>"))
    dom = browse(tmp_path / "page.html", tmp_path / "profile", "--dump-dom").stdout
    values = re.findall(r'<tr><td[^>]*data-value="([^"]*)"', dom.split("<table")[1])
    assert values == sorted([str(row["mlp"]) for row in SWEEP], reverse=clicks == 2)
    assert [th["aria-sort"] for th in Page(dom).all("th") if "aria-sort" in th] == [order]


def test_the_policy_stops_scripts_that_are_not_the_page_s_own(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(page([run()]).replace("</main>", "<script>document.title = 'taken over'</script></main>"))
    shown = browse(file, tmp_path / "profile", "--dump-dom")
    assert "CONSOLE" in shown.stderr  # so the other test's silence means something
    assert "taken over" not in Page(shown.stdout).text["title"]
    assert 'data-sortable="1"' in shown.stdout
