"""Checks of a model with Eigen, for any library."""

import torch
from safetensors.torch import load_file

import acutance as ac
from sites.tiny_models import left_alone, mitigated

SPEC = "eigen:negative,basis=polar"


def assert_it_goes_stays_and_comes_back(make, run, file):
    """Removing Eigen leaves no trace. Folding, saving (to a file if given) and loading keep the function."""
    model, plain = make(), make()
    with left_alone(model, lambda: run(model)) as before, mitigated(model, SPEC, 0.2):
        output = run(model)
        assert not torch.allclose(output, before)
        folded = ac.fold(model)
        torch.testing.assert_close(run(folded), output, rtol=0, atol=1e-10)
        for members in ("named_modules", "named_parameters"):
            paths = [[(path, type(one)) for path, one in getattr(each, members)()] for each in (folded, plain)]
            assert paths[0] == paths[1]
        if file is not None:
            again = ac.load(ac.save(model, file), make())
            assert ac.sites.record(again) == ac.sites.record(model)
            assert torch.equal(run(again), output)
        state = model.state_dict() if file is None else load_file(file)
        missing, unexpected = plain.load_state_dict(state, strict=False)
        assert not missing
        assert all(".mitigation." in path for path in unexpected)
        torch.testing.assert_close(run(plain), output, rtol=0, atol=1e-10)
        other = make()
        ac.mitigate(other, SPEC)
        other.load_state_dict(model.state_dict())
        assert torch.equal(run(other), output)
