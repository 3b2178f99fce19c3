from acutance.measure.profile import MetricValue, Profile


def made_profile(slope=1.0, shift=0.0, taps=("block",), metrics=("token_cosine", "rank_residual"), depth=2) -> Profile:
    readings = [
        MetricValue(tap, layer, metric, slope * layer + shift, 0.5, 7)
        for tap in taps
        for layer in range(depth + 1)
        for metric in metrics
    ]
    return Profile(tuple(readings), {"model": "ViT", "samples": 7, "dtype": "float32", "versions": {"torch": "2.13"}})
