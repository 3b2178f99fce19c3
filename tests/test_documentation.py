"""conftest.py runs the documentation; here it is put to the test itself, and links are followed."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

GOOD = {
    "names are shared": "```python\nx = 1\n```\n\n```python\nassert x == 1\n```\n",
    "files go elsewhere": "```python\nopen('a', 'w').close()\n```\n\n```bash\nacutance --version > b\n```\n",
    "commands are checked": "```bash\ncd here && make test  # or not\npip install 'acutance[train]'\n```\n",
    "output is not a command": "```console\n$ make setup\nno-such-program\n```\n",
    "a reason is given": '<!-- skip: next "a reason" -->\n```python\n1 / 0\n```\n',
}
BAD = {
    "code is wrong": "```python\n1 / 0\n```\n",
    "code in a list is wrong": "- item\n\n    ```python\n    1 / 0\n    ```\n",
    "command is unknown": "```bash\nacutance no-such-verb\n```\n",
    "second command is unknown": "```bash\nmake setup && \\\n    make no-such-target\n```\n",
    "target is unknown": "```bash\nmake no-such-target\n```\n",
    "extra is unknown": "```bash\npip install -e '.[no-such-extra]'\n```\n",
    "script is missing": "```bash\npython no/such/script.py\n```\n",
    "program is unknown": "```bash\nno-such-program\n```\n",
    "no reason is given": "<!-- skip: next -->\n```python\n1 / 0\n```\n",
    "language is misspelt": "```py\n1 / 0\n```\n",
    "language has options": '```python title="x"\n1 / 0\n```\n',
    "nothing is run": "```console\nacutance --version\n```\n",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The last words of pytest for every page, all pages run at once over two processes."""
    place = tmp_path_factory.mktemp("repository")
    for name in ("conftest.py", "pyproject.toml", "Makefile", "constraints.txt", "constraints-timm.txt"):
        shutil.copy(ROOT / name, place)
    (place / "docs" / "deeper").mkdir(parents=True)
    (place / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "forked.py", place / "tests")
    for name, text in (GOOD | BAD).items():
        (place / "docs" / "deeper" / f"{name.replace(' ', '-')}.md").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "2", "-rA", "docs"]
    report = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=300, check=False).stdout
    assert not list(place.rglob("[ab]")), "a snippet wrote into the repository"
    found = re.findall(r"^(PASSED|FAILED|ERROR|SKIPPED).*deeper/([\w-]+)\.md", report, re.MULTILINE)
    return {page.replace("-", " "): outcome for outcome, page in found}


@pytest.mark.parametrize("name", GOOD)
def test_sound_pages_pass(name: str, outcomes: dict[str, str]) -> None:
    assert outcomes[name] in ("PASSED", "SKIPPED")


@pytest.mark.parametrize("name", BAD)
def test_unsound_pages_fail(name: str, outcomes: dict[str, str]) -> None:
    assert outcomes[name] in ("FAILED", "ERROR")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_pictures_exist(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing, f"{page.name} points at what is not there: {missing}"
