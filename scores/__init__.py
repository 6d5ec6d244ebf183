"""scores/: from answers to numbers, for eval.py and plot.py. Skip it unless you change an answer file or a table.

    answers.py    files of answers: the settings that they depend on, then one line per response
    tables.py     pass@k and its standard error, the length sweep, the comparison of two models, and their text
"""
