"""What a run did, as one HTML page and one picture. Standard library only: a report can be made where torch is not."""

from modernbert_train.report.html import write_loss_svg, write_report

__all__ = ["write_loss_svg", "write_report"]
