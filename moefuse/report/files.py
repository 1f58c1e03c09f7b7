"""A report as files in a folder, beside the graphs that `graph.dump` wrote there.

In: a `Report` and the folder of its dump. Out: `report.txt`, `report.json`, `index.json`, which lists every file, and
`index.html`, which shows the report and links them.
"""

import json
import logging
from pathlib import Path
from typing import Any

from moefuse.report.model import Report

SCHEMA = "moefuse.dump/1"


def write_report(directory: str | Path, report: Report) -> list[Path]:
    """Write the report and the index; the folder is made if missing. Without the extra html there is no index.html."""
    base = Path(directory)
    base.mkdir(parents=True, exist_ok=True)
    (base / "report.txt").write_text(f"{report}\n", encoding="utf-8")
    (base / "report.json").write_text(report.to_json() + "\n", encoding="utf-8")
    index = _index(base, report)
    (base / "index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    written = [base / "report.txt", base / "report.json", base / "index.json"]
    try:
        from moefuse.report import html

        links = [name for graph in index["graphs"] for files in graph["stages"].values() for name in files]
        page = html.render(report, files=["report.txt", "report.json", "index.json", *links])
    except ImportError as error:
        logging.getLogger(__name__).info("no index.html: %s", error)
        return written
    (base / "index.html").write_text(page, encoding="utf-8")
    return [*written, base / "index.html"]


def _index(base: Path, report: Report) -> dict[str, Any]:
    """Only this report's graphs: the folder may hold others of an earlier run."""
    graphs = [
        {
            "index": graph.index,
            "layers": len(graph.sites),
            "fused": graph.fused,
            "stages": {
                stage: sorted(path.name for path in base.glob(f"graph{graph.index}.{stage}.*"))
                for stage in ("before", "after")
            },
        }
        for graph in report.graphs
    ]
    return {"schema": SCHEMA, "report": "report.json", "graphs": graphs}
