"""`acutance bench` at toy size: every group runs, its file says what it holds, and what is timed is what a row says."""

import csv
import io
from functools import partial

import pytest
import torch
from functorch.compile import make_boxed_func
from rich.console import Console
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F
from torch.nn.attention import SDPBackend
from typer.testing import CliRunner

import acutance as ac
from acutance.__main__ import app
from acutance.attention.kernels import packed
from acutance.errors import AcutanceError
from acutance.lab.bench import language, measuring, results, run, steps, timing
from acutance.lab.bench.steps import TOY
from acutance.lab.bench.timing import Candidate, Pace, Settings
from acutance.metrics import ATTENTION_METRICS
from acutance.models import LanguageModel, ViT

CPU, GPU = Settings("cpu"), Settings("cuda:0")


def read(path):
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.fixture(autouse=True)
def _no_collection(monkeypatch):
    """Of a heap as large as that of all tests it takes a second for each candidate."""
    monkeypatch.setattr("gc.collect", lambda *_: 0)


@pytest.fixture
def bench(tmp_path):
    def call(only, status=0):
        done = CliRunner().invoke(app, ["bench", "--only", only, "--device", "cpu", "--out", str(tmp_path)])
        assert done.exit_code == status, done.output
        (path,) = tmp_path.iterdir()
        return done.output, path, read(path)

    return call


GPU_ONLY = {f"end-to-end-{n}" for n in (512, 1024, 2048)} | {"steps-224"}  # those that differ there only


@pytest.mark.parametrize("group", [group for group in run.GROUPS if group not in GPU_ONLY])
def test_every_group_runs_and_names_its_file(group, bench, monkeypatch):
    monkeypatch.setattr(steps, "find_spec", lambda _name: None)
    text, path, rows = bench(group)
    assert ("timm is not installed" in rows[0]["note"]) == group.startswith("steps")
    assert "toy sizes on the CPU" in text
    assert "Summary" in text
    assert path.name == f"bench-{group}-cpu-float32-torch{torch.__version__.split('+')[0]}.csv"
    left_out = {row["variant"] for row in rows if row["note"].startswith("left out")}
    assert left_out == ({"plain, SDPA cuDNN"} if group == "long-training" else set())  # which no CPU has
    for row in rows:
        assert row["variant"] in left_out or float(row["ms"]) > 0, row
        assert "toy size" in row["device"]
        assert row["command"] == f"acutance bench --only {group}"
    for table in {row["table"] for row in rows}:
        found = [row for row in rows if row["table"] == table]
        assert found[0]["ratio"] == "1.0000"
        assert (found[-1]["variant"] == "floor of the plain model") == group.startswith(("steps", "long-training"))
        assert any(row["ratios"] for row in found)


def test_on_a_gpu_every_mode_of_timm_is_a_baseline_at_the_sizes_of_the_papers():
    """Only what would be timed is looked at: nothing is built. `max-autotune` is for the baseline alone."""
    tuned = Settings("cuda:0", quick=True, max_autotune=True)
    assert tuned.options == " --quick --max-autotune"
    assert tuned.pace() == Pace(repetitions=4, steps=6, warm_up=5, refresh=2)
    found = steps.candidates(steps.SHAPES["steps-32"], True, tuned, timm=True)
    modes = {name: [(c.mode, c.static) for c in found if c.variant == name] for name in {c.variant for c in found}}
    both = [("default", False), ("reduce-overhead", True)]
    assert (modes["timm's ViT"], modes["NeuTRENO"]) == ([*both, ("max-autotune", True)], both)
    assert modes["plain ViT"] == modes["NeuTRENO, no fused kernel"] == both[1:]
    assert {c.variant for c in found if c.baseline} == {"timm's ViT"}
    whole = {batch: [c.mode for c in steps.end_to_end_candidates(batch, GPU)] for batch in (256, 1024)}
    assert whole == {256: ["recorded"] * 2, 1024: ["recorded"] * 2 + ["launched"] * 2}
    titles = {title for name in run.GROUPS for title, _ in run.GROUPS[name](GPU)}
    assert {"ViT-Ti/4, 32×32, batch 1024, training", "DeiT-Ti/16, 224×224, batch 512, inference"} <= titles
    assert {"measuring DeiT-Ti/16, 224×224, batch 256", "ViT-Ti/4, 32×32, end to end, batch 2048"} <= titles


