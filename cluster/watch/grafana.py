"""Grafana's format of a board: rows of panels, each a few queries over time."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "boards"

Json = dict[str, Any]  # Grafana's own format

_PANELS_PER_ROW = 3
_WIDTH = 24 // _PANELS_PER_ROW  # Grafana's grid has 24 columns
_HEIGHT = 8
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Panel:
    """`queries`: PromQL by legend; a legend may hold labels as `{{model}}`. `unit`: one of Grafana's unit ids."""

    title: str
    queries: Mapping[str, str]
    unit: str = "short"
    about: str = ""
    stacked: bool = False
    most: float | None = None


@dataclass(frozen=True, slots=True)
class Board:
    """`models_of`: the metric whose label `model` fills the board's list of models."""

    uid: str
    title: str
    about: str
    models_of: str
    rows: Mapping[str, Sequence[Panel]] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.uid.removeprefix('roundhouse-')}.json"


def dashboard(board: Board) -> Json:
    """The board in Grafana's format, schema version 39 (Grafana 11 and later read it)."""
    return {
        "uid": board.uid,
        "title": board.title,
        "description": board.about,
        "tags": ["roundhouse"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [_links()],
        "templating": {"list": [_datasource(), _models(board)]},
        "panels": list(_laid_out(board)),
    }


def _links() -> Json:
    """From each board to the others."""
    which = {"type": "dashboards", "title": "Roundhouse", "tags": ["roundhouse"], "icon": "dashboard", "tooltip": ""}
    return which | {"asDropdown": False, "includeVars": False, "keepTime": True, "targetBlank": False}


def _datasource() -> Json:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _models(board: Board) -> Json:
    return {
        "name": "model",
        "label": "Model",
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": f"label_values({board.models_of}, model)", "refId": "models"},
        "refresh": 2,  # when the time range changes
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".+",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _laid_out(board: Board) -> Iterator[Json]:
    """Rows and panels from top to bottom, with the numbers and places that Grafana wants."""
    number, top = 1, 0
    for title, panels in board.rows.items():
        place = {"h": 1, "w": 24, "x": 0, "y": top}
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        number, top = number + 1, top + 1
        for index, panel in enumerate(panels):
            down, right = divmod(index, _PANELS_PER_ROW)
            place = {"h": _HEIGHT, "w": _WIDTH, "x": right * _WIDTH, "y": top + down * _HEIGHT}
            yield _panel(panel, number, place)
            number += 1
        top += -(-len(panels) // _PANELS_PER_ROW) * _HEIGHT


def _panel(panel: Panel, number: int, place: Json) -> Json:
    custom: Json = {"fillOpacity": 10, "lineWidth": 1, "showPoints": "never"}
    if panel.stacked:
        custom |= {"fillOpacity": 40, "stacking": {"group": "A", "mode": "normal"}}
    limits = {"min": 0} if panel.most is None else {"min": 0, "max": panel.most}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": _DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom, **limits}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": _DATASOURCE, "expr": expression, "legendFormat": legend}
            for index, (legend, expression) in enumerate(panel.queries.items())
        ],
    }


def text(board: Board) -> str:
    """What the file of the board holds."""
    return json.dumps(dashboard(board), indent=2) + "\n"
