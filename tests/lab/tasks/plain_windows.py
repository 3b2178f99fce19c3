"""Sliding windows and mean IoU a second time: NumPy, float64, pixel by pixel where that is bearable."""

import numpy as np


def bilinear(image, size):
    """(channels, height, width) resized; the centres of the corner pixels keep their distance to the border."""
    out = image
    for axis, wanted in ((1, size[0]), (2, size[1])):
        old = out.shape[axis]
        place = np.maximum((np.arange(wanted) + 0.5) * old / wanted - 0.5, 0)
        low = np.minimum(place.astype(int), old - 1)
        high, share = np.minimum(low + 1, old - 1), place - low
        shape = [-1 if a == axis else 1 for a in range(3)]
        share = share.reshape(shape)
        out = (1 - share) * out.take(low, axis) + share * out.take(high, axis)
    return out


def plain_probabilities(score, image, scales, flips, *, short, window, stride):
    """The mean over views of the softmax of averaged window scores; `score` maps (3, w, w) to (classes, w, w)."""
    height, width = image.shape[1:]
    found = []
    for scale in scales:
        factor = min(int(short * scale) / min(height, width), int(4 * short * scale) / max(height, width))
        view = bilinear(image, (int(height * factor + 0.5), int(width * factor + 0.5)))
        if min(view.shape[1:]) < window:
            h, w = view.shape[1:]
            ratio = max(h, w) / min(h, w)
            view = bilinear(view, (window, int(ratio * window)) if h < w else (int(ratio * window), window))
        for flip in flips:
            seen = view[..., ::-1] if flip else view
            total = count = 0
            for top in _starts(seen.shape[1], window, stride):
                for left in _starts(seen.shape[2], window, stride):
                    inside = (slice(None), slice(top, top + window), slice(left, left + window))
                    scores = score(seen[inside])
                    whole = np.zeros((len(scores), *seen.shape[1:]))
                    whole[inside] = scores
                    covered = np.zeros(seen.shape[1:])
                    covered[inside[1:]] = 1
                    total, count = total + whole, count + covered
            scores = bilinear(total / count, (height, width))
            scores = scores[..., ::-1] if flip else scores
            powers = np.exp(scores)
            found.append(powers / powers.sum(0))
    return np.mean(found, axis=0)


def _starts(extent, window, stride):
    starts = []
    place = 0
    while place + window < extent:
        starts.append(place)
        place += stride
    return [*starts, extent - window]
