"""Plots and pages of runs."""

from wpr.report.page import ReportError, write_report
from wpr.report.picture import Picture
from wpr.report.plots import draw_figure

__all__ = ["Picture", "ReportError", "draw_figure", "write_report"]
