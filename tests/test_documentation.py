"""conftest.py runs the documentation; here it is put to the test itself, links are followed and figures compared."""

import re
import sys
from pathlib import Path
from unittest import SkipTest

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))
import figures  # noqa: E402

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

GOOD = {
    "names are shared": "```python\nx = 1\n```\n\n```python\nassert x == 1\n```\n",
    "commands are checked": "```bash\ncd here && make test  # or not\npip install 'acutance[train]'\n```\n",
    "output is not a command": "```console\n$ make setup\nno-such-program\n```\n",
    "a reason is given": '<!-- skip: next "a reason" -->\n```python\n1 / 0\n```\n',
}
BAD = {
    "code is wrong": ("```python\n1 / 0\n```\n", "division by zero"),
    "code in a list is wrong": ("- item\n\n    ```python\n    1 / 0\n    ```\n", "division by zero"),
    "command is unknown": ("```bash\nacutance no-such-verb\n```\n", "No such command 'no-such-verb'"),
    "second command is unknown": ("```bash\nmake help && \\\n    make no-such-target\n```\n", "no-such-target .* gave"),
    "extra is unknown": ("```bash\npip install -e '.[no-such-extra]'\n```\n", "no-such-extra"),
    "script is missing": ("```bash\npython no/such/script.py\n```\n", "there is no no/such/script.py"),
    "program is unknown": ("```bash\nno-such-program\n```\n", "only acutance, make, .* can be checked"),
    "no reason is given": ("<!-- skip: next -->\n```python\n1 / 0\n```\n", "say why"),
    "language is misspelt": ("```py\n1 / 0\n```\n", "'py' block is never run"),
    "language has options": ('```python title="x"\n1 / 0\n```\n', "block is never run"),
    "nothing is run": ("```console\nacutance --version\n```\n", "runs nothing"),
}


@pytest.fixture
def documentation(request):
    """What conftest.py reads the pages with."""
    plugins = request.config.pluginmanager.get_plugins()
    (found,) = (plugin.DOCUMENTATION for plugin in plugins if hasattr(plugin, "DOCUMENTATION"))
    return found


@pytest.fixture
def read(documentation, tmp_path, working_directory):
    """Runs a page as conftest.py does and gives its reasons to skip; what is wrong with it is raised."""

    def run(text):
        page, skipped = tmp_path / "page.md", []
        page.write_text(text)
        for example in documentation.parse(page).examples():
            try:
                example.evaluate()
            except SkipTest as skip:
                skipped.append(str(skip))
        return skipped

    return run


@pytest.mark.parametrize("name", GOOD)
def test_sound_pages_pass(name, read):
    assert read(GOOD[name]) == (["a reason"] if "skip" in GOOD[name] else [])


@pytest.mark.parametrize("name", BAD)
def test_unsound_pages_fail(name, read):
    text, error = BAD[name]
    with pytest.raises(Exception, match=error):
        read(text)


def test_snippets_write_elsewhere(documentation, read):
    """Every page of the documentation gets the empty directory that these pages have."""
    read("```python\nopen('a', 'w').close()\n```\n\n```bash\nacutance --version > b\n```\n")
    assert {path.name for path in Path.cwd().iterdir()} >= {"a", "b"}
    assert ROOT not in [Path.cwd(), *Path.cwd().parents]
    assert "working_directory" in documentation.fixtures


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_screen_prints_what_it_says(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = re.findall(r"```(?:python|text)\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)[:2]
    exec(code, {})
    assert capsys.readouterr().out == said


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_pictures_exist(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing, f"{page.name} points at what is not there: {missing}"


@pytest.mark.parametrize(("page", "heading", "place", "rows"), figures.TABLES)
def test_a_table_is_what_its_file_gives(page, heading, place, rows):
    """If not: `python docs/figures.py`."""
    assert figures.updated(page, heading, place, rows()) == (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize(("page", "told"), figures.SENTENCES)
def test_a_sentence_says_what_its_file_gives(page, told):
    said = list(told())
    assert said
    assert figures.missing(page, said) == []


def test_scores_are_those_of_the_evaluations():
    for data in (*figures.BATCHES, "wikitext2", "camvid"):
        for group in figures.groups(data):
            for seed, place in group["runs"].items():
                kept = figures.runs_of(data)[Path(place).name]
                assert group["scores"][seed] == kept["evaluation"]["scores"][kept["evaluation"]["headline"]]
                assert kept["run"]["config"]["loop"]["seed"] == int(seed)
