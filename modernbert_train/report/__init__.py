"""What runs did, as one HTML page and one picture. Nothing heavy: a report can be made where torch is not."""

from modernbert_train.report.compare import write_comparison
from modernbert_train.report.html import write_loss_svg, write_report
from modernbert_train.report.many import is_table, write_table_page

__all__ = ["is_table", "write_comparison", "write_loss_svg", "write_report", "write_table_page"]
