"""Plots and pages of runs."""

from wpr.report.page import write_report
from wpr.report.plots import draw_figure
from wpr.runs.read_problems import ReportError

__all__ = ["ReportError", "draw_figure", "write_report"]
