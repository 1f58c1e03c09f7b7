"""The journal: a report per compiled frame, bounded, thread-safe, and loud about what wasn't fused."""

import logging
import threading

import pytest
from torch._guards import CompileId

from moefuse.report import journal
from moefuse.report.journal import Journal
from moefuse.report.model import GraphReport, LayerReport


def graph(index: int, *layers: LayerReport, error: str = "", note: str = "") -> GraphReport:
    return GraphReport(index, layers, 10, 8, error=error, note=note)


def frame(number: int, again: int = 0) -> CompileId:
    return CompileId(frame_id=number, frame_compile_id=again)


FUSED = LayerReport("model.mlp", True, "sum_1", "model.py:3", target="cpu")
REFUSED = LayerReport("model.mlp", False, "mean", "model.py:5", "reduced by mean", "lift")
EXCLUDED = LayerReport("model.mlp", False, "sum_1", "model.py:3", "excluded by the option", "exclude")


def test_a_frame_compiled_again_joins_its_report() -> None:
    journal = Journal()
    journal.record(graph(0, FUSED), frame(0))
    journal.record(graph(1, FUSED), frame(1))
    journal.record(graph(2, FUSED), frame(0, again=1))
    assert [[g.index for g in report.graphs] for report in journal.reports()] == [[0, 2], [1]]


def test_frame_numbers_that_start_anew_are_new_frames() -> None:
    """After `torch._dynamo.reset()` a frame 0 is another one."""
    journal = Journal()
    journal.record(graph(0, FUSED), frame(0))
    journal.record(graph(1, FUSED), frame(0))
    assert [[g.index for g in report.graphs] for report in journal.reports()] == [[0], [1]]


def test_without_a_compile_id_each_graph_is_its_own() -> None:
    journal = Journal()
    for index in range(2):
        journal.record(graph(index, FUSED), None)
    assert len(journal.reports()) == 2


def test_indices_are_unique() -> None:
    journal = Journal()
    assert [journal.next_index() for _ in range(3)] == [0, 1, 2]


def test_reports_are_a_copy() -> None:
    journal = Journal()
    journal.record(graph(0, FUSED), frame(0))
    journal.reports().clear()
    assert len(journal.reports()) == 1


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "KEPT", 3)
    kept = Journal()
    for index in range(10):
        kept.record(graph(index, FUSED), frame(index))
    assert [report.graphs[0].index for report in kept.reports()] == [7, 8, 9]
    for index in range(10, 20):
        kept.record(graph(index, FUSED), frame(9, again=index))
    assert [g.index for g in kept.reports()[-1].graphs] == [17, 18, 19]


def test_frames_that_were_forgotten_are_forgotten_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of frames must not outgrow the reports, nor swallow a graph of a forgotten frame."""
    monkeypatch.setattr(journal, "KEPT", 2)
    kept = Journal()
    for index in range(50):
        kept.record(graph(index, FUSED), frame(index))
    assert len(kept._frames) <= 4
    kept.record(graph(50, FUSED), frame(0, again=1))
    assert any(g.index == 50 for report in kept.reports() for g in report.graphs)


def test_threads() -> None:
    kept = Journal()

    def work(number: int) -> None:
        for again in range(50):
            kept.record(graph(kept.next_index(), FUSED), frame(number, again))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(len(report.graphs) for report in kept.reports()) == [50] * 4
    indices = [g.index for report in kept.reports() for g in report.graphs]
    assert sorted(indices) == list(range(200))


# --- what is said aloud ----------------------------------------------------------------------------------


def said(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def test_refusals_are_warnings_with_reason_and_place(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "moefuse"):
        Journal().record(graph(0, FUSED, REFUSED, EXCLUDED), frame(0))
    assert said(caplog, logging.WARNING) == ["not fused: model.mlp: reduced by mean [model.py:5]"]
    assert said(caplog, logging.INFO) == ["fused model.mlp () on cpu"]


def test_nothing_found_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal()
    with caplog.at_level(logging.INFO, "moefuse"):
        for index in range(3):
            journal.record(graph(index, note="no routing operation in this graph"), frame(index))
    (message,) = said(caplog, logging.WARNING)
    assert "no MoE layer found in a graph of 10 nodes (no routing operation in this graph)" in message
    assert "moefuse explain" in message


def test_an_error_is_no_empty_graph(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "moefuse"):
        Journal().record(graph(0, error="Traceback ..."), frame(0))
    assert said(caplog, logging.WARNING) == []
