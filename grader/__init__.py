"""grader/: when two written answers are equal. Skip it unless you doubt a verdict of verify.py, which is its only door.

    equality.py   the kinds of answers (numbers, lists, intervals, units, text ...) and what is equal within each
    latex.py      reads one formula and compares two formulas by their values
"""
