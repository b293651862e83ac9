"""What `analyze` and `compare` tell, as one HTML file each that loads nothing."""

from ane_layers.analysis.report.pages import comparison_html, report_html, write_comparison, write_report

__all__ = ["comparison_html", "report_html", "write_comparison", "write_report"]
