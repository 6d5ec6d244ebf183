"""grader/: when two written answers are equal. Read it only if you doubt a verdict of verify.py, its only caller.

    equality.py   the kinds of answers (numbers, lists, intervals, units, text ...) and what is equal within each
    latex.py      reads one formula and compares two formulas by their values
    worker.py     a child process for sums, integrals and limits, with limits on time and memory
"""
