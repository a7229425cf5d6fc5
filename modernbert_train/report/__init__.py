"""Reports: runs as one HTML page. Nothing heavy: a report can be made where torch is not."""

from modernbert_train.report.many import is_table, write_table_page
from modernbert_train.report.page import write_comparison, write_report

__all__ = ["is_table", "write_comparison", "write_report", "write_table_page"]
