"""What all studies share: their rows as a DataFrame, and their files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acutance.errors import MissingExtraError
from acutance.files.atomic import atomic_write, finite

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


def data_frame(rows: Any) -> pd.DataFrame:
    """What pandas makes of them."""
    try:
        import pandas as pd
    except ImportError as error:
        raise MissingExtraError("to_frame needs pandas: pip install 'acutance[report]'") from error
    return pd.DataFrame(rows)


def save_study(
    folder: str | os.PathLike[str], name: str, frame: pd.DataFrame, body: Mapping[str, Any], figure: Figure
) -> list[Path]:
    """name.csv, name.json, name.png and name.svg."""
    stem, text = Path(folder) / name, json.dumps(finite(body), indent=1, ensure_ascii=False)
    return [
        atomic_write(stem.with_suffix(".csv"), frame.to_csv(index=False, float_format="%.5g").encode()),
        atomic_write(stem.with_suffix(".json"), text.encode()),
        *save_picture(figure, stem),
    ]


def save_picture(figure: Figure, stem: Path) -> list[Path]:
    """stem.png and stem.svg, the latter without a date, so that the same numbers give the same file."""
    import matplotlib as mpl

    with mpl.rc_context({"svg.hashsalt": "acutance"}):
        png = atomic_write(stem.with_suffix(".png"), partial(figure.savefig, dpi=150, facecolor="white"))
        writer = partial(figure.savefig, facecolor="white", metadata={"Date": None})
        return [png, atomic_write(stem.with_suffix(".svg"), writer)]
