"""Findings: each fault that is planted in a model is found there and not in the model itself."""

import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import acutance as ac
from acutance import sites
from acutance.diagnose.findings import DETECTORS, MOST, SEVERITIES, findings, named, where_it_rose
from acutance.diagnose.readings import Readings, read

PLANTING = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "planting.py"))
FAULTS, planted = PLANTING["FAULTS"], PLANTING["planted"]


@pytest.fixture(scope="module")
def vit():
    """A model that nothing is wrong with: sharp attention, layers that add something."""
    torch.manual_seed(0)
    model = ac.models.ViT(image_size=16, patch_size=4, in_chans=3, dim=48, depth=6, heads=4, num_classes=10).eval()
    with torch.no_grad():
        for weight in (p for p in model.blocks.parameters() if p.ndim > 1):
            weight.mul_(4)
        for site in sites.find(model):
            site.query_weight().mul_(4)
            site.key_weight().mul_(4)
    return model, [torch.randn(8, 3, 16, 16)]


@pytest.fixture(scope="module")
def healthy(vit) -> Readings:
    return read(*vit)[0]


def test_nothing_is_found_in_a_healthy_model(healthy):
    assert findings(healthy) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_gone_when_it_is_taken_out(vit, healthy, fault):
    model, batches = vit
    with planted(model, fault, FAULTS[fault].doses[-1]):
        found = {finding.name: finding for finding in findings(read(model, batches)[0])}
    assert FAULTS[fault].finding in found
    middle = 2 * 6 // 3 + 1
    where = {"every": set(range(1, 7)), "two": {middle, middle + 1}, "middle": {middle}, "last": {6}}
    told = set(found[FAULTS[fault].finding].layers)
    assert told & where[FAULTS[fault].where], "the layers named are those where it was planted"
    again = read(model, batches)[0]
    assert all(np.array_equal(again[name], healthy[name], equal_nan=True) for name in healthy.curves)


def test_every_finding_has_a_fault_that_is_planted():
    assert {fault.finding for fault in FAULTS.values()} == DETECTORS.keys()


def changed(readings: Readings, facts=None, **curves) -> Readings:
    given = {name: np.full_like(readings[name], value) for name, value in curves.items()}
    return replace(readings, curves={**readings.curves, **given}, facts={**readings.facts, **(facts or {})})


def test_how_bad_a_finding_is_depends_on_how_much_and_on_whom(healthy):
    def severity(name, **changes):
        (found,) = [finding for finding in findings(changed(healthy, **changes)) if finding.name == name]
        return found.severity

    assert [severity("tokens alike", cosine=end) for end in (0.6, 0.9, 0.97)] == ["note", "warning", "severe"]
    assert [severity("attention sink", top=share) for share in (0.5, 0.95)] == ["note", "warning"]
    assert [severity("embeddings alike", pooled_cosine=0.95, facts={"causal": c}) for c in (True, False)] == [
        "note",
        "warning",
    ], "a causal language model's embeddings mostly are alike"
    assert [severity("outlier tokens", norm_outlier=9, outlier_first=first) for first in (1, 0)] == ["note", "warning"]
    many = {"cosine": 0.99, "branch_residual": 0.01, "pooled_cosine": 1.0, "top": 1.0, "norm_outlier": 99.0}
    many |= {"influence": 0.0, "head_share": 0.0, "own": 1.0, "evenness": 1.0}
    found = findings(changed(healthy, **many))
    assert len(found) == MOST
    order = [SEVERITIES.index(finding.severity) for finding in found]
    assert order == sorted(order, reverse=True)
    assert [finding.severity for finding in found].count("severe") == 2, "the worst are not left out"


def test_too_little_data_and_unread_attention_are_no_finding(healthy):
    few = {"samples": 2, "tokens": 4}
    assert not findings(changed(healthy, facts=few, pooled_cosine=1.0, top=1.0))
    curves = {name: healthy[name] for name in ("cosine", "influence", "norm_outlier", "pooled_cosine")}
    assert not findings(replace(healthy, curves=curves))


def test_where_the_cosine_rose():
    assert where_it_rose(Readings({"cosine": np.array([0.1, 0.5, 0.4, 0.5, 0.6])}, {})) == (1,)
    assert where_it_rose(Readings({"cosine": np.array([0.1, 0.2, 0.3, 0.4, 0.5])}, {})) == (1, 2)
    assert named([3]) == "layer 3"
    assert named([1, 2, 3, 7, 9, 10]) == "layers 1-3, 7, 9-10"
