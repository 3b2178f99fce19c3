"""Runs the documentation: every Python block and every `acutance` command. Other blocks are checked.

To leave out a block, put a line above it: <!-- skip: next "the reason" -->
"""

import contextlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from sybil import Document, Example, Region, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser
from sybil.parsers.markdown.lexers import FencedCodeBlockLexer

from forked import run_forked

ROOT = Path(__file__).parent
PAGES = ["README.md", "CONTRIBUTING.md", "docs/*.md", "docs/**/*.md"]
COMMAND_SECONDS = 600
# Commands that fetch or enter the repository, from which the documentation already runs.
GETTING_HERE = {"cd", "git", "source"}
FOR_A_SHELL = r"[|&;<>$`*?~]"
# With these languages a block would look runnable and never run.
NEVER_RUN = r"(py|python3|pycon|sh|shell|zsh|(python|bash|console)[ \t{].*)"

os.environ.setdefault("MPLBACKEND", "Agg")
# Before anything imports torch: processes that each take every core slow one another down a lot.
os.environ.setdefault("OMP_NUM_THREADS", "1")
with contextlib.suppress(ImportError):  # timm's environment has no hypothesis
    from hypothesis import settings

    settings.register_profile("no deadline", deadline=None)  # with other tests running, any example may take long
    settings.load_profile("no deadline")


def run_acutance(command: str) -> None:
    """Run a command line that starts with `acutance`, in the page's working directory."""
    if command.startswith("acutance ") and not re.search(FOR_A_SHELL, command):
        done = run_forked(*shlex.split(command)[1:], seconds=COMMAND_SECONDS)
        assert done.returncode == 0, f"{command} gave {done.returncode}:\n{done.stdout}{done.stderr}"
        return
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    run(["bash", "-o", "pipefail", "-c", command], environment={**os.environ, "PATH": path})


def try_make(command: str) -> None:
    """Ask make whether it knows the targets, without making them."""
    # Under `make test` these would make the inner make think it belongs to the outer one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    run([*shlex.split(command), "-n", "-C", str(ROOT)], environment=environment)


def check_extras(command: str) -> None:
    """Check that the requested extras exist, without installing them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"(?:acutance|\.)\[([\w, -]+)\]", command):
        unknown = {extra.strip() for extra in extras.split(",")} - project["optional-dependencies"].keys()
        assert not unknown, f"{command!r} names extras that pyproject.toml does not have: {sorted(unknown)}"


def check_script(command: str) -> None:
    """Check that the script exists, without running it (`python -m pip` is pip)."""
    script = shlex.split(command)[1]
    if script == "-m":
        check_command(command.partition("-m ")[2])
        return
    assert (ROOT / script).is_file(), f"{command!r}: there is no {script} in the repository"


CHECKS = {
    "acutance": run_acutance,
    "make": try_make,
    "pip": check_extras,
    "python": check_script,
    "python3": check_script,
}


def run(arguments: list[str], environment: dict[str, str]) -> None:
    """Run a process to its end. An exit status other than 0 fails with all it printed."""
    done = subprocess.run(
        arguments,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=COMMAND_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{shlex.join(arguments)} gave {done.returncode}:\n{done.stdout}"


def check_command(command: str) -> None:
    """Run or check one command of a bash or console block, depending on its first word."""
    command = command.replace(".venv/bin/", "")
    name = next((word for word in command.split() if not re.match(r"\w+=", word)), "")
    if name in GETTING_HERE:
        return
    assert name in CHECKS, (
        f"{command!r}: only {', '.join(CHECKS)} can be checked. "
        f'Change the block, or put <!-- skip: next "the reason" --> above it.'
    )
    CHECKS[name](command)


def commands(source: str) -> Iterator[str]:
    """The commands of a shell block: continued lines joined, comments dropped, `&&` taken apart."""
    for line in source.replace("\\\n", " ").splitlines():
        # Split only to find where a comment starts and whether `&&` is outside quotes.
        lexer = shlex.shlex(line, posix=False, punctuation_chars="&")
        lexer.whitespace_split = True
        command: list[str] = []
        for word in [*lexer, "&&"]:
            if word != "&&":
                command.append(word)
            elif command:
                yield " ".join(command)
                command = []


def evaluate_bash(example: Example) -> None:
    """Every line is a command."""
    for command in commands(example.parsed):
        check_command(command)


def evaluate_console(example: Example) -> None:
    """Lines after a `$ ` are commands. The others are their output, which is not compared."""
    lines = example.parsed.replace("\\\n", " ").splitlines()
    prompted = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    assert prompted, "a console block without a line that starts with '$ ' runs nothing; call it text"
    for command in commands("\n".join(prompted)):
        check_command(command)


class ReasonedSkipParser(SkipParser):
    """Sybil's skip directive, with a required reason."""

    def __call__(self, document: Document) -> Iterable[Region]:
        """Find the directives of a page."""
        for region in super().__call__(document):
            action, reason = region.parsed
            if action != "end" and not reason:
                where = f"{document.path}, {document.line_column(region.start)}"
                raise ValueError(f'{where}: say why: <!-- skip: {action} "the reason" -->')
            yield region


def refuse_misspelt_languages(document: Document) -> Iterable[Region]:
    """Fail for blocks that look runnable but would never run."""
    for region in FencedCodeBlockLexer(NEVER_RUN)(document):
        language = region.lexemes["language"]
        raise ValueError(
            f"{document.path}, {document.line_column(region.start)}: a {language!r} block is never run; "
            "call it python, bash or console (or text, if it is no code)"
        )
    return ()


@pytest.fixture(scope="module")
def working_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An empty directory for a page, so that its snippets may write files."""
    with contextlib.chdir(tmp_path_factory.mktemp("page")):
        yield


DOCUMENTATION = Sybil(
    parsers=[
        ReasonedSkipParser(),
        PythonCodeBlockParser(),
        CodeBlockParser(language="bash", evaluator=evaluate_bash),
        CodeBlockParser(language="console", evaluator=evaluate_console),
        refuse_misspelt_languages,
    ],
    patterns=PAGES,
    fixtures=["working_directory"],
)
pytest_collect_file = DOCUMENTATION.pytest()


class WithoutCuda(pytest.Module):
    """Tests of a GPU on a machine without one: imported, to check their imports, and skipped all at once."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        """No tests."""
        assert self.obj
        pytest.skip("needs a CUDA device", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip whole modules of GPU tests, not hundreds of tests one by one in every process."""
    if not module_path.stem.endswith("_cuda"):
        return None
    import torch

    return None if torch.cuda.is_available() else WithoutCuda.from_parent(parent, path=module_path)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip single tests that need a GPU if there is none."""
    if item.get_closest_marker("cuda"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


def pytest_configure(config: pytest.Config) -> None:
    """With `pytest -n`, keep each file on one process: a page shares its names, a module its fixtures."""
    if getattr(config.option, "dist", "no") == "load":
        config.option.dist = "loadfile"
        config.option.loadscopereorder = False  # it would start files with many tests first, not slow files


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `pytest -n`, start with files that hold slow tests, so that no process runs them alone at the end."""
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)
