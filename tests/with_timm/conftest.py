"""Tests that need timm. `make test` runs them in a separate environment, `.venv-timm`."""

from importlib.util import find_spec

import pytest

if find_spec("timm") is not None:
    import torchvision_without_operators  # noqa: F401
else:

    class WithoutTimm(pytest.Module):
        def collect(self):
            pytest.skip("needs timm: `make test` runs this in .venv-timm", allow_module_level=True)

    def pytest_pycollect_makemodule(module_path, parent):
        return WithoutTimm.from_parent(parent, path=module_path)
