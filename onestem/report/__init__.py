"""The report of a plan: one self-contained HTML page."""

from onestem.report.page import MODES, Price, check_page, write_page
from onestem.report.tree import DrawnTree, savings_by_level
