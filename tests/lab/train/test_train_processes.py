"""Two processes train as one does; a run goes on in another number of processes; death of one loses nothing."""

import os
import signal

import pytest
import torch
from train_worlds import assert_same_bits, bits, die_in, fit, tiny

from acutance.errors import AcutanceError
from acutance.lab.data.augment import Augment
from acutance.lab.train.loop import Loop
from together import in_two_processes

# In float64, so that what is left is the order of summation. AdamW divides by the size of the gradient, so rounding
# grows where a gradient is about zero: the bound is on weights of about 0.1 to 1 after 16 steps.
CLOSE = 1e-9


def alone(*changes):
    return tiny("loop.accumulate=2", *changes)  # two parts a step; two processes have the same two, one each


def shared(strategy, *changes):
    return tiny(f"loop.strategy={strategy}", *changes)


def use_float64(patch):
    torch.set_default_dtype(torch.float64)
    call, plain = Augment.__call__, Augment.plain
    patch.setattr(Augment, "__call__", lambda *given: tuple(x.double() for x in call(*given)))
    patch.setattr(Augment, "plain", lambda *given: plain(*given).double())


def like_torchrun(rank):
    """What it says of a process; and float64."""
    use_float64(pytest.MonkeyPatch())
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def killed_in_step_7(rank, folder):
    """What `kill -9` does to one of them; the other then finds nobody to talk to."""
    like_torchrun(rank)
    real = Loop._step

    def dying(self, step, parts):
        if step == 7 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, step, parts)

    Loop._step = dying
    fit(shared("ddp"), folder / "ddp cut")


def train_together(rank, folder):
    like_torchrun(rank)
    fit(shared("ddp"), folder / "ddp")
    fit(shared("ddp"), folder / "ddp cut", resume=True)
    _, printed = fit(shared("fsdp"), folder / "fsdp")
    assert ("fsdp, 2 × 1 parts" in printed) == (rank == 0)
    fit(shared("fsdp"), folder / "one then fsdp", resume=True)  # begun by one process
    die_in(12, shared("fsdp"), folder / "fsdp then one")
    for change, words in (("loop.seed=5", "loop.seed 5 instead of 0"), ("optim.lr=1", "nothing is left to train")):
        with pytest.raises(AcutanceError, match=words):
            fit(shared("ddp", change), folder / "ddp", resume=True)
    assert (folder / "ddp/result.json").exists()
    if rank == 0:
        (folder / "in the way").touch()  # only the main process meets the error
    with pytest.raises(OSError, match="in the way"):
        fit(shared("ddp"), folder / "in the way")
    weights = folder / ("one/model.safetensors" if rank == 0 else "nowhere")  # only the other meets this one
    with pytest.raises((AcutanceError, OSError), match="nowhere"):
        fit(shared("ddp", f"task.weights={weights}"), folder / "without weights")
    with pytest.raises(AcutanceError, match="2 processes × 2 parts"):
        fit(shared("ddp", "loop.batch_size=18", "loop.accumulate=2"), folder / f"uneven {rank}")


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("worlds")
    with pytest.MonkeyPatch.context() as patch:
        use_float64(patch)
        try:
            fit(alone(), folder / "one")
            die_in(7, alone(), folder / "one then fsdp")
            with pytest.raises(Exception, match=r"SIGKILL|terminated"):
                in_two_processes(killed_in_step_7, folder)
            assert (folder / "ddp cut/checkpoints/step-000000005").is_dir()
            assert not (folder / "ddp cut/result.json").exists()
            in_two_processes(train_together, folder)
            fit(alone(), folder / "fsdp then one", resume=True)
        finally:
            torch.set_default_dtype(torch.float32)
    return {path.name: bits(path) for path in folder.iterdir() if (path / "result.json").exists()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp", "one then fsdp", "fsdp then one"])
def test_two_processes_equal_one_with_the_same_global_batch(worlds, name):
    assert_close(worlds[name], worlds["one"])


@pytest.mark.slow
def test_a_run_of_two_processes_one_of_which_was_killed_goes_on_to_the_same_bits(worlds):
    assert_same_bits(worlds["ddp cut"], worlds["ddp"])


def assert_close(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=CLOSE, msg=lambda m, name=name: f"{name}: {m}")
