"""Plots and pages of runs."""

from wpr.report.page import write_report
from wpr.report.problems import ReportError

__all__ = ["ReportError", "write_report"]
