"""What runs did, as one HTML page and one picture. Nothing heavy: a report can be made where torch is not."""

from modernbert_train.report.compare import write_comparison
from modernbert_train.report.html import write_loss_svg, write_report

__all__ = ["write_comparison", "write_loss_svg", "write_report"]
