import pytest
import torch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder into which data sets are written once."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def model(task):
    """The task's model with weights far from their initial values."""
    torch.manual_seed(0)
    model = task.build_model()
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model.eval()
