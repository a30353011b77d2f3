"""Plots and pages of runs."""

from wpr.report.page import ReportError, write_report
from wpr.report.plots import draw_figure

__all__ = ["ReportError", "draw_figure", "write_report"]