def test_groups_by_name_and_by_beginning():
    text = CliRunner().invoke(app, ["bench", "--help"]).output
    assert all(name in text for name in run.GROUPS)
    assert run.chosen_groups(None) == list(run.GROUPS)
    assert run.chosen_groups("micro, steps") == ["micro", "steps-32", "steps-224"]
    assert run.chosen_groups("end-to-end-512") == ["end-to-end-512"]
    with pytest.raises(AcutanceError, match=r"'speed'.*known: steps-32"):
        run.chosen_groups("speed")


def growing(error):
    yield [{"variant": "plain", "ms": "2.0", "ratio": "1.0000"}]
    raise error


def test_what_is_done_stays_when_a_table_fails_or_is_interrupted(monkeypatch, tmp_path_factory, capsys, bench):
    errors = (RuntimeError("out of memory"), AcutanceError("no recording"), AttributeError("another version"))
    groups = {str(error): lambda _, error=error: [("stops", growing(error))] for error in errors}
    monkeypatch.setattr(run, "GROUPS", groups)
    written = run.run_groups(list(run.GROUPS), CPU, tmp_path_factory.mktemp("failing"), Console(quiet=True))
    for path, error in zip(written, errors, strict=True):
        assert [(row["ms"], row["note"]) for row in read(path)] == [("2.0", ""), ("", f"stopped: {error}")]
    assert "AttributeError: another version" in capsys.readouterr().err
    monkeypatch.setattr(run, "GROUPS", {"a": lambda _: [("stops", growing(KeyboardInterrupt()))]})
    text, _, rows = bench("a", status=130)
    assert "Stopped" in text
    assert [row["variant"] for row in rows] == ["plain"]


def test_the_summary_has_the_fastest_mode_at_the_most_tokens():
    shared = {"table": "t", "variant": "ours", "ratio": "1.0"}
    rows = [{**shared, "ms": ms, "tokens": tokens} for ms, tokens in (("3.0", 8), ("2.5", 8), ("1.5", 4))]
    text = io.StringIO()
    Console(width=200, file=text).print(run.headlines([*rows, {"table": "t", "variant": "left out", "note": "memory"}]))
    found = [word in text.getvalue() for word in ("2.5", "3.0", "1.5", "left out")]
    assert found == [True, False, False, False]


