"""What mkdocs.yml cannot say: pages of the site that lie outside docs/, and links to them.

Pages link to each other as the repository lies, so that they can be read there as well as on the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
RESULTS = "benchmarks/results/*.md"
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", RESULTS, "examples/*")
LINK = re.compile(r"(\]\()(?!\w+:)([^)#\s]+)((?:#[^)\s]*)?\))")


def outside() -> list[str]:
    """The files of the repository that the site shows at the path they have there."""
    return sorted(p.relative_to(ROOT).as_posix() for glob in OUTSIDE for p in ROOT.glob(glob) if p.is_file())


def site_link(page: str, link: str) -> str:
    """A link of the repository's file `page`, as the page of the site has to spell it."""
    here = page if page in outside() else f"docs/{page}"
    target = posixpath.normpath(posixpath.join(posixpath.dirname(here), link))
    return posixpath.relpath(target.removeprefix("docs/"), posixpath.dirname(page) or ".")


def on_config(config: Any) -> Any:
    """Put one page per measurement into the navigation, under the file's name."""
    results = next(section["Results"] for section in config.nav if "Results" in section)
    pages = [{path.stem: path.relative_to(ROOT).as_posix()} for path in sorted(ROOT.glob(RESULTS))]
    results[-1]["Measurements"] = pages
    return config


def on_files(files: Files, config: Any) -> Files:
    for name in outside():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Spell links for the site; give measurements, which begin with a table, a title."""
    name = page.file.src_uri
    titled = markdown if re.search(r"^# ", markdown, re.MULTILINE) else f"# {Path(name).stem}\n\n{markdown}"
    return LINK.sub(lambda found: found[1] + site_link(name, found[2]) + found[3], titled)