def test_the_name_of_a_file_says_device_dtype_versions_and_labels(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA H200")
    found = results.file_name("eigen_step", "cuda", "bfloat16", "reduce-overhead", "", "Longer, 12×40")
    assert found == "eigen_step-nvidia-h200-bfloat16-torch2.11.0-cuda13.0-reduce-overhead-longer-12-40.csv"
    assert results.file_name("augment", "cpu", "float32") == "augment-cpu-float32-torch2.11.0.csv"
    path = results.write_rows(tmp_path / "new" / "a.csv", [{"a": 1}, {"b": "x, y"}], {"device": "CPU"})
    assert read(path) == [{"a": "1", "b": "", "device": "CPU"}, {"a": "", "b": "x, y", "device": "CPU"}]
    assert path.read_bytes().count(b"\r") == 0
    for where in (["--results", "a b"], ["--results=a b"]):  # which is not part of the command
        assert results.command("python x.py", ["--steps", "3", *where, "--tf32"]) == "python x.py --steps 3 --tf32"


def test_a_training_step_is_that_of_a_plain_loop_and_inference_leaves_no_graph():
    torch.manual_seed(0)
    model, twin, seen = ViT(**TOY), ViT(**TOY), []
    twin.load_state_dict(model.state_dict())
    images, labels = torch.randn(4, 3, 8, 8), torch.arange(4)
    step = timing.training_step(model, [images], lambda scores: F.cross_entropy(scores, labels))
    optimiser = torch.optim.AdamW(twin.parameters(), lr=1e-4)
    for _ in range(2):
        step()
        F.cross_entropy(twin(images), labels).backward()
        optimiser.step()
        optimiser.zero_grad()
    for (name, trained), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(trained, expected), name
        assert trained.grad is None
    model.register_forward_hook(lambda module, _inputs, out: seen.append((module.training, out.requires_grad)))
    timing.inference_step(model, [images])()
    assert seen == [(False, False)]


def test_the_model_asks_for_the_kernel_unless_it_is_switched_off(monkeypatch):
    """Or else switching it off would time the kernel against itself."""
    asked = []
    monkeypatch.setattr(packed, "is_available", lambda _qkv, heads: bool(asked.append(heads)))
    fused = partial(ViT(**TOY, mitigation="neutreno:0.6"), torch.randn(1, 3, 8, 8))
    for step, expected in ((fused, 2), (timing.unfused(fused), 2), (fused, 4)):
        step()
        assert asked == [3] * expected
    flash, _cudnn, neutreno = language.candidates(language.TOY[0], CPU)
    asked.clear()
    flash.make()()
    assert asked == []
    neutreno.make()()
    assert asked
    assert [flash.variant, neutreno.variant] == ["plain, SDPA flash", "NeuTRENO, SDPA"]
    monkeypatch.setattr(packed, "is_available", lambda qkv, heads: qkv.shape == (1, 16, 3 * 64 * heads))
    found = [(c.variant, c.baseline) for c in language.candidates(language.TOY[0], CPU)]
    assert found[0] == ("plain, SDPA flash", True)
    assert found[2:] == [("plain, fused kernel", False), ("NeuTRENO, fused kernel", False)]


def test_the_obvious_way_reads_the_same_figures():
    """Or else its cost would not be that of the same thing."""
    torch.manual_seed(0)
    subject = measuring._vit(4, CPU)
    found = subject.obvious()
    profile = ac.measure(subject.model, [subject.batch], metrics=measuring.WITH_ATTENTION, progress=False)
    means = {(reading.layer, reading.metric): reading.mean for reading in profile.readings}
    assert len(found) == TOY["depth"]
    for layer, figures in enumerate(found, 1):
        assert figures == pytest.approx([means[layer, name] for name in measuring.WITH_ATTENTION], rel=1e-4)
    assert not any(block._forward_hooks for block in subject.model.blocks)


def test_the_second_back_end_is_not_the_first_ones_compiled_code():
    """Two models of one class in one process: the trap is that the second is run by the code of the first."""
    seen = []

    def compiler(graph, _inputs):
        seen.append({str(node.target) for node in graph.graph.nodes})
        return make_boxed_func(graph.forward)

    words, sizes = torch.randint(20, (1, 4)), {"vocabulary": 20, "dim": 16, "depth": 1, "heads": 1, "hidden": 16}

    def model(backend):
        return language.WithBackend(LanguageModel(**sizes, cutoffs=(), dropout=0.0), backend)

    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        how = {"backend": aot_autograd(fw_compiler=compiler), "dynamic": False, "fullgraph": True}
        torch.compile(model(backend), **how)(words, words).mean().backward()
    assert len(seen) == 4  # forward and backward of each
    assert any("flash_attention" in name for name in seen[0] | seen[1])
    assert not any("flash_attention" in name for name in seen[2])
    with pytest.raises(RuntimeError, match="No viable backend"):
        model(SDPBackend.CUDNN_ATTENTION)(words, words)


def test_what_fails_or_takes_long_is_left_out_at_more_tokens(monkeypatch):
    now, tried = [0.0], []
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def work(tokens, _settings):
        def step(name, seconds):
            tried.append((name, tokens))
            if name == "dense" and tokens > 2:
                raise MemoryError("out of memory")
            now[0] += seconds

        slow = measuring.PATIENCE / 4 * (1.5 if tokens > 4 else 0.5)
        candidates = [
            Candidate(name, lambda name=name, seconds=seconds: lambda: step(name, seconds), baseline=name == "plain")
            for name, seconds in {"plain": 1.0, "slow": slow, "dense": 2.0}.items()
        ]
        return candidates, Pace(repetitions=1, steps=1, warm_up=1, refresh=0)

    *_, rows = measuring.in_turn((2, 4, 8, 16), work, CPU)
    notes = {(row["variant"], row["tokens"]): row.get("note", "") for row in rows}
    assert notes["dense", 4] == "left out: out of memory"
    assert notes["dense", 8] == notes["dense", 16] == "not tried: it failed at 4 tokens"
    assert (notes["slow", 8], notes["slow", 16]) == ("", "not tried: it took 11 s at 8 tokens")
    assert {tokens for name, tokens in tried if name == "slow"} == {2, 4, 8}
    assert {tokens for name, tokens in tried if name == "dense"} == {2, 4}
    assert [row["tokens"] for row in rows if row["variant"] == "plain"] == [2, 4, 8, 16]
    assert {*ATTENTION_METRICS, "attention_cosine"} <= measuring.OPERATIONS.keys()
